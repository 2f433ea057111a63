"""A report of a set of runs: in Python, what `from runner import runs, report` gives, and on a terminal, a pipe or a file."""

from __future__ import annotations

import json as json_format
import os
import shlex
import sys
from collections import UserList
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from runner.base.errors import UserError, require
from runner.base.files import finite, write_atomically
from runner.base.secrets import mask_text, mask_values
from runner.config.keys import flatten
from runner.lab.report.baseline import Comparison, baseline_text, compare, measure, read_baseline
from runner.lab.report.page import page
from runner.lab.report.reading import MEASURED, Run, find_runs, lines_of
from runner.lab.report.table import Spread, Table, by_task, differing, differing_keys, make_tables, text_of
from runner.sweeps.run import quoted
from runner.sweeps.table import finished_of, print_failure
from runner.tracking.console import Console
from runner.tracking.formats import amount, clean, column_widths, csv_text, markdown_table, markdown_text

OUTPUTS = "outputs"
_NOT_COMPARED = ("command", "repeating", "variables.SLURM_JOB_ID")  # of two environments
Place = str | Path | Run | Iterable[str | Path | Run]


class Runs(UserList[Run]):
    """Runs in the order of their folders, with a table for a notebook and for pandas."""

    def __init__(self, found: Iterable[Run], notes: Iterable[str] = ()) -> None:
        super().__init__(found)
        self.notes = tuple(notes)

    def __repr__(self) -> str:
        return f"<{len(self)} runs>"

    def table(
        self, columns: Iterable[str] = (), sort: str | None = None, seeds: Literal["folded", "each"] = "folded"
    ) -> Table:
        """The table of the runs, see `runner.report`."""
        return make_tables(self.data, columns, sort, seeds == "each")[0]

    def to_pandas(self) -> Any:
        """A pandas DataFrame with a row for each run: its path, status, keys that differ, metrics and time."""
        require("to_pandas", "pandas", "pandas")
        import pandas

        keys = differing_keys(self.data) if self.data else []
        rows = []
        for run in self.data:
            row = {"run": str(run.path), "status": run.status, **{key: run.value(key) for key in keys}}
            rows.append(row | run.metrics | run.speed | {"time_s": run.value("time_s"), "error": run.error})
        return pandas.DataFrame(rows)

    def _repr_html_(self) -> str:
        return "".join(table._repr_html_() for table in make_tables(self.data)[1:]) if self.data else "no runs"


@dataclass(frozen=True)
class Difference:
    """The differences of two runs: for each part, (name, value of the first, value of the second)."""

    config: list[tuple[str, Any, Any]]
    environment: list[tuple[str, Any, Any]]
    metrics: list[tuple[str, Any, Any]]
    sha256: tuple[str | None, str | None]  # of the weights


def difference(first: Run, second: Run) -> Difference:
    """Compare two runs; `audit a=RUN b=RUN` compares their checkpoints tensor by tensor."""
    metrics = [run.metrics | run.speed | {"time_s": run.value("time_s")} for run in (first, second)]
    names = sorted(dict.fromkeys([*metrics[0], *metrics[1]]), key=MEASURED.__contains__)
    environment = differing(flatten(first.environment), flatten(second.environment))
    return Difference(
        config=differing(first.config, second.config),
        environment=[each for each in environment if not each[0].startswith(_NOT_COMPARED)],
        metrics=[(name, metrics[0].get(name), metrics[1].get(name)) for name in names],
        sha256=(first.summary.get("weights_sha256"), second.summary.get("weights_sha256")),
    )


@dataclass(frozen=True)
class Report:
    """A report of runs.

    Attributes:
        runs: those that were meant.
        table: the table of them.
        tables: one for each task.
        notes: what was noticed while reading them.
        difference: what differs, if there are exactly two runs.
        comparison: with the baseline, if there is one.
    """

    runs: Runs
    table: Table
    tables: tuple[Table, ...]
    notes: tuple[str, ...] = ()
    difference: Difference | None = None
    comparison: Comparison | None = None

    def to_pandas(self) -> Any:
        """The table as a pandas DataFrame: a row for each setting, with mean and deviation."""
        require("to_pandas", "pandas", "pandas")
        import pandas

        head, lines = self.table.plain()
        return pandas.DataFrame([dict(zip(head, line, strict=True)) for line in lines])

    def to_json(self) -> dict[str, Any]:
        """The table and the runs, ready for JSON."""
        keys = differing_keys(self.runs)
        content: dict[str, Any] = {
            "metric": self.table.metric,
            "rows": [
                {"runs": [str(run.path) for run in row.runs], "status": row.status}
                | {name: asdict(value) if isinstance(value, Spread) else value for name, value in row.values.items()}
                for row in self.table.rows
            ],
            "runs": [
                {"run": str(run.path), "status": run.status, "error": run.error, "again": run.repeat or None}
                | {"keys": {key: run.value(key) for key in keys}, "metrics": run.metrics, "time_s": run.value("time_s")}
                for run in self.runs
            ],
            "notes": list(self.notes),
        }
        for name in ("difference", "comparison"):
            if found := getattr(self, name):
                content[name] = asdict(found)
        return dict(finite(mask_values(content)))

    def to_csv(self) -> str:
        """The table as CSV, with full numbers."""
        return mask_text(csv_text(*self.table.plain()))

    def to_markdown(self) -> str:
        """The table as Markdown, and the failed runs with the command that repeats each."""
        text = []
        for task, table in zip(by_task(self.runs), self.tables, strict=True):
            text += [f"## {markdown_text(task)}", ""] if len(self.tables) > 1 else []
            text += [*markdown_table(table.head, table.cells()), *([""] if len(self.tables) > 1 else [])]
        for run in self.runs:
            if run.repeat:
                failure = markdown_text(f"{run.path} {run.status}: {run.error or 'no reason given'}")
                text += ["", failure, "", f"    {' '.join(clean(run.repeat).splitlines())}"]
        return mask_text("\n".join(text) + "\n")

    def _repr_html_(self) -> str:
        return "".join(table._repr_html_() for table in self.tables)


def runs(*places: Place) -> Runs:
    """Read runs from their folders, also while they run; nothing is written and torch is not imported.

    Args:
        places: run directories, sweeps, folders that hold some at any depth, or glob patterns, runs that were read before,
            or lists of them; `outputs` if there is none.

    Raises:
        UserError: if a place does not exist or holds no run.
    """
    return Runs(*find_runs([*_paths(places)] or [OUTPUTS]))


def report(
    *places: Place,
    columns: str | Iterable[str] = (),
    sort: str | None = None,
    seeds: Literal["folded", "each"] = "folded",
    diff: bool | None = None,
    csv: str | Path | None = None,
    md: str | Path | None = None,
    json: str | Path | None = None,
    html: str | Path | None = None,
    against: str | Path | None = None,
    save_baseline: str | Path | None = None,
    tolerance: Mapping[str, float] | None = None,
) -> Report:
    """Report on runs, as `python -m runner report` does.

    Args:
        places: see `runs`.
        columns: keys and metrics to show, in a list or separated by commas; empty for the keys that differ and the
            monitored metric.
        sort: what to sort by, with `-` in front for the largest first; None for the monitored metric, the best first.
        seeds: `each` for a row for every repetition.
        diff: whether to compare two runs with each other; None if there are exactly two.
        csv, md, json, html: files to write; one of them may be `-`, standard output.
        against: a baseline file, a run or a sweep to compare with.
        save_baseline: file to write a baseline into; `-` is standard output.
        tolerance: allowed changes by measure, see docs/reference/verbs/report.md.

    Raises:
        UserError: with what is wrong; or a file cannot be written.
    """
    # Mistakes are found before hundreds of files are read
    if seeds not in ("folded", "each"):
        raise UserError("seeds", f"cannot be {seeds}", "folded or each")
    files = {"csv": csv, "md": md, "json": json, "html": html, "save_baseline": save_baseline}
    for name, file in files.items():
        path = Path("-" if file is None else file)
        if path.is_dir():
            raise UserError(name, f"cannot be '{file}': it is a folder", "a file")
        if not path.absolute().parent.is_dir():
            raise UserError(name, f"cannot be {file}: there is no folder {path.parent}", f"mkdir -p {path.parent}")
    if against == "":
        raise UserError("against", "is empty", "a file from save_baseline=, a run, a sweep or a folder")
    if tolerance and against is None:
        raise UserError("tolerance", "needs a baseline to compare with", "against=PLACE too")
    found = runs(*places)
    two = len(found) == 2 and len(places) == 2
    if diff and len(found) != 2:
        raise UserError("diff", f"needs two runs, and there are {len(found)}", "two run directories")
    # The comparison comes first, because the notes depend on what it read
    comparison = None
    if against is not None:
        comparison = compare(read_baseline(against), measure(found), tolerance or {})
    notes = list(found.notes)
    # The table needs no curves, so that reading them all is left to what does.
    for run in found if html or save_baseline or comparison else ():
        # Lines that are not objects, such as zeros after a power cut: nothing is taken from them
        lines = lines_of(run.path / "metrics.jsonl")
        if damaged := sum(not (line.startswith(b"{") and line.endswith(b"}")) for line in lines):
            notes.append(f"{run.path}: metrics.jsonl has {amount(damaged, 'damaged line')}, skipped")
    table, *tables = make_tables(found, columns, sort, seeds == "each")
    both = difference(*found) if diff or (diff is None and two) else None
    result = Report(found, table, tuple(tables), tuple(notes), both, comparison)
    texts: dict[str, Callable[[], str]] = {
        "csv": result.to_csv,
        "md": result.to_markdown,
        "json": lambda: json_format.dumps(result.to_json(), indent=2, ensure_ascii=False, default=str) + "\n",
        "html": lambda: page(found),
        "save_baseline": lambda: baseline_text(measure(found)),
    }
    for name, file in files.items():
        # `-` writes to standard output, so that other programs can read it
        if file == "-":
            sys.stdout.write(texts[name]())
        elif file is not None:
            write_atomically(Path(file), texts[name]().encode(errors="backslashreplace"), named=True)
    return result


def _paths(places: Iterable[Any]) -> Iterator[str | Path]:
    """The paths that are meant by paths, runs and lists of them."""
    for place in places:
        if isinstance(place, str | Path | Run):
            yield place.path if isinstance(place, Run) else place
        else:
            yield from _paths(place)


_WIDEST_CELL = 40
_FOLDED_NAME = 22  # such as `2026-11-23_01-38-19/12`, which is followed by `and 4 more`
_MOST_NAMES = 5


def show(found: Report, console: Console) -> None:
    """Show the table, notes, the failed runs with the command that repeats each, the difference and the comparison."""
    for (task, group), table in zip(by_task(found.runs).items(), found.tables, strict=True):
        title = finished_of([run.status for run in group], "run")
        title = title if len(found.tables) == 1 else f"{task}: {title}"
        # Name, status and metrics are what a reader looks for first
        skipped = _columns(console, title, table.head, table.cells(), kept=2 + len(table.metrics))
        if skipped:
            many = f"{', '.join(skipped[:_MOST_NAMES])}{' ...' if len(skipped) > _MOST_NAMES else ''}"
            console.line(f"no room for {many}; choose columns with columns=, or write csv=FILE", "yellow")
        if len(found.tables) > 1:
            console.line("")
    for note in found.notes:
        console.line(note, "yellow")
    for run in found.runs:
        if run.repeat:
            print_failure(console, f"{run.path} {run.status}", run.error, str(run.path / "run.log"), run.repeat)
    if (both := found.difference) is not None:
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
        if one != other:
            sides = [f"{side}={quoted(run.path)}" for side, run in zip("ab", found.runs, strict=True)]
            console.line(f"tensor by tensor: python -m runner audit {shlex.join(sides)}")
    if (comparison := found.comparison) is not None:
        console.line("")
        title = "worse than the baseline" if comparison.worse else "no worse than the baseline"
        console.line(title, "bold red" if comparison.worse else "bold green")
        fields = ("setting", "measure", "verdict", "before", "now", "change", "allowed")
        cells = [[getattr(each, name) for name in fields] for each in comparison.measures]
        _columns(console, "", ["setting", "measure", "verdict", "baseline", "now", "change", "allowed"], cells, kept=3)
        for line in comparison.notes:
            console.line(line, "yellow")
        for line in comparison.reasons:
            console.line(f"worse: {line}", "bold red")


def _columns(console: Console, title: str, head: list[str], rows: list[list[str]], kept: int = 1) -> list[str]:
    """Show a table without the columns at its right that there is no room for, and return their names.

    The first three of the first `kept` columns always stay, the others of them as long as there is room beside a folded name.
    """
    half = _WIDEST_CELL // 2
    plain = [[" ".join(clean(cell).split()) for cell in row] for row in rows]
    cells = [
        [cell if len(cell) <= 2 * half else f"{cell[:half]}...{cell[3 - half :]}" for cell in row] for row in plain
    ]
    widths, size, shown = column_widths(head, cells), console.size, len(head)
    room = size[0] if size is not None else int(os.environ.get("COLUMNS") or 0)
    while room and shown > min(kept, 3):
        name = widths[0] if shown > kept else min(widths[0], _FOLDED_NAME)
        if name + sum(2 + width for width in widths[1:shown]) <= room:
            break
        shown -= 1
    console.table(title, head[:shown], [row[:shown] for row in cells])
    return head[shown:]
