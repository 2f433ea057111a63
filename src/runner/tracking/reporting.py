"""What a run reports while it trains: metrics, collected before they are shown and stored, and steps that were skipped."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from runner.tracking.console import Console

Sink = Callable[[str, dict[str, float], int, int], None]
"""Called with (split, metrics, global_step, epoch)."""

_PERIOD_S = 1.0


class MetricsBuffer:
    """Passes metrics on to each sink in groups if training logs more often than once a second.

    Formatting and writing one line between two small steps takes several times as long as one of many in a row, which adds
    up if a step takes less than a millisecond. Metrics of other splits than `train` are passed on at once, along with
    everything that waits. If the process is killed, what waited is younger than the last checkpoint, so a resumed run logs
    it again.
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


class SkippedSteps:
    """A callback that warns of skipped steps and writes their batches, as `nonfinite/step_0000000012.pt` in the run directory."""

    def __init__(self, directory: Path, console: Console) -> None:
        self._folder, self._console = directory / "nonfinite", console
        self._undiagnosed = 0

    def on_step_skipped(self, loop: Any, step: int, diagnosis: Any) -> None:
        """Report a step; `diagnosis` is None if its cause was not examined."""
        if diagnosis is None:
            self._undiagnosed += 1
            if (self._undiagnosed & (self._undiagnosed - 1)) == 0:  # 1, 2, 4, 8, ...
                self._console.warn(f"skipped step {step} ({self._undiagnosed} skipped since the last diagnosis)")
            return
        saved = self._save(step, diagnosis.batch) if diagnosis.batch else ""
        self._console.warn(f"{diagnosis}; skipped this step{saved}")

    def _save(self, step: int, batch: dict[str, Any]) -> str:
        import torch

        path = self._folder / f"step_{step:010d}.pt"
        try:
            self._folder.mkdir(exist_ok=True)
            torch.save(batch, path)
        except (OSError, RuntimeError) as error:  # must not hide the failure that led here
            return f"; its batch could not be written to {path}: {error}"
        return f"; its batch is in {path}"
