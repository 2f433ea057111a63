"""How a report is shown in a terminal, a pipe or a file."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from runner.config.secrets import mask_text
from runner.reports.reading import Run
from runner.reports.table import Table
from runner.tracking.formats import clean, encodable, is_number

_WIDEST_CELL = 40
_WIDE = 1000
_STYLES = {"failed": "red", "died": "red", "running": "cyan", "preempted": "yellow"}


class Screen:
    """Standard output: a terminal with its width and colours, or plain text of any width."""

    def __init__(self) -> None:
        on_terminal = sys.stdout.isatty()
        self.narrow = on_terminal or "COLUMNS" in os.environ
        self._console = Console(
            file=sys.stdout, width=None if self.narrow else _WIDE, highlight=False, markup=False, soft_wrap=True
        )
        self.width = self._console.width

    def line(self, text: str = "", style: str = "") -> None:
        """Show a line; secrets are masked."""
        text = encodable(mask_text(clean(text)), getattr(sys.stdout, "encoding", None))
        self._console.print(Text(text, style), soft_wrap=True)

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]], last: Sequence[str] = ()) -> list[str]:
        """Show a table; columns that the terminal has no room for are skipped, and their names returned.

        Columns are skipped from the right, those named in `last` after all others; the first one always stays.
        """
        cells = [[encodable(mask_text(_short(clean(cell))), _encoding()) for cell in row] for row in rows]
        shown = list(range(len(head)))
        widths = [max(cell_len(name), *(cell_len(row[at]) for row in cells), 0) for at, name in enumerate(head)]
        order = sorted(shown[1:], key=lambda at: (head[at] in last, -at))
        while self.narrow and len(shown) > 1 and sum(widths[at] + 2 for at in shown) > self.width and order:
            shown.remove(order.pop(0))
        table = RichTable(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
        for at in shown:
            right = bool(cells) and all(is_number(row[at]) or row[at] == "-" for row in cells)
            table.add_column(
                Text(encodable(head[at], _encoding())), justify="right" if right else "left", no_wrap=True,
                overflow="ellipsis",
            )  # fmt: skip
        for row in cells:
            table.add_row(*(Text(row[at], _STYLES.get(row[at], "")) for at in shown))
        self._console.print(table, soft_wrap=False)
        return [name for at, name in enumerate(head) if at not in shown]


def _encoding() -> str | None:
    return getattr(sys.stdout, "encoding", None)


def _short(cell: str) -> str:
    cell = " ".join(cell.split())
    return cell if len(cell) <= _WIDEST_CELL else f"{cell[: _WIDEST_CELL // 2]}...{cell[3 - _WIDEST_CELL // 2 :]}"


def show_table(screen: Screen, table: Table, runs: Sequence[Run], notes: Sequence[str]) -> None:
    """Show the table, notes, and the failed runs with the command that repeats each."""
    finished = sum(run.status == "finished" for run in runs)
    screen.line(f"{finished} of {len(runs)} runs finished", "bold")
    skipped = screen.table(table.head, table.cells(), last=[*table.metrics[:1], "status"])
    if skipped:
        many = f"{', '.join(skipped[:5])}{' ...' if len(skipped) > 5 else ''}"
        screen.line(f"no room for {many}; choose columns with columns=, or write csv=FILE", "yellow")
    for note in notes:
        screen.line(note, "yellow")
    for run in runs:
        if run.repeat:
            screen.line(f"error: {run.path} {run.status}: {run.error or 'no reason given'}", "bold red")
            for name, text in (("log", str(run.path / "run.log")), ("again", run.repeat)):
                screen.line(f"    {name}: {text}")
