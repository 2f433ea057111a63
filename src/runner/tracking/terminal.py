"""Drawing on a terminal with rich; imported only if there is one."""

from __future__ import annotations

import sys
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.console import Console as RichConsole
from rich.live import Live
from rich.table import Table
from rich.text import Text

from runner.tracking.formats import clean, encodable, is_number

_WIDEST_BAR = 30
_NARROWEST_BAR = 6


class _Rich(RichConsole):
    """Rich, without two behaviours that do not suit a training run."""

    def on_broken_pipe(self) -> None:
        # Rich would end the process; the run continues without a display.
        raise BrokenPipeError

    def show_cursor(self, show: bool = True) -> bool:
        # A live bar hides the cursor, and a killed process could not restore it.
        return False


class Terminal:
    """Text, tables and one live bar on a terminal; printed text appears above the bar.

    Raises:
        OSError: the terminal or pipe is gone.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._encoding = getattr(stream, "encoding", None)
        self._unicode = (self._encoding or "").lower().replace("-", "").startswith("utf")
        self._rich = _Rich(file=stream, force_terminal=True, highlight=False, markup=False, emoji=False)
        self._live: Live | None = None

    def text(self, text: str, style: str = "") -> None:
        """Show `text`; the terminal wraps it, so that paths can be copied whole."""
        self._rich.print(Text(self._safe(text), style=style), soft_wrap=True)

    def header(self, title: str, rows: list[tuple[str, str, str]]) -> None:
        """Show padded rows of (label, value, reason) below a title."""
        self.text(title, "bold")
        for row in rows:
            label, value, reason = (self._safe(part) for part in row)
            line = Text.assemble("  ", (label, "cyan"), "  ", (value, "bold"), "  ", (reason, "dim"))
            line.rstrip()
            self._rich.print(line, soft_wrap=True)

    def table(self, title: str, columns: list[str], rows: list[list[str]]) -> None:
        """Show a table; columns of numbers are aligned right."""
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
        for index, head in enumerate(columns):
            numbers = bool(rows) and all(is_number(row[index]) for row in rows)
            table.add_column(Text(self._safe(clean(head))), justify="right" if numbers else "left", overflow="fold")
        for row in rows:
            table.add_row(*(Text(self._safe(clean(cell))) for cell in row))
        if title:
            self.text(title, "bold")
        self._rich.print(table)

    def bar(self, before: str, share: float, after: str, texts: list[str]) -> None:
        """Draw the live line: `before`, a bar filled to `share` (0 to 1), `after`, `texts`; cropped at the right edge."""
        # Not rich.progress: its columns wrap or shrink the text on a narrow terminal, where the bar has to give way.
        tail = "  ".join([after, *texts])
        # One cell stays free: some terminals wrap after the last one, and the bar would move down the screen.
        room = self._rich.width - 1
        cells = min(_WIDEST_BAR, room - len(before) - len(tail) - 4)
        line = Text(self._safe(before) + "  ", no_wrap=True, overflow="crop", end="")
        if cells >= _NARROWEST_BAR:
            filled = round(min(max(share, 0.0), 1.0) * cells)
            full, empty = ("━", "─") if self._unicode else ("#", "-")
            line.append(full * filled, style="green")
            line.append(empty * (cells - filled), style="dim")
            line.append("  ")
        line.append(self._safe(tail))
        line.truncate(max(1, room), overflow="crop")
        if self._live is None:
            self._live = self._make_live()
        self._live.update(line, refresh=True)

    def stop(self) -> None:
        """Remove the live line."""
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    def _make_live(self) -> Live:
        # Text that other code prints goes above the bar, unless it is redirected away from this terminal.
        live = Live(
            Text(""),
            console=self._rich,
            auto_refresh=False,
            transient=True,
            redirect_stdout=sys.stdout is self._stream,
            redirect_stderr=sys.stderr.isatty(),
        )
        live.start()
        return live

    def _safe(self, text: str) -> str:
        return encodable(text, self._encoding)
