"""The results of a sweep: one row per job, the best marked, failures with their reason."""

from __future__ import annotations

import contextlib
import csv
import io
import math
import os
import shlex
import statistics
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from runner.config.keys import OF_THE_SWEEP, key_of, within
from runner.config.reading import read_overrides, read_regular, read_summary
from runner.sweeps.ledger import ENDED, Entry, Ledger, Records, outcome
from runner.tracking.console import Console
from runner.tracking.files import write_atomically, write_json
from runner.tracking.formats import duration, number
from runner.tracking.run_directory import works

REPEATS = ("seed", "data.split.seed", "data.split.fold")
"""Keys that distinguish repetitions of the same experiment."""
BEST = "best.yaml"
"""File that a search writes: its best trial as a preset, with a sentence and a command in the comments."""


@dataclass(frozen=True)
class JobRow:
    """One job of a sweep, as `sweep.json` has it."""

    job: str  # name of its folder, its number in the sweep
    varied: tuple[str, ...]  # the overrides that not every job of the sweep has
    overrides: tuple[str, ...]
    status: str  # `finished`, `failed`, `preempted`, `died` if it was killed, `running`, `pending` if it did not start, `pruned`
    metric: str | None = None  # the monitored metric, such as `val/accuracy`
    mode: Literal["max", "min"] | None = None
    value: float | None = None  # the best value of the metric
    step: int | None = None  # the `global_step` of that value
    best: bool = False  # no job of the sweep has a better value of this metric
    error: str | None = None  # its first line
    wall_s: float | None = None
    log: str | None = None  # of a job that failed
    repeat: str | None = None  # the command that runs it alone

    @property
    def failed(self) -> bool:
        """Whether the job failed or died; a preempted one can be resumed."""
        return self.status in ("failed", "died")


@dataclass(frozen=True)
class Spread:
    """Statistics of a metric over jobs that differ only in seed or fold, as `sweep.json` has them."""

    metric: str
    settings: str  # the other varied overrides of these jobs
    over: str  # keys in which they differ
    jobs: int  # number of finished jobs
    mean: float  # of their best values
    deviation: float | None  # of a sample; None for one job
    low: float
    high: float


def summarise(sweep_dir: Path, write: bool = True) -> list[JobRow]:
    """Read the jobs of a sweep from its ledger and their folders.

    A job that is still marked as running while its process is gone, or has no summary, counts as died.

    Args:
        sweep_dir: the folder of the sweep.
        write: whether to write `sweep.json`, `sweep.csv` and `sweep.md` there.

    Raises:
        UserError: a file cannot be written.
    """
    marks = ("summary.json", "overrides.yaml", "config.yaml")
    records = Ledger(sweep_dir).read()
    entries = {entry.folder.name: entry for entry in records.jobs.values()}
    folders = [
        path
        for path in (sweep_dir.iterdir() if sweep_dir.is_dir() else ())
        if path.is_dir() and not path.name.startswith(".")
        # The folder of a job that started again in another one does not count, and an empty one only if the ledger names it.
        if path.name in entries
        or (path.name not in records.folders and any((path / mark).exists() for mark in marks))
        or (path.name.isdecimal() and not records.launches)
    ]
    folders.sort(key=lambda path: (int(path.name) if path.name.isdecimal() else 2**63, path.name))
    overrides = [getattr(entries.get(folder.name), "overrides", None) or _overrides(folder) for folder in folders]
    launch = records.launches[-1] if records.launches else {}
    pending = [words for job, words in (launch.get("jobs") or {}).items() if not _is_there(records, job)]
    every = [*overrides, *pending]
    counts = Counter(override for found in every for override in set(found))
    common = {override for override, count in counts.items() if count == len(every) and len(every) > 1}
    if swept := {key for each in records.launches for key in each["swept"]}:
        common |= {override for override in counts if key_of(override) not in swept}
    rows = [
        row_of(folder, found, common, entries.get(folder.name))
        for folder, found in zip(folders, overrides, strict=True)
    ]
    rows += [JobRow("-", _varied(words, common), tuple(words), "pending") for words in pending]
    rows = [_with_command(row, sweep_dir, launch.get("flags") or []) if row.failed else row for row in _mark_best(rows)]
    if write and sweep_dir.is_dir():
        _write(sweep_dir, rows)
    return rows


def _is_there(records: Records, job: str) -> bool:
    return job in records.jobs and records.jobs[job].folder.is_dir()


def rows_of(runs: Sequence[Path], base: Path) -> list[JobRow]:
    """A row for each run in these folders, named by its place below `base`, the best marked."""
    overrides = [_overrides(folder) for folder in runs]
    common = set.intersection(*map(set, overrides)) if len(runs) > 1 else set[str]()
    rows = []
    for folder, found in zip(runs, overrides, strict=True):
        name = folder.name if folder == base else str(folder.relative_to(base))
        row = replace(row_of(folder, found, common), job=name)
        log = str(folder / "run.log")
        rows.append(replace(row, log=log, repeat=command_alone(found, [])) if row.failed else row)
    return _mark_best(rows)


def _with_command(row: JobRow, sweep_dir: Path, flags: list[str]) -> JobRow:
    return replace(row, log=str(sweep_dir / row.job / "run.log"), repeat=command_alone(row.overrides, flags))


def command_alone(overrides: Sequence[str], flags: Sequence[str]) -> str:
    """The command that runs one job of a sweep by itself."""
    words = [word for word in overrides if not within(key_of(word), ("sweep", *OF_THE_SWEEP))]
    return shlex.join(["python", "-m", "runner", "train", *flags, *words])


def _write(sweep_dir: Path, rows: list[JobRow]) -> None:
    """Write the table as JSON, CSV and Markdown."""
    best, spreads, table = [row.job for row in rows if row.best], spreads_of(rows), _table(rows)
    content = {"best": best, "spreads": [asdict(each) for each in spreads], "jobs": [asdict(row) for row in rows]}
    head, *lines = table
    content["table"] = [dict(zip(head, line, strict=True)) for line in lines]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(table)
    cells = [[str(cell).replace("|", "\\|") for cell in line] for line in [head, ["---"] * len(head), *lines]]
    page = [f"# {sweep_dir.name}", "", *(f"| {' | '.join(line)} |" for line in cells)]
    for row in rows:
        if row.failed:
            page += ["", f"Job {row.job} {row.status}: {row.error}", f"- log: `{row.log}`", f"- again: `{row.repeat}`"]
    write_json(sweep_dir / "sweep.json", content)
    write_atomically(sweep_dir / "sweep.csv", text.getvalue().encode())
    write_atomically(sweep_dir / "sweep.md", ("\n".join(page) + "\n").encode())


def _table(rows: list[JobRow]) -> list[list[str]]:
    """Head and lines: a column for each key that differs, repetitions folded, the best first, those without a result last."""
    keys = list(dict.fromkeys(key_of(word) for row in rows for word in row.varied if key_of(word) not in REPEATS))
    spreads = {(spread.metric, spread.settings): spread for spread in _folded(rows)}
    settings = [*spreads, *((None, _settings(row)) for row in rows)]
    seen, lines = set[str](), []
    for metric, words in settings:
        if metric is None and words in seen:
            continue
        seen.add(words)
        jobs = [row for row in rows if _settings(row) == words]
        values = {key_of(word): word.partition("=")[2] for row in jobs for word in row.varied}
        cells = ["-"] * 6
        if metric is not None:
            found = spreads[metric, words]
            numbers = (found.mean, found.deviation, found.low, found.high)
            cells = [metric, str(found.jobs), *("-" if value is None else number(value) for value in numbers)]
        lines.append([*(values.get(key, "-") for key in keys), *cells, " ".join(row.job for row in jobs)])
    return [[*keys, "metric", "finished", "mean", "std", "min", "max", "jobs"], *lines]


def print_table(rows: list[JobRow], console: Console, asked: int = 0) -> bool:
    """Show the jobs, then the errors; return whether any job failed or died. `asked` is the number of jobs, if known."""
    metrics = list(dict.fromkeys(row.metric for row in rows if row.metric))
    head = metrics[0] if len(metrics) == 1 else "metric"
    cells = []
    for row in rows:
        value = number(row.value) if row.metric else "-"
        if len(metrics) > 1 and row.metric:
            value = f"{row.metric} {value}"
        mark = "<- best" if row.best and len(rows) > 1 else ""
        time = duration(row.wall_s) if row.wall_s is not None else "-"
        cells.append([row.job, " ".join(row.varied), row.status, value, time, mark])
    finished = sum(row.status == "finished" for row in rows)
    pruned = sum(row.status == "pruned" for row in rows)
    title = f"{finished} of {max(asked, len(rows))} jobs finished" + (f", {pruned} pruned" if pruned else "")
    console.table(title, ["job", "varied", "status", head, "time", ""], cells)
    if spreads := spreads_of(rows):
        cells = [
            [
                *(spread.settings or "all", spread.over, str(spread.jobs)),
                *map(number, (spread.mean, spread.deviation, spread.low, spread.high)),
            ]
            for spread in spreads
        ]
        columns = ["settings", "over", "jobs", "mean", "std", "min", "max"]
        console.table(f"spread of {spreads[0].metric}", columns, cells)
    for row in rows:
        if row.failed:
            console.error(f"job {row.job} {row.status}: {row.error or 'no reason given'}")
            for name, text in (("log", row.log), ("again", row.repeat)):
                console.line(f"    {name}: {text}")
    return any(row.failed for row in rows)


def print_best(sweep_dir: Path, console: Console) -> None:
    """Show what a search found, if the sweep is one."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for line in read_regular(sweep_dir / BEST, 2**20).decode().splitlines():
            if line.startswith("# ") and not line.startswith("# @"):
                console.line(line[2:])


def spreads_of(rows: list[JobRow]) -> list[Spread]:
    """Statistics over the jobs that differ only in `REPEATS`, for each setting of the other varied keys, the best first."""
    return [spread for spread in _folded(rows) if spread.jobs > 1 and spread.over]


def _folded(rows: list[JobRow]) -> list[Spread]:
    together: dict[tuple[str, str], list[JobRow]] = {}
    for row in rows:
        if row.status == "finished" and row.value is not None and math.isfinite(row.value) and row.metric:
            together.setdefault((row.metric, _settings(row)), []).append(row)
    found = []
    for (metric, settings), jobs in together.items():
        keys = {key_of(word) for row in jobs for word in row.varied}
        over = ", ".join(key for key in REPEATS if key in keys)
        values = [row.value for row in jobs if row.value is not None]
        deviation = statistics.stdev(values) if len(values) > 1 else None
        spread = Spread(
            metric, settings, over, len(values), statistics.fmean(values), deviation, min(values), max(values)
        )
        found.append((spread.mean if jobs[0].mode == "min" else -spread.mean, spread))
    return [spread for _, spread in sorted(found, key=lambda pair: pair[0])]


def _settings(row: JobRow) -> str:
    return " ".join(word for word in row.varied if key_of(word) not in REPEATS)


def _varied(words: list[str], common: Collection[str]) -> tuple[str, ...]:
    return tuple(word for word in words if word not in common)


def _overrides(folder: Path) -> list[str]:
    try:
        return read_overrides(folder)
    except (OSError, ValueError):
        return []


def row_of(folder: Path, overrides: list[str], common: Collection[str] = (), entry: Entry | None = None) -> JobRow:
    """What the files in the folder of a run or job say.

    Args:
        folder: of the run.
        overrides: of its command.
        common: overrides that all jobs of its sweep have.
        entry: what the ledger of its sweep says about it.
    """
    row = JobRow(folder.name, _varied(overrides, common), tuple(overrides), "died")
    summary, known = read_summary(folder), entry.sentence if entry is not None else None
    if summary is None:
        return (
            replace(row, error=known or _without_summary(folder))
            if not works(folder)
            else replace(row, status="running")
        )
    found = outcome(folder)
    status, error = found.status, found.sentence
    if status not in ENDED and works(folder):
        status = "running"
    elif status not in ENDED:
        status, error = "died", error or known or "it is still marked as running: it was killed"
    row = replace(row, status=status, error=error, wall_s=_number(summary.get("wall_s")))
    best = summary.get("best")
    if not isinstance(best, dict) or best.get("metric") is None:
        return row
    step = _number(best.get("global_step"))
    mode: Literal["max", "min"] = "min" if best.get("mode") == "min" else "max"
    value = _number(best.get("value"))
    return replace(row, metric=str(best["metric"]), mode=mode, value=value, step=None if step is None else int(step))


def _without_summary(folder: Path) -> str:
    there = os.path.lexists(folder / "summary.json")
    return "its summary.json is damaged, so its result is unknown" if there else "it left no summary.json"


def _number(value: Any) -> float | None:
    """A finite number of a summary, or None for anything else."""
    return value if isinstance(value, int | float) and abs(value) < 2**63 else None


def _mark_best(rows: list[JobRow]) -> list[JobRow]:
    values: dict[tuple[str | None, str | None], list[tuple[float, str]]] = {}
    for row in rows:
        if row.value is not None and math.isfinite(row.value) and not row.failed and row.status != "pruned":
            values.setdefault((row.metric, row.mode), []).append((row.value, row.job))
    best = {(min if mode == "min" else max)(found, key=lambda pair: pair[0])[1] for (_, mode), found in values.items()}
    return [replace(row, best=row.job in best) for row in rows]
