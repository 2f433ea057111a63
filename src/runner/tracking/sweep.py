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

REPEATS = ("seed", "data.split.seed", "data.split.fold")
"""Keys that distinguish repetitions of the same experiment."""


@dataclass(frozen=True)
class JobRow:
    """One job of a sweep, as `sweep.json` has it."""

    job: str  # name of its folder, its number in the sweep
    varied: tuple[str, ...]  # the overrides that not every job of the sweep has
    overrides: tuple[str, ...]
    status: str  # `finished`, `failed`, `preempted`, or `died` if it was killed
    metric: str | None = None  # the monitored metric, such as `val/accuracy`
    mode: Literal["max", "min"] | None = None
    value: float | None = None  # the best value of the metric
    step: int | None = None  # the `global_step` of that value
    best: bool = False  # no job of the sweep has a better value of this metric
    error: str | None = None  # its first line
    wall_s: float | None = None

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
    deviation: float  # of a sample
    low: float
    high: float


def summarise(sweep_dir: Path) -> list[JobRow]:
    """Read the jobs of a finished sweep, one folder each, and write `sweep.json` beside them.

    A job that is still marked as running, or has no summary, counts as died.

    Raises:
        UserError: `sweep.json` cannot be written.
    """
    marks = ("summary.json", "overrides.yaml", "config.yaml")
    folders = [
        path
        for path in (sweep_dir.iterdir() if sweep_dir.is_dir() else ())
        if path.is_dir() and not path.name.startswith(".")
        if path.name.isdecimal() or any((path / mark).exists() for mark in marks)
    ]
    folders.sort(key=lambda path: (int(path.name) if path.name.isdecimal() else 2**63, path.name))
    overrides = [_overrides(folder) for folder in folders]
    counts = Counter(override for found in overrides for override in set(found))
    common = {override for override, count in counts.items() if count == len(folders) and len(folders) > 1}
    rows = _mark_best([_row(folder, found, common) for folder, found in zip(folders, overrides, strict=True)])
    best, spreads = [row.job for row in rows if row.best], [asdict(spread) for spread in spreads_of(rows)]
    if sweep_dir.is_dir():
        write_json(sweep_dir / "sweep.json", {"best": best, "spreads": spreads, "jobs": [asdict(row) for row in rows]})
    return rows


def print_table(rows: list[JobRow], console: Console, asked: int = 0) -> bool:
    """Show the jobs, then the errors; return whether any job failed or died. `asked` is the number of jobs, if known."""
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
    console.table(
        f"{finished} of {max(asked, len(rows))} jobs finished", ["job", "varied", "status", head, "time", ""], cells
    )
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


def spreads_of(rows: list[JobRow]) -> list[Spread]:
    """Statistics over the jobs that differ only in `REPEATS`, for each setting of the other varied keys."""
    together: dict[tuple[str, str], list[JobRow]] = {}
    for row in rows:
        if row.status == "finished" and row.value is not None and math.isfinite(row.value) and row.metric:
            others = " ".join(word for word in row.varied if word.split("=")[0] not in REPEATS)
            together.setdefault((row.metric, others), []).append(row)
    found = []
    for (metric, settings), jobs in together.items():
        keys = {word.split("=")[0] for row in jobs for word in row.varied}
        over = ", ".join(key for key in REPEATS if key in keys)
        values = [row.value for row in jobs if row.value is not None]
        if len(values) > 1 and over:
            mean, deviation = statistics.fmean(values), statistics.stdev(values)
            found.append(Spread(metric, settings, over, len(values), mean, deviation, min(values), max(values)))
    return found


def _overrides(folder: Path) -> list[str]:
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
        status, error = "died", error or "it is still marked as running: it was killed"
    row = replace(row, status=status, error=error, wall_s=_number(summary.get("wall_s")))
    best = summary.get("best")
    if not isinstance(best, dict) or best.get("metric") is None:
        return row
    value, step = _number(best.get("value")), _number(best.get("global_step"))
    mode: Literal["max", "min"] = "min" if best.get("mode") == "min" else "max"
    return replace(row, metric=str(best["metric"]), mode=mode, value=value, step=None if step is None else int(step))


def _number(value: Any) -> float | None:
    """A finite number of a summary, or None for anything else."""
    return value if isinstance(value, int | float) and abs(value) < 2**63 else None


def _mark_best(rows: list[JobRow]) -> list[JobRow]:
    values: dict[tuple[str | None, str | None], list[tuple[float, str]]] = {}
    for row in rows:
        if row.value is not None and math.isfinite(row.value) and not row.failed:
            values.setdefault((row.metric, row.mode), []).append((row.value, row.job))
    best = {(min if mode == "min" else max)(found, key=lambda pair: pair[0])[1] for (_, mode), found in values.items()}
    return [replace(row, best=row.job in best) for row in rows]
