"""Collects metrics before they are shown and stored."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

Sink = Callable[[str, dict[str, float], int, int], None]
"""Called with (split, metrics, global_step, epoch)."""

_PERIOD_S = 1.0


class MetricsBuffer:
    """Passes metrics on in groups if training logs more often than once a second.

    Formatting and writing one line between two small steps takes several times as long as one of many in a row, which adds
    up if a step takes less than a millisecond. Metrics of other splits than `train` are passed on at once, along with
    everything that waits. If the process is killed, what waited is younger than the last checkpoint, so a resumed run logs
    it again.

    Args:
        sinks: each gets all metrics in order.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = list(sinks)
        self._waiting: list[tuple[str, dict[str, float], int, int]] = []
        self._emptied = float("-inf")

    def __call__(self, split: str, metrics: dict[str, float], global_step: int, epoch: int) -> None:
        """Add metrics, which must not be changed afterwards."""
        self._waiting.append((split, metrics, global_step, epoch))
        if split != "train" or time.monotonic() - self._emptied >= _PERIOD_S:
            self.empty()

    def empty(self) -> None:
        """Pass on everything that waits; called before every checkpoint and at the end."""
        waiting, self._waiting = self._waiting, []
        for sink in self._sinks:
            for metrics in waiting:
                sink(*metrics)
        self._emptied = time.monotonic()
