"""Tells of steps that were left out as their gradients were not finite, and keeps what led to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runner.tracking.console import Console


class SkippedSteps:
    """Warns of each such step and writes its batch beside the run, as `nonfinite/step_0000000012.pt`.

    Args:
        directory: of the run.
        console: where to warn.
    """

    def __init__(self, directory: Path, console: Console) -> None:
        self._folder, self._console = directory / "nonfinite", console
        self._untold = 0

    def on_step_skipped(self, loop: Any, step: int, diagnosis: Any) -> None:
        """Tell of a step; `diagnosis` is None for those of which only the number is told."""
        if diagnosis is None:
            self._untold += 1
            if (self._untold & (self._untold - 1)) == 0:  # 1, 2, 4, 8, ...
                self._console.warn(
                    f"step {step} was left out too, {self._untold} since the last one that was looked into"
                )
            return
        saved = self._save(step, diagnosis.batch) if diagnosis.batch else ""
        self._console.warn(f"{diagnosis}; it was left out{saved}")

    def on_rollback(self, loop: Any, found: Any) -> None:
        """Tell from where training goes on."""
        position = loop.state.position
        self._console.warn(f"training goes on from step {position.global_step}, and leaves out step {found.step}")

    def _save(self, step: int, batch: dict[str, Any]) -> str:
        import torch

        path = self._folder / f"step_{step:010d}.pt"
        try:
            self._folder.mkdir(exist_ok=True)
            torch.save(batch, path)
        except (OSError, RuntimeError) as error:  # what led to a failure must not be hidden by another one
            return f"; its batch could not be written to {path}: {error}"
        return f"; its batch is in {path}"
