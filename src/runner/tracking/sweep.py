"""The results of a sweep: one row per job, the best marked, failures with their reason."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from runner.config.reading import read_overrides, read_summary
from runner.tracking.console import Console
from runner.tracking.files import write_json
from runner.tracking.formats import duration, number

_FAILED = ("failed", "died")
REPEATS = ("seed", "data.split.seed", "data.split.fold")
"""Keys that distinguish repetitions of the same experiment."""


@dataclass(frozen=True)
class JobRow:
    """One job of a sweep.

    Attributes:
        job: name of its folder, its number in the sweep.
        varied: the overrides that not every job of the sweep has.
        overrides: all its overrides.
        status: `finished`, `failed`, `preempted`, or `died` if it was killed.
        metric: the monitored metric, such as `val/accuracy`.
        mode: `max` or `min`.
        value: the best value of the metric.
        step: the `global_step` of that value.
        best: whether no job of the sweep has a better value of this metric.
        error: first line of the error.
        wall_s: duration of the job in seconds.
    """

    job: str
    varied: tuple[str, ...]
    overrides: tuple[str, ...]
    status: str
    metric: str | None = None
    mode: Literal["max", "min"] | None = None
    value: float | None = None
    step: int | None = None
    best: bool = False
    error: str | None = None
    wall_s: float | None = None

    @property
    def failed(self) -> bool:
        """Whether the job failed or died; a preempted one can be resumed."""
        return self.status in _FAILED


def summarise(sweep_dir: Path, jobs: list[list[str]] | None = None, *, write: bool = True) -> list[JobRow]:
    """Read the jobs of a finished sweep, and write `sweep.json` beside them.

    A job that is still marked as running, or has no summary, counts as died.

    Args:
        sweep_dir: folder with one folder per job.
        jobs: overrides of job 0, 1, ..., which include jobs that never created a folder; None reads the existing folders.
        write: False does not write `sweep.json`.

    Raises:
        UserError: `sweep.json` cannot be written.
    """
    names = _job_names(sweep_dir)
    if jobs is not None:
        names = sorted({*names, *(str(index) for index in range(len(jobs)))}, key=_by_number)
    overrides = {name: _overrides(sweep_dir / name, jobs) for name in names}
    counts = Counter(override for found in overrides.values() for override in set(found))
    common = {override for override, count in counts.items() if count == len(names) and len(names) > 1}
    rows = _mark_best([_row(sweep_dir / name, overrides[name], common) for name in names])
    if write:
        best = [row.job for row in rows if row.best]
        content = {"best": best, "spreads": [asdict(spread) for spread in spreads_of(rows)]}
        write_json(sweep_dir / "sweep.json", content | {"jobs": [asdict(row) for row in rows]})
    return rows


def print_table(rows: list[JobRow], console: Console) -> bool:
    """Show the jobs, then the errors; return whether any job failed or died."""
    metrics = list(dict.fromkeys(row.metric for row in rows if row.metric))
    head = metrics[0] if len(metrics) == 1 else "metric"
    cells = []
    for row in rows:
        value = number(row.value) if row.metric else "-"
        if len(metrics) > 1 and row.metric:
            value = f"{row.metric} {value}"
        mark = "<- best" if row.best else ""
        time = duration(row.wall_s) if row.wall_s is not None else "-"
        cells.append([row.job, " ".join(row.varied), row.status, value, time, mark])
    finished = sum(row.status == "finished" for row in rows)
    console.table(f"{finished} of {len(rows)} jobs finished", ["job", "varied", "status", head, "time", ""], cells)
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
    return any(row.failed for row in rows)


@dataclass(frozen=True)
class Spread:
    """Statistics of a metric over jobs that differ only in seed or fold.

    Attributes:
        metric: the monitored metric.
        settings: the other varied overrides of these jobs.
        over: keys in which they differ.
        jobs: number of finished jobs.
        mean: of their best values.
        deviation: sample standard deviation.
        low: smallest value.
        high: largest value.
    """

    metric: str
    settings: str
    over: str
    jobs: int
    mean: float
    deviation: float
    low: float
    high: float


def spreads_of(rows: list[JobRow]) -> list[Spread]:
    """Statistics over the jobs that differ only in `REPEATS`, for each setting of the other varied keys."""
    together: dict[tuple[str, str], list[JobRow]] = {}
    for row in rows:
        if row.status == "finished" and row.value is not None and math.isfinite(row.value) and row.metric:
            others = " ".join(word for word in row.varied if word.split("=")[0] not in REPEATS)
            together.setdefault((row.metric, others), []).append(row)
    found = []
    for (metric, settings), jobs in together.items():
        keys = {word.split("=")[0] for row in jobs for word in row.varied} & set(REPEATS)
        values = [row.value for row in jobs if row.value is not None]
        if len(values) < 2 or not keys:
            continue
        mean, deviation = statistics.fmean(values), statistics.stdev(values)
        over = ", ".join(key for key in REPEATS if key in keys)
        found.append(Spread(metric, settings, over, len(values), mean, deviation, min(values), max(values)))
    return found


def _job_names(sweep_dir: Path) -> list[str]:
    if not sweep_dir.is_dir():
        return []
    marks = ("summary.json", "overrides.yaml", "config.yaml")
    folders = [path for path in sweep_dir.iterdir() if path.is_dir() and not path.name.startswith(".")]
    names = [f.name for f in folders if f.name.isdecimal() or any((f / mark).exists() for mark in marks)]
    return sorted(names, key=_by_number)


def _by_number(name: str) -> tuple[int, str]:
    return (int(name), name) if name.isdecimal() else (2**63, name)


def _overrides(folder: Path, jobs: list[list[str]] | None) -> list[str]:
    if jobs is not None and folder.name.isdecimal() and int(folder.name) < len(jobs):
        return list(jobs[int(folder.name)])
    try:
        return read_overrides(folder)
    except (OSError, ValueError):
        return []


def _row(folder: Path, overrides: list[str], common: set[str]) -> JobRow:
    varied = tuple(override for override in overrides if override not in common)
    row = JobRow(folder.name, varied, tuple(overrides), "died")
    summary = read_summary(folder)
    if summary is None:
        return replace(row, error="it left no summary.json")
    status = str(summary.get("status"))
    error = next(iter(str(summary.get("error") or "").strip().splitlines()), None)
    if status not in {"finished", "failed", "preempted"}:
        status = "died"
        error = error or "it is still marked as running: it was killed"
    row = replace(row, status=status, error=error, wall_s=_number(summary.get("wall_s")))
    best = summary.get("best")
    if not isinstance(best, dict) or best.get("metric") is None:
        return row
    mode: Literal["max", "min"] = "min" if best.get("mode") == "min" else "max"
    value, step = (_number(best.get(name)) for name in ("value", "global_step"))
    return replace(row, metric=str(best["metric"]), mode=mode, value=value, step=None if step is None else int(step))


def _number(value: Any) -> float | None:
    """A finite number of a summary, or None for anything else."""
    return value if isinstance(value, int | float) and abs(value) < 2**63 else None


def _mark_best(rows: list[JobRow]) -> list[JobRow]:
    winners: dict[tuple[str | None, str | None], JobRow] = {}
    for row in rows:
        if row.value is None or not math.isfinite(row.value) or row.failed:
            continue
        leader = winners.get((row.metric, row.mode))
        sign = -1 if row.mode == "min" else 1
        if leader is None or leader.value is None or sign * row.value > sign * leader.value:
            winners[row.metric, row.mode] = row
    best = {row.job for row in winners.values()}
    return [replace(row, best=row.job in best) for row in rows]
