"""A report on a terminal, a pipe or a file."""

from __future__ import annotations

import os
from collections.abc import Sequence

from runner.lab.report.report import Report
from runner.lab.report.table import text_of
from runner.sweeps.table import finished_of, print_failure
from runner.tracking.console import Console
from runner.tracking.formats import clean, column_widths

_WIDEST_CELL = 40
_MOST_NAMES, _MOST_TENSORS = 5, 20


def show(found: Report, console: Console) -> None:
    """Show the table, notes, the failed runs with the command that repeats each, the difference and the comparison."""
    table, runs = found.table, found.runs
    title = finished_of([run.status for run in runs], "run")
    skipped = _columns(console, title, table.head, table.cells(), [*reversed(table.keys), *table.metrics[:1]])
    if skipped:
        many = f"{', '.join(skipped[:_MOST_NAMES])}{' ...' if len(skipped) > _MOST_NAMES else ''}"
        console.line(f"no room for {many}; choose columns with columns=, or write csv=FILE", "yellow")
    for note in found.notes:
        console.line(note, "yellow")
    for run in runs:
        if run.repeat:
            print_failure(console, f"{run.path} {run.status}", run.error, str(run.path / "run.log"), run.repeat)
    if found.difference is not None:
        _show_difference(found, console)
    if found.comparison is not None:
        _show_comparison(found, console)


def _show_difference(found: Report, console: Console) -> None:
    both = found.difference
    assert both is not None
    names = [run.name for run in found.runs]
    for title, rows in (("config", both.config), ("environment", both.environment), ("metrics", both.metrics)):
        cells = [[name, text_of(one), text_of(other)] for name, one, other in rows]
        console.line("")
        if cells:
            _columns(console, title, ["", *names], cells)
        else:
            console.line(f"{title}: no difference", "bold")
    console.line("")
    one, other = both.sha256
    console.line("weights" if one != other or one is None else "weights: the same bits", "bold")
    for name, digest in zip(names, both.sha256, strict=True):
        console.line(f"SHA-256 {digest or 'unknown'}  {name}")
    if both.note:
        console.line(both.note)
    if both.tensors:
        cells = [[each.name, f"{each.largest:.4g}", each.note] for each in both.tensors[:_MOST_TENSORS]]
        _columns(console, "", ["tensor", "largest difference", ""], cells)
        more = len(both.tensors) - _MOST_TENSORS
        console.line(f"{f'{more} more tensors differ, ' if more > 0 else ''}{both.tensors_equal} tensors are equal")


def _show_comparison(found: Report, console: Console) -> None:
    comparison = found.comparison
    assert comparison is not None
    console.line("")
    title = "worse than the baseline" if comparison.worse else "no worse than the baseline"
    console.line(title, "bold red" if comparison.worse else "bold green")
    cells = [
        [each.setting, each.measure, each.before, each.now, each.change, each.allowed, each.verdict]
        for each in comparison.measures
    ]
    head = ["setting", "measure", "baseline", "now", "change", "allowed", "verdict"]
    _columns(console, "", head, cells, ["verdict"])
    for line in comparison.notes:
        console.line(line, "yellow")
    for line in comparison.reasons:
        console.line(f"worse: {line}", "bold red")


def _columns(
    console: Console, title: str, head: Sequence[str], rows: Sequence[Sequence[str]], last: Sequence[str] = ()
) -> list[str]:
    """Show a table; columns that there is no room for are skipped, and their names returned.

    Columns are skipped from the right, then those named in `last` in that order; the first one always stays.
    """
    cells = [[_short(clean(cell)) for cell in row] for row in rows]
    shown, widths = list(range(len(head))), column_widths(head, cells)
    size = console.size
    room = size[0] if size is not None else int(os.environ.get("COLUMNS") or 0)
    # What is to the right is the least important, but for the columns that tell the rows apart.
    order = sorted(shown[1:], key=lambda at: (last.index(head[at]) if head[at] in last else -1, -at))
    while room and order and sum(widths[at] + 2 for at in shown) > room:
        shown.remove(order.pop(0))
    console.table(title, [head[at] for at in shown], [[row[at] for at in shown] for row in cells])
    return [name for at, name in enumerate(head) if at not in shown]


def _short(cell: str) -> str:
    cell = " ".join(cell.split())
    return cell if len(cell) <= _WIDEST_CELL else f"{cell[: _WIDEST_CELL // 2]}...{cell[3 - _WIDEST_CELL // 2 :]}"
