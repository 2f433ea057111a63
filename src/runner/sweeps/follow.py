"""The display as a listener of events of jobs that run side by side."""

from __future__ import annotations

from pathlib import Path

from runner.sweeps.events import Event
from runner.sweeps.view import Display
from runner.tracking.console import Console


class PoolDisplay:
    """Shows the events that `runner.sweeps.events` announces: all as lines, or above a live table those that matter.

    Args:
        folder: of the sweep.
        console: where to show them.
    """

    def __init__(self, folder: Path, console: Console) -> None:
        self._display = Display(folder, console)
        self.period_s = 1.0 if self._display.live else None

    def tell(self, event: Event | None) -> None:
        """Show an event; None to refresh the table."""
        live = self._display.live
        if event is not None and (not live or event.kind in ("failed", "retried", "preempted")):
            self._display.line("\n    ".join(event.lines) if live else event.line, error=event.kind == "failed")
        self._display.refresh(now=event is not None and event.kind != "skipped")

    def stop(self) -> None:
        """Remove the table."""
        self._display.stop()
