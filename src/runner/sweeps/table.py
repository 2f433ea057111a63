"""Runs and jobs of sweeps as tables: the live one of `watch`, the last one, and `sweep.json`, `.csv` and `.md`.

Everything comes from files, so that the tables are the same for every launcher, and those of another machine are seen, too.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from runner.base.files import write_atomically, write_json
from runner.base.reading import read_regular, start_time
from runner.config.gone import warning
from runner.config.keys import key_of
from runner.run.directory import works
from runner.sweeps.ledger import ENDED, Ledger
from runner.sweeps.rows import STATES, JobRow, Scan, comparable, rows_in
from runner.tracking.console import Console
from runner.tracking.formats import clean, csv_text, duration, markdown_table, markdown_text, metric, number

if TYPE_CHECKING:
    from rich.console import RenderableType

REPEATS = ("seed", "data.split.seed", "data.split.fold")
"""Keys that distinguish repetitions of the same experiment."""
BEST = "best.yaml"
"""File that a search writes: its best trial as a preset, with a sentence and a command in the comments."""
_SILENT_S = 60.0
_BAR = 8  # characters
_NOT_STORED = ("folder", "summary", "progress")
_PERIOD_S = 1.0
_MOST_SHARE = 0.05  # of the time for looking at the files
_PLAIN_S = 60.0
_ROWS_BESIDE = 6  # of the terminal, for what is not a job
_WIDE = 100  # columns; below, a job has the last two folders of its name, and no device, time and mark


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


def summarise(folder: Path) -> list[JobRow]:
    """The rows of a sweep, and its table in its folder: all digits as `sweep.json` and `sweep.csv`, for people as `sweep.md`.

    Raises:
        UserError: a file cannot be written.
    """
    rows = rows_in(folder)
    if not folder.is_dir():
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


def columns_of(rows: list[JobRow], narrow: bool = False) -> tuple[list[str], list[list[str]]]:
    """Head and cells of a table of jobs; columns about progress are there if a job is running, and fewer if it is `narrow`."""
    metrics = list(dict.fromkeys(name for name, _ in map(result_of, rows) if name))
    base = "base" if any(row.varied for row in rows) else ""
    head = metrics[0] if len(metrics) == 1 else "metric"
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
        seconds = row.wall_s
        # The summary of a run that works has no time yet
        if row.status == "running" and (started := start_time(row.folder)) is not None:
            seconds = time.time() - started.timestamp()
        line = {"job": row.job, "varied": " ".join(row.varied) or base, "status": row.status, "progress": bar}
        line[head] = "-" if not name else number(value) if len(metrics) == 1 else metric(name, value)
        line |= {"device": device, "time": "-" if seconds is None else duration(seconds), "left": left}
        lines.append(line | {"": "<- best" if row.best and len(rows) > 1 else ""})
    # Columns without any content only take room
    unused = {name for name in ("progress", "device", "left") if not any(line[name] for line in lines)}
    unused |= {"device", "time", ""} if narrow else set()
    shown = [
        name
        for name in ("job", "varied", "status", "progress", head, "device", "time", "left", "")
        if name not in unused
    ]
    return shown, [[line[name] for name in shown] for line in lines]


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
        done = [row for row in jobs if row.status == "finished" and row.metric]
        # Without a finished job, there is nothing to rank by, and the group comes last
        rank, spread = (math.inf, 0.0), None
        if values := [row.value for row in done if row.value is not None]:
            first = next(row for row in done if row.value is not None)
            over = ", ".join(key for key in REPEATS if any(key == key_of(word) for row in jobs for word in row.varied))
            mean, deviation = mean_and_deviation(values)
            low, high = min(values), max(values)
            spread = Spread(str(first.metric), settings, over, len(values), mean, deviation, low, high)
            rank = (metrics.index(first.metric), mean if first.mode == "min" else -mean)
        found.append((rank, jobs, spread))
    return [(jobs, spread) for _, jobs, spread in sorted(found, key=lambda each: each[0])]


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and sample standard deviation; None for the deviation of one value."""
    return fmean(values), stdev(values) if len(values) > 1 else None


def _settings(row: JobRow) -> str:
    return " ".join(word for word in row.varied if key_of(word) not in REPEATS)


@dataclass(frozen=True)
class View:
    """A sweep, a run or a folder of runs as it is now."""

    folder: Path  # a sweep, a run, or a folder of runs
    rows: list[JobRow]  # in the order of their numbers or names
    sweeps: list[Path]  # the folders of sweeps, in the order of their names; `folder` itself if it is one
    seconds_left: float | None  # of a sweep that runs, if known
    done: bool  # nothing runs, and nothing will by itself
    notes: list[str]  # what was ignored or could not be read

    @property
    def headline(self) -> str:
        """The number of jobs in each state, the best one, and the time that is left."""
        parts = [finished_of([row.status for row in self.rows], "job")]
        if (best := next((row for row in self.rows if row.best), None)) is not None:
            name = f" (job {best.job})" if len(self.rows) > 1 else ""
            parts.append(f"best {metric(best.metric or '', best.value)}{name}")
        parts += [f"about {duration(self.seconds_left)} left"] if self.seconds_left is not None else []
        return ", ".join(parts)


def look(folder: Path) -> View:
    """Read the state of a sweep, a run or a folder of runs; of a folder with nothing but a sweep, that of the sweep."""
    (scan := Scan()).add(folder)
    if len(scan.sweeps) == 1 and all(row.folder.is_relative_to(next(iter(scan.sweeps))) for row in scan.rows):
        [folder] = scan.sweeps  # with the jobs that wait
    rows = rows_in(folder, scan)
    done = not any(map(works, scan.sweeps)) and not any(row.status == "running" for row in rows)
    left = seconds_left(scan.sweeps[folder]) if folder in scan.sweeps and not done else None
    notes = [*scan.notes, *warning(str(folder), scan.was)]
    return View(folder, rows, [*scan.sweeps], seconds_left=left, done=done, notes=notes)


def follow(folder: Path, console: Console) -> None:
    """Show the state of a folder until nothing runs there any more, or the user presses Ctrl-C.

    That is a live table on a terminal, otherwise lines on what changed, and one a minute.
    """
    before, line_due = None, 0.0
    try:
        while before is None or not before.done:
            began = time.monotonic()
            view = look(folder)
            if (size := console.size) is not None:
                console.live(live_table(view, *size))
            # A log file or a pipe gets lines about changes instead of a screen that is drawn again
            else:
                for line in changes(before, view):
                    console.line(line)
                if began >= line_due:
                    console.line(progress_line(view))
                    line_due = began + _PLAIN_S
            before = view
            # Looking reads many files, so it takes only a small share of the time
            time.sleep(0 if view.done else max(_PERIOD_S, (time.monotonic() - began) / _MOST_SHARE))
    except KeyboardInterrupt:
        pass
    finally:
        console.stop()


def headline_of(ledger: Ledger) -> str:
    """The number of jobs that have ended, and the time that is left, from the ledger alone."""
    again, now = ledger.last.retry == "all", len(ledger.launches) - 1
    counts = Counter(entry.status for entry in ledger.jobs.values() if entry.launch == now or not again)
    parts = [f"{counts[status]} {status}" for status in ("finished", "failed") if counts[status]]
    left = seconds_left(ledger)
    return ", ".join([*parts, *([] if left is None else [f"about {duration(left)} left"])])


def seconds_left(ledger: Ledger) -> float | None:
    """The time for the jobs that are left, at the pace of those that ended in this launch; None if it is not known.

    Jobs that were skipped, as they had finished before, do not count: they take no time.
    """
    launch, now, jobs = ledger.last, len(ledger.launches) - 1, ledger.jobs
    ended = {job for job, entry in jobs.items() if entry.launch == now and entry.status in ENDED}
    if not ended or not launch.jobs:
        return None
    settled = ("finished", "failed") if launch.retry == "never" else ("finished",)
    skipped = {job for job, entry in jobs.items() if entry.status in settled and launch.retry != "all"}
    left = len(launch.jobs.keys() - ended - skipped)
    return (time.time() - launch.time) / len(ended) * left if left else None


def live_table(view: View, width: int, height: int) -> RenderableType:
    """The headline and a table for a terminal of this size: jobs that run, that failed, the newest, the next."""
    from rich.console import Group
    from rich.text import Text

    from runner.tracking.terminal import table_of

    rows, most = view.rows, max(3, height - _ROWS_BESIDE)
    rank = {at: (STATES.index(row.status), at if row.status == "pending" else -at) for at, row in enumerate(rows)}
    first = sorted(rank, key=rank.__getitem__)
    folders = slice(None if width >= _WIDE else -2, None)
    shown = [rows[at] for at in sorted(first[:most])]
    brief = [replace(row, job="/".join(row.job.split("/")[folders]), varied=tuple(short(row.varied))) for row in shown]
    others = Counter(rows[at].status for at in first[most:])
    hidden = ", ".join(f"{others[status]} {status}" for status in STATES if others[status])
    below = [Text(f"and {hidden}", "dim")] if hidden else []
    return Group(Text(clean(view.headline), "bold"), table_of(*columns_of(brief, narrow=width < _WIDE)), *below)


def short(words: Sequence[str]) -> list[str]:
    """Overrides with each key by its last part, unless another one ends alike."""
    parts = [(key_of(word), key_of(word).rpartition(".")[2], word.partition("=")[2]) for word in words]
    ends = Counter(end for _, end, _ in parts)
    return [f"{end if ends[end] == 1 else key}={value}" for key, end, value in parts]


def changes(before: View | None, view: View) -> list[str]:
    """The jobs that changed their state after an earlier look, as plain lines."""
    known = {row.job: row.status for row in before.rows} if before is not None else {}
    lines = []
    for row in view.rows:
        if row.job == "-" or known.get(row.job) == row.status or (before is None and row.status in ENDED):
            continue
        text = f"job {row.job} {row.status}" + (f": {' '.join(row.varied)}" if row.varied else "")
        text += f", {row.metric} {number(row.value)}" if row.status == "finished" and row.metric else ""
        lines.append(text + (f": {row.error}; log: {row.log}; again: {row.repeat}" if row.failed else ""))
    return lines


def progress_line(view: View) -> str:
    """The state as one plain line: the headline, and the jobs that run."""
    parts = [view.headline]
    for row in [row for row in view.rows if row.status == "running"][:8]:
        (name, value), now = result_of(row), row.progress
        steps = f" step {now.global_step}/{now.total_steps or '?'}" if now is not None else ""
        parts.append(f"job {row.job}{steps}{f' {metric(name, value)}' if value is not None else ''}")
    return "; ".join(parts)
