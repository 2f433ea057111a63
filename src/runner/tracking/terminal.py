"""Drawing on a terminal with rich; imported only if there is one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TextIO

from rich import box
from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from runner.tracking.formats import STATE_COLOURS, Line, clean, is_number

_WIDEST_BAR, _NARROWEST_BAR, _EPOCH_BAR = 30, 6, 16
_HIGH_ENOUGH = 10  # rows
_SHORT = 14  # characters of cells that stay on one line


class _Rich(RichConsole):
    """Rich, without two behaviours that do not suit a training run."""

    def on_broken_pipe(self) -> None:
        # Rich would end the process; the run continues without a display.
        raise BrokenPipeError

    def show_cursor(self, show: bool = True) -> bool:
        # A live bar hides the cursor, and a killed process could not restore it.
        return False


class Terminal:
    """Lines, tables and one live display on a terminal; printed text appears above it. Raises `OSError` if the terminal is gone."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._rich = _Rich(file=stream, force_terminal=True, highlight=False, markup=False, emoji=False)
        self._live: Live | None = None

    @property
    def size(self) -> tuple[int, int]:
        """Columns and rows."""
        return self._rich.width, self._rich.height

    def lines(self, lines: Sequence[Line]) -> None:
        """Show lines of (text, style); the terminal wraps them, so that paths can be copied whole."""
        for line in lines:
            text = Text.assemble(*line, end="")
            text.rstrip()
            self._rich.print(text, soft_wrap=True)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Show a table below its title, which may be empty."""
        if title:
            self.lines([[(clean(title), "bold")]])
        self._rich.print(table_of(columns, rows))

    def bar(
        self, before: str, share: float, after: Sequence[str], *, epoch: float | None = None, below: Sequence[Line] = ()
    ) -> None:
        """Draw the live line: `before`, a bar filled to `share` (0 to 1), `after`; cropped at the right edge.

        If the terminal is high enough, a bar of the epoch and lines `below` follow.
        """
        # One cell stays free: some terminals wrap after the last one, and the bar would move down the screen.
        room, tail = max(1, self._rich.width - 1), "  ".join(after)
        cells = min(_WIDEST_BAR, room - len(before) - len(tail) - 4)
        first = _row(before, share, cells, tail, "green") if cells >= _NARROWEST_BAR else Text(f"{before}  {tail}")
        shown: list[RenderableType] = [first]
        if self._rich.height >= _HIGH_ENOUGH:
            shown += [_row("  this epoch", epoch, _EPOCH_BAR, "", "cyan")] if epoch is not None else []
            shown += [Text.assemble(*line) for line in below]
        for text in (each for each in shown if isinstance(each, Text)):
            text.no_wrap = True
            text.truncate(room, overflow="crop" if text is first else "ellipsis")
        self.draw(Group(*shown))

    def draw(self, shown: RenderableType) -> None:
        """Draw something live at the bottom."""
        if self._live is None:
            # Text that other code prints goes above the bar, unless it is redirected away from this terminal.
            self._live = Live(
                Text(""),
                console=self._rich,
                auto_refresh=False,
                transient=True,
                redirect_stdout=sys.stdout is self._stream,
                redirect_stderr=sys.stderr.isatty(),
            )
            self._live.start()
        self._live.update(shown, refresh=True)

    def stop(self) -> None:
        """Remove the live display."""
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()


def _row(before: str, share: float, cells: int, after: str, style: str) -> Table:
    """A bar between two texts."""
    row = Table.grid(padding=(0, 2, 0, 0))
    bar = ProgressBar(1.0, share, cells, complete_style=style, finished_style=style)
    row.add_row(Text(before, no_wrap=True), bar, Text(after, no_wrap=True))
    return row


def table_of(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table whose cells are folded where the terminal is narrow, with numbers to the right and states in their colours."""
    table = Table(box=box.SIMPLE_HEAD)
    table.show_edge = table.pad_edge = False
    table.padding = (0, 1, 0, 0)
    for name, cells in zip(columns, zip(*rows, strict=True) if rows else [()] * len(columns), strict=True):
        numbers = {is_number(cell) for cell in cells if cell != "-"} == {True}
        short = max(map(len, cells), default=0) <= _SHORT
        table.add_column(Text(clean(name)), justify="right" if numbers else "left", overflow="fold", no_wrap=short)
    for row in rows:
        table.add_row(*(Text(" ".join(clean(cell).split()), STATE_COLOURS.get(cell, "")) for cell in row))
    return table
