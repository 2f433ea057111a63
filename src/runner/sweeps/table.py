"""The results of a sweep: one row per job, the best marked, failures with their reason; and `sweep.json`, `.csv`, `.md`."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev

from runner.base.files import write_atomically, write_json
from runner.base.reading import read_regular, start_time
from runner.config.keys import key_of
from runner.sweeps.rows import STATES, JobRow, comparable, rows_in
from runner.tracking.console import Console
from runner.tracking.formats import clean, csv_text, duration, markdown_table, markdown_text, metric, number

REPEATS = ("seed", "data.split.seed", "data.split.fold")
"""Keys that distinguish repetitions of the same experiment."""
BEST = "best.yaml"
"""File that a search writes: its best trial as a preset, with a sentence and a command in the comments."""
_SILENT_S = 60.0
_BAR = 8
_NOT_STORED = ("folder", "summary", "progress")


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

    Args:
        folder: of the sweep.
        write: write the table there, with all digits as `sweep.json` and `sweep.csv`, and for people as `sweep.md`.

    Raises:
        UserError: a file cannot be written.
    """
    rows = rows_in(folder)
    if not write or not folder.is_dir():
        return rows
    head, lines = _table(rows)
    content = {
        "best": [row.job for row in rows if row.best],
        "spreads": [asdict(spread) for spread in spreads_of(rows)],
        "jobs": [{key: value for key, value in vars(row).items() if key not in _NOT_STORED} for row in rows],
        "table": [dict(zip(head, line, strict=True)) for line in lines],
    }
    cells = [[number(cell) if isinstance(cell, float) else str(cell) for cell in line] for line in lines]
    page = [f"# {markdown_text(folder.name)}", "", *markdown_table(head, cells)]
    for row in rows:
        if row.failed:
            page += ["", markdown_text(f"Job {row.job} {row.status}: {row.error}"), ""]
            # Markdown shows an indented line as it is, whatever an override contains.
            page += ["    " + " ".join(clean(text).split("\n")) for text in (f"log: {row.log}", f"again: {row.repeat}")]
    # JSON is for programs, CSV for spreadsheets, and Markdown for people
    write_json(folder / "sweep.json", content)
    for name, text in (("sweep.csv", csv_text(head, lines)), ("sweep.md", "\n".join(page) + "\n")):
        write_atomically(folder / name, text.encode(errors="backslashreplace"))
    return rows


def _table(rows: list[JobRow]) -> tuple[list[str], list[list[str | float]]]:
    """Head and lines: a column for each key that differs, repetitions folded, the best first, those without a result last."""
    keys = list(dict.fromkeys(key_of(word) for row in rows for word in row.varied if key_of(word) not in REPEATS))
    lines: list[list[str | float]] = []
    for jobs, spread in _folded(rows):
        values = {key_of(word): word.partition("=")[2] for row in jobs for word in row.varied}
        cells: list[str | float] = ["-"] * 6
        if spread is not None:
            deviation = "-" if spread.deviation is None else spread.deviation
            cells = [spread.metric, spread.jobs, spread.mean, deviation, spread.low, spread.high]
        lines.append([*(values.get(key, "-") for key in keys), *cells, " ".join(row.job for row in jobs)])
    return [*keys, "metric", "finished", "mean", "std", "min", "max", "jobs"], lines


def print_table(rows: list[JobRow], console: Console, planned: int = 0) -> bool:
    """Show the jobs, then the errors; return True if a job failed or died. `planned` is the number of jobs, if known."""
    head, cells = columns_of(rows)
    console.table(finished_of([row.status for row in rows], "job", planned), head, cells)
    spreads, alike = spreads_of(rows), "base" if any(map(_settings, rows)) else "all"
    # Jobs that differ only in their seed are summarised together
    for name in dict.fromkeys(spread.metric for spread in spreads):
        cells = [
            [each.settings or alike, each.over, str(each.jobs)]
            + [number(value) for value in (each.mean, each.deviation, each.low, each.high)]
            for each in spreads
            if each.metric == name
        ]
        console.table(f"spread of {name}", ["settings", "over", "jobs", "mean", "std", "min", "max"], cells)
    failed = [row for row in rows if row.failed]
    for row in failed:
        print_failure(console, f"job {row.job} {row.status}", row.error, row.log, row.repeat)
    return bool(failed)


def columns_of(rows: list[JobRow]) -> tuple[list[str], list[list[str]]]:
    """Head and cells of a table of jobs; columns about progress are there if a job is running."""
    metrics = list(dict.fromkeys(name for name, _ in map(result_of, rows) if name))
    base = "base" if any(row.varied for row in rows) else ""
    lines = []
    for row in rows:
        bar = device = left = ""
        if (now := row.progress) is not None:
            device = now.device
            filled = round(max(0.0, now.share) * _BAR)
            bar = f"{'━' * filled}{'─' * (_BAR - filled)} {now.share:.0%}" if now.total_steps else ""
            # A run that writes no progress may hang, which its time alone would not show
            silent = time.time() - now.time
            left = f"silent for {duration(silent)}" if silent > _SILENT_S else duration(now.seconds_left)
        name, value = result_of(row)
        result = "-" if not name else number(value) if len(metrics) == 1 else metric(name, value)
        seconds = row.wall_s
        # The summary of a run that works has no time yet
        if row.status == "running" and (started := start_time(row.folder)) is not None:
            seconds = time.time() - started.timestamp()
        passed = "-" if seconds is None else duration(seconds)
        words, mark = " ".join(row.varied) or base, "<- best" if row.best and len(rows) > 1 else ""
        lines.append([row.job, words, row.status, bar, result, device, passed, left, mark])
    metric_head = metrics[0] if len(metrics) == 1 else "metric"
    head = ["job", "varied", "status", "progress", metric_head, "device", "time", "left", ""]
    # Columns without any content only take room
    shown = [at for at, _ in enumerate(head) if at not in (3, 5, 7) or any(line[at] for line in lines)]
    return [head[at] for at in shown], [[line[at] for at in shown] for line in lines]


def result_of(row: JobRow) -> tuple[str, float | None]:
    """The name of the monitored metric, or of the training loss before the first evaluation, and the best value so far."""
    now = row.progress
    if now is not None and now.best is not None:
        return comparable(now.metric) or "", now.best
    if now is not None and "loss" in now.train:
        return "train loss", now.train["loss"]
    return row.metric or "", row.value


def finished_of(states: Sequence[str], noun: str, planned: int = 0) -> str:
    """The number of jobs or runs that have finished, of those that are there or planned, and of those in other states."""
    others = [f", {states.count(state)} {state}" for state in STATES if state != "finished" and state in states]
    return f"{states.count('finished')} of {max(planned, len(states))} {noun}s finished{''.join(others)}"


def print_failure(console: Console, title: str, error: str | None, log: str | None, again: str | None) -> None:
    """Show why a run failed, its log, and the command that repeats it, below a title such as `job 3 failed`."""
    console.error(f"{title}: {error or 'no reason given'}")
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
    # Settings without the seed: what is the same experiment
    for row in rows:
        together.setdefault(_settings(row), []).append(row)
    metrics = list(dict.fromkeys(row.metric for row in rows))
    found = []
    for settings, jobs in together.items():
        done = [(row, row.value) for row in jobs if row.status == "finished" and row.metric and row.value is not None]
        # Without a finished job, there is nothing to rank by, and the group comes last
        rank, spread = (math.inf, 0.0), None
        if done:
            first, values = done[0][0], [value for _, value in done]
            over = ", ".join(key for key in REPEATS if any(key == key_of(word) for row in jobs for word in row.varied))
            mean, deviation = mean_and_deviation(values)
            spread = Spread(
                str(first.metric),
                settings,
                over,
                jobs=len(values),
                mean=mean,
                deviation=deviation,
                low=min(values),
                high=max(values),
            )
            rank = (metrics.index(first.metric), mean if first.mode == "min" else -mean)
        found.append((rank, jobs, spread))
    return [(jobs, spread) for _, jobs, spread in sorted(found, key=lambda each: each[0])]


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and sample standard deviation; None for the deviation of one value."""
    return fmean(values), stdev(values) if len(values) > 1 else None


def _settings(row: JobRow) -> str:
    return " ".join(word for word in row.varied if key_of(word) not in REPEATS)
