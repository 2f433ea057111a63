"""The results of a sweep: one row per job, the best marked, failures with their reason."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev

from runner.config.keys import key_of
from runner.config.reading import read_regular
from runner.sweeps.rows import JobRow, rows_in
from runner.tracking.console import Console
from runner.tracking.files import write_atomically, write_json
from runner.tracking.formats import csv_text, duration, markdown_table, markdown_text, number

REPEATS = ("seed", "data.split.seed", "data.split.fold")
"""Keys that distinguish repetitions of the same experiment."""
BEST = "best.yaml"
"""File that a search writes: its best trial as a preset, with a sentence and a command in the comments."""
_NOT_STORED = ("folder", "summary")


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


def summarise(folder: Path, write: bool = True) -> list[JobRow]:
    """Read the jobs of a sweep from its ledger and their folders; of a folder without a ledger, the runs below it.

    A job that is still marked as running while its process is gone, or has no summary, counts as died.

    Args:
        folder: of the sweep.
        write: whether to write `sweep.json`, `sweep.csv` and `sweep.md` there.

    Raises:
        UserError: a file cannot be written.
    """
    rows = rows_in(folder)
    if write and folder.is_dir():
        _write(folder, rows)
    return rows


def _write(sweep_dir: Path, rows: list[JobRow]) -> None:
    """Write the table as JSON, CSV and Markdown."""
    head, lines = _table(rows)
    content = {
        "best": [row.job for row in rows if row.best],
        "spreads": [asdict(spread) for spread in spreads_of(rows)],
        "jobs": [{key: value for key, value in vars(row).items() if key not in _NOT_STORED} for row in rows],
        "table": [dict(zip(head, line, strict=True)) for line in lines],
    }
    page = [f"# {sweep_dir.name}", "", *markdown_table(head, lines)]
    for row in rows:
        if row.failed:
            told = markdown_text(f"Job {row.job} {row.status}: {row.error}")
            page += ["", told, f"- log: `{row.log}`", f"- again: `{row.repeat}`"]
    write_json(sweep_dir / "sweep.json", content)
    write_atomically(sweep_dir / "sweep.csv", csv_text(head, lines).encode())
    write_atomically(sweep_dir / "sweep.md", ("\n".join(page) + "\n").encode())


def _table(rows: list[JobRow]) -> tuple[list[str], list[list[str]]]:
    """Head and lines: a column for each key that differs, repetitions folded, the best first, those without a result last."""
    keys = list(dict.fromkeys(key_of(word) for row in rows for word in row.varied if key_of(word) not in REPEATS))
    lines = []
    for jobs, spread in _folded(rows):
        values = {key_of(word): word.partition("=")[2] for row in jobs for word in row.varied}
        cells = ["-"] * 6
        if spread is not None:
            cells = [spread.metric, str(spread.jobs), *_numbers(spread, "-")]
        lines.append([*(values.get(key, "-") for key in keys), *cells, " ".join(row.job for row in jobs)])
    return [*keys, "metric", "finished", "mean", "std", "min", "max", "jobs"], lines


def print_table(rows: list[JobRow], console: Console, asked: int = 0) -> bool:
    """Show the jobs, then the errors; return whether any job failed or died. `asked` is the number of jobs, if known."""
    metrics = list(dict.fromkeys(row.metric for row in rows if row.metric))
    cells, base = [], "base" if any(row.varied for row in rows) else ""
    for row in rows:
        value = number(row.value) if row.metric else "-"
        if len(metrics) > 1 and row.metric:
            value = f"{row.metric} {value}"
        mark = "<- best" if row.best and len(rows) > 1 else ""
        time = duration(row.wall_s) if row.wall_s is not None else "-"
        cells.append([row.job, " ".join(row.varied) or base, row.status, value, time, mark])
    title = finished_of([row.status for row in rows], "job", asked)
    head = metrics[0] if len(metrics) == 1 else "metric"
    console.table(title, ["job", "varied", "status", head, "time", ""], cells)
    spreads, alike = spreads_of(rows), "base" if any(map(_settings, rows)) else "all"
    for metric in dict.fromkeys(spread.metric for spread in spreads):
        cells = [
            [spread.settings or alike, spread.over, str(spread.jobs), *_numbers(spread, "nan")]
            for spread in spreads
            if spread.metric == metric
        ]
        console.table(f"spread of {metric}", ["settings", "over", "jobs", "mean", "std", "min", "max"], cells)
    for row in rows:
        if row.failed:
            print_failure(console, f"job {row.job}", row.status, row.error, row.log, row.repeat)
    return any(row.failed for row in rows)


def finished_of(states: Sequence[str], noun: str, asked: int = 0) -> str:
    """How many have finished, of those there are or that were asked for."""
    pruned = f", {states.count('pruned')} pruned" if "pruned" in states else ""
    return f"{states.count('finished')} of {max(asked, len(states))} {noun}s finished{pruned}"


def print_failure(
    console: Console, name: str, status: str, error: str | None, log: str | None, again: str | None
) -> None:
    """Show why a run failed, its log, and the command that repeats it."""
    console.error(f"{name} {status}: {error or 'no reason given'}")
    console.line(f"    log: {log}\n    again: {again}")


def print_best(sweep_dir: Path, console: Console) -> None:
    """Show what a search found, if the sweep is one."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for line in read_regular(sweep_dir / BEST, 2**20).decode().splitlines():
            if line.startswith("# ") and not line.startswith("# @"):
                console.line(line[2:])


def spreads_of(rows: list[JobRow]) -> list[Spread]:
    """Statistics over the jobs that differ only in `REPEATS`, for each setting of the other varied keys, the best first."""
    return [spread for _, spread in _folded(rows) if spread is not None and spread.jobs > 1 and spread.over]


def _folded(rows: list[JobRow]) -> list[tuple[list[JobRow], Spread | None]]:
    """Jobs that differ only in `REPEATS`, with the statistics of those that finished, the best first, none of them last."""
    together: dict[str, list[JobRow]] = {}
    for row in rows:
        together.setdefault(_settings(row), []).append(row)
    metrics = list(dict.fromkeys(row.metric for row in rows))
    found = []
    for settings, jobs in together.items():
        done = [(row, row.value) for row in jobs if row.status == "finished" and row.metric and row.value is not None]
        rank, spread = (math.inf, 0.0), None
        if done:
            first, values = done[0][0], [value for _, value in done]
            over = ", ".join(key for key in REPEATS if any(key == key_of(word) for row in jobs for word in row.varied))
            mean, deviation = mean_and_deviation(values)
            spread = Spread(str(first.metric), settings, over, len(values), mean, deviation, min(values), max(values))
            rank = (metrics.index(first.metric), mean if first.mode == "min" else -mean)
        found.append((rank, jobs, spread))
    return [(jobs, spread) for _, jobs, spread in sorted(found, key=lambda each: each[0])]


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and sample standard deviation; None for the deviation of one value."""
    return fmean(values), stdev(values) if len(values) > 1 else None


def _numbers(spread: Spread, missing: str) -> list[str]:
    numbers = (spread.mean, spread.deviation, spread.low, spread.high)
    return [missing if value is None else number(value) for value in numbers]


def _settings(row: JobRow) -> str:
    return " ".join(word for word in row.varied if key_of(word) not in REPEATS)
