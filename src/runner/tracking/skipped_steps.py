"""Reports steps that were skipped because their gradients were not finite, and stores their batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runner.tracking.console import Console


class SkippedSteps:
    """A callback that warns of skipped steps and writes their batches, as `nonfinite/step_0000000012.pt`.

    Args:
        directory: run directory.
        console: where to warn.
    """

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
