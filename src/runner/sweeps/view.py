"""What a sweep, a run or a folder of runs is doing, from its files: the same for every launcher, and from another machine."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from runner.config.keys import key_of
from runner.config.reading import start_time
from runner.sweeps.ledger import ENDED, Records
from runner.sweeps.rows import Found, JobRow, comparable, rows_in
from runner.tracking.formats import STATE_COLOURS, duration, metric, number, wrapped
from runner.tracking.progress_file import Progress, read_progress
from runner.tracking.run_directory import works

if TYPE_CHECKING:
    from rich.console import Group
    from rich.text import Text

_SILENT_S = 60.0
_BAR = 8
_ORDER = ("running", "failed", "died", "preempted", "finished", "pruned", "pending")


@dataclass(frozen=True)
class Seen:
    """A job or run, and how far it is if it is running."""

    row: JobRow
    progress: Progress | None = None
    started: datetime | None = None

    @property
    def share(self) -> str:
        """How much is complete, for people."""
        found = self.progress
        if found is None:
            return ""
        steps = f"{found.global_step}/{found.total_steps}" if found.total_steps else str(found.global_step)
        return f"{found.share:.0%} step {steps}" if found.total_steps else f"step {steps}"

    @property
    def result(self) -> tuple[str, float | None]:
        """The name of the monitored metric, or of the training loss before the first evaluation, and the best value so far."""
        found = self.progress
        if found is not None and found.best is not None:
            return comparable(found.metric) or "", found.best
        if found is not None and "loss" in found.train:
            return "train loss", found.train["loss"]
        return self.row.metric or "", self.row.value

    @property
    def left(self) -> str:
        """How long it will take, or how long nothing was heard of it."""
        found = self.progress
        if found is None:
            return ""
        silent = time.time() - found.time
        return f"silent for {duration(silent)}" if silent > _SILENT_S else duration(found.seconds_left)

    @property
    def passed_s(self) -> float | None:
        """Seconds that it took, or takes already."""
        if self.row.status == "running" and self.started is not None:
            return max(0.0, time.time() - self.started.timestamp())
        return self.row.wall_s


@dataclass(frozen=True)
class View:
    """What lies in a folder.

    Attributes:
        folder: a sweep, a run, or a folder of runs.
        jobs: in the order of their numbers or names.
        best: the best value of the monitored metric among them, with the name of its job.
        seconds_left: of a sweep, if known.
        done: whether nothing runs, and nothing will by itself.
        sweeps: the folders of sweeps, in the order of their names; `folder` itself if it is one.
    """

    folder: Path
    jobs: list[Seen]
    best: str
    seconds_left: float | None
    done: bool
    sweeps: list[Path]

    @property
    def is_sweep(self) -> bool:
        """Whether all of it is one sweep."""
        return self.folder in self.sweeps

    @property
    def headline(self) -> str:
        """How many jobs are in which state, the best one, and the time that is left."""
        others = [seen for seen in self.jobs if seen.row.status != "finished"]
        parts = [f"{len(self.jobs) - len(others)} of {len(self.jobs)} finished", *_counted(others)]
        parts += [f"best {self.best}"] if self.best else []
        parts += [f"about {duration(self.seconds_left)} left"] if self.seconds_left is not None else []
        return ", ".join(parts)


def look(folder: Path) -> View:
    """Read the state of a sweep, a run or a folder of runs; of a folder with nothing but a sweep, that of the sweep."""
    (found := Found()).add(folder)
    if len(found.sweeps) == 1 and all(row.folder.is_relative_to(next(iter(found.sweeps))) for row in found.rows):
        [folder] = found.sweeps  # with the jobs that wait
    jobs = [_seen(row) for row in rows_in(folder, found)]
    left = seconds_left(found.sweeps[folder]) if folder in found.sweeps else None
    best = next((seen.row for seen in jobs if seen.row.best), None)
    told = metric(best.metric, best.value) if best is not None and best.metric and best.value is not None else ""
    told += f" (job {best.job})" if best is not None and told and len(jobs) > 1 else ""
    done = not any(map(works, found.sweeps)) and not any(seen.row.status == "running" for seen in jobs)
    return View(folder, jobs, told, None if done else left, done, list(found.sweeps))


def headline_of(records: Records) -> str:
    """How many jobs have ended, and the time that is left, from the ledger alone."""
    again, now = (records.launches or [{}])[-1].get("retry") == "all", len(records.launches) - 1
    counts = Counter(entry.status for entry in records.jobs.values() if entry.launch == now or not again)
    parts = [f"{counts[status]} {status}" for status in ("finished", "failed") if counts[status]]
    left = seconds_left(records)
    return ", ".join([*parts, *([] if left is None else [f"about {duration(left)} left"])])


def seconds_left(records: Records) -> float | None:
    """How long the jobs that are left will take, at the pace of those that ended in this launch; None if it is not known.

    Jobs that were skipped, as they had finished before, do not count: they take no time.
    """
    launch, now = (records.launches or [{}])[-1], len(records.launches) - 1
    ended = [job for job, entry in records.jobs.items() if entry.launch == now and entry.status in ENDED]
    if not ended or not launch.get("jobs"):
        return None
    settled = {"finished"} | ({"failed"} if launch.get("retry") == "never" else set())
    known = records.jobs
    left = [
        job
        for job in launch["jobs"]
        if job not in ended and (job not in known or launch.get("retry") == "all" or known[job].status not in settled)
    ]
    return (time.time() - float(launch["time"])) / len(ended) * len(left) if left else None


def _seen(row: JobRow) -> Seen:
    if row.status != "running":
        return Seen(row)
    return Seen(row, read_progress(row.folder), start_time(row.folder))


def table_of(view: View, width: int, rows: int) -> Group:
    """The headline, and a table of at most `width` columns and `rows` jobs: those that run, that failed, the newest, the next.

    What does not fit is omitted: the device, the folders of a job but the last two, the time. Then the settings get several
    lines, before they are omitted, and the time that is left.
    """
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    place = {id(seen): at if seen.row.status == "pending" else -at for at, seen in enumerate(view.jobs)}
    order = sorted(view.jobs, key=lambda seen: (_ORDER.index(seen.row.status), place[id(seen)]))
    metrics = {seen.result[0] for seen in view.jobs if seen.result[0]}
    shared = metrics.pop() if len(metrics) == 1 else ""
    base = "base" if any(seen.row.varied for seen in view.jobs) else ""

    def chosen(most: int) -> dict[int, dict[str, str | Text]]:
        ids = {id(seen) for seen in (order if len(order) <= most else order[: max(1, most - 1)])}
        return {at: _cells(seen, shared, base) for at, seen in enumerate(view.jobs) if id(seen) in ids}

    cells = chosen(rows)
    names = ["job", "settings", "state", "progress", shared or "metric", "device", "time", "left"]
    if not any(seen.progress for seen in view.jobs):
        names = [name for name in names if name not in ("device", "left")]

    def too_wide(settings: int | None = None) -> int:
        widths = {name: max(len(name), *(len(row[name]) for row in cells.values())) for name in names}
        if settings is not None and "settings" in widths:
            widths["settings"] = settings
        return sum(widths.values()) + 2 * (len(names) - 1) - width

    longest = max((len(word) for row in cells.values() for word in str(row["settings"]).split()), default=0)
    for step in ("device", "folders", "time", "settings", "left"):
        if too_wide(max(longest, 8) if step in ("left", "settings") else None) <= 0:
            continue
        if step == "folders":
            for row in cells.values():
                row["job"] = "/".join(str(row["job"]).split("/")[-2:])
        elif step in names:
            names.remove(step)
    if "settings" in names and (much := too_wide()) > 0:
        room = max(len(str(row["settings"])) for row in cells.values()) - much
        lines = max(len(wrapped(str(row["settings"]), room)) for row in cells.values())
        kept = chosen(max(2, rows // lines))
        cells = {at: row for at, row in cells.items() if at in kept}
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in names:
        table.add_column(name, header_style="bold", no_wrap=name != "settings", overflow="fold")
    for row in cells.values():
        table.add_row(*(row[name] for name in names))
    hidden = _counted(seen for at, seen in enumerate(view.jobs) if at not in cells)
    below = [Text(f"and {', '.join(hidden)}", style="dim")] if hidden else []
    return Group(Text(view.headline, style="bold"), table, *below)


def _counted(jobs: Iterable[Seen]) -> list[str]:
    """How many jobs are in each state."""
    counts = Counter(seen.row.status for seen in jobs)
    return [f"{counts[status]} {status}" for status in _ORDER if counts[status]]


def _cells(seen: Seen, shared: str, base: str) -> dict[str, str | Text]:
    from rich.text import Text

    row, found, bar = seen.row, seen.progress, Text()
    if found is not None and found.total_steps:
        filled = round(found.share * _BAR)
        bar.append("━" * filled, "green").append("─" * (_BAR - filled), "dim").append(f" {found.share:4.0%}")
    name, value = seen.result
    result = "" if not name else number(value) if name == shared else metric(name, value)
    return {
        "job": row.job,
        "settings": short(row.varied) or base,
        "state": Text(row.status, style=STATE_COLOURS.get(row.status, "dim")),
        "progress": bar,
        shared or "metric": result + (" best" if row.best else ""),
        "device": found.device if found else "",
        "time": "" if seen.passed_s is None else duration(seen.passed_s),
        "left": seen.left,
    }


def short(words: Sequence[str]) -> str:
    """Overrides as one text, each key by its last part unless another one ends alike."""
    keys = [key_of(word) for word in words]
    last = Counter(key.rpartition(".")[2] for key in keys)
    names = [key.rpartition(".")[2] if last[key.rpartition(".")[2]] == 1 else key for key in keys]
    return " ".join(f"{name}={word.partition('=')[2]}" for name, word in zip(names, words, strict=True))


def lines_of(before: View | None, view: View) -> list[str]:
    """What changed since an earlier look, in plain lines."""
    known = {seen.row.job: seen.row.status for seen in before.jobs} if before is not None else {}
    found = []
    for seen in view.jobs:
        row = seen.row
        if row.job == "-" or known.get(row.job) == row.status or (before is None and row.status in ENDED):
            continue
        text = f"job {row.job} {row.status}" + (f": {' '.join(row.varied)}" if row.varied else "")
        text += f", {row.metric} {number(row.value)}" if row.status == "finished" and row.metric else ""
        found.append(text + (f": {row.error}; log: {row.log}; again: {row.repeat}" if row.failed else ""))
    return found


def progress_line(view: View) -> str:
    """The state in one plain line."""
    running = [seen for seen in view.jobs if seen.row.status == "running"]
    told = [f"job {seen.row.job} {seen.share or 'starts'} {_result(seen)}".strip() for seen in running[:8]]
    return "; ".join([view.headline, *told])


def _result(seen: Seen) -> str:
    name, value = seen.result
    return metric(name, value) if name and value is not None else ""


class Display:
    def __init__(self, folder: Path, console) -> None:
        self.live = False
        self._console = console

    def line(self, text: str, error: bool = False) -> None:
        (self._console.error if error else self._console.line)(text)

    def refresh(self, now: bool = False) -> None:
        pass

    def stop(self) -> None:
        pass
