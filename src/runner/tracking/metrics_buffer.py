"""Metrics on their way to those who show and store them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

Taker = Callable[[str, dict[str, float], int, int], None]
"""Called with (split, metrics, global_step, epoch)."""

_PERIOD_S = 1.0


class MetricsBuffer:
    """Hands metrics on, many at a time where training logs more often than once a second.

    Formatting and writing one line between two small steps takes several times as long as one of many in a row, which adds
    up where a step takes less than a millisecond. Metrics of other splits than `train` are handed on at once, and with them
    whatever waits. What waits when the process is killed is younger than the last checkpoint, so a resumed run logs it again.

    Args:
        takers: each gets all metrics in their order.
    """

    def __init__(self, takers: Sequence[Taker]) -> None:
        self._takers = list(takers)
        self._waiting: list[tuple[str, dict[str, float], int, int]] = []
        self._emptied = float("-inf")

    def __call__(self, split: str, metrics: dict[str, float], global_step: int, epoch: int) -> None:
        """Take metrics, which must not be changed afterwards."""
        self._waiting.append((split, metrics, global_step, epoch))
        if split != "train" or time.monotonic() - self._emptied >= _PERIOD_S:
            self.empty()

    def empty(self) -> None:
        """Hand on what waits; called before every checkpoint and at the end."""
        waiting, self._waiting = self._waiting, []
        for take in self._takers:
            for metrics in waiting:
                take(*metrics)
        self._emptied = time.monotonic()
