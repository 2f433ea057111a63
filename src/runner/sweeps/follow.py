"""The live table of a sweep, a run or a folder of runs on a terminal, and plain lines where there is none."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from runner.sweeps.events import Event
from runner.sweeps.view import View, lines_of, look, progress_line, table_of
from runner.tracking.console import Console

_PERIOD_S = 1.0
_MOST_SHARE = 0.05  # of the time for looking at the files
_PLAIN_S = 60.0
_ROWS_BESIDE = 6  # of the terminal, for what is not a job


class Display:
    """Shows what happens in a folder each time that `refresh` is called, at most once a second.

    Args:
        folder: a sweep, a run, or a folder of runs.
        console: where to show it: a live table if that is a terminal, otherwise lines on what changed, and one a minute.
    """

    def __init__(self, folder: Path, console: Console) -> None:
        self._folder, self._console = folder, console
        self._due = self._line_due = 0.0
        self._view: View | None = None

    def refresh(self, now: bool = False) -> View:
        """Look at the files if it is time, or `now`, and show them; returns what was seen last."""
        began = time.monotonic()
        if self._view is not None and began < self._due and not now:
            return self._view
        before, self._view = self._view, look(self._folder)
        size = self._console.size
        if size is not None:
            self._console.live(table_of(self._view, size[0], max(3, size[1] - _ROWS_BESIDE)))
        else:
            for line in lines_of(before, self._view):
                self._console.line(line)
            if began >= self._line_due:
                self._console.line(progress_line(self._view))
                self._line_due = began + _PLAIN_S
        ended = time.monotonic()
        self._due = ended + max(_PERIOD_S, (ended - began) / _MOST_SHARE)
        return self._view

    def stop(self) -> None:
        """Remove the table."""
        self._console.stop()


def follow(folder: Path, console: Console, sleep: Callable[[float], None] = time.sleep) -> None:
    """Show what happens in a folder until nothing runs there any more, or the user presses Ctrl-C."""
    display = Display(folder, console)
    try:
        while not display.refresh().done:
            sleep(_PERIOD_S / 4)
    except KeyboardInterrupt:
        pass
    finally:
        display.stop()


class PoolDisplay:
    """Tells the events of jobs that run side by side, above a live table if there is a terminal.

    Args:
        folder: of the sweep.
        console: where to show them.
    """

    def __init__(self, folder: Path, console: Console) -> None:
        self._console = console
        self._display = Display(folder, console) if console.size is not None else None

    def tell(self, event: Event | None) -> None:
        """Show an event; None to refresh the table."""
        if event is not None and (self._display is None or event.kind in ("failed", "retried", "preempted")):
            show = self._console.error if event.kind == "failed" else self._console.line
            show(event.line if self._display is None else "\n    ".join(event.lines))
        if self._display is not None:
            self._display.refresh(now=event is not None and event.kind != "skipped")

    @property
    def period_s(self) -> float | None:
        """How often to refresh the table; None if there is none."""
        return None if self._display is None else _PERIOD_S

    def stop(self) -> None:
        """Remove the table."""
        self._console.stop()
