"""The state of a sweep, a run or a folder of runs, from its files, and the live table of `watch`: the same for every launcher."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from runner.config.gone import warning
from runner.config.keys import key_of
from runner.run.directory import works
from runner.sweeps.ledger import ENDED, Records
from runner.sweeps.rows import STATES, JobRow, Scan, rows_in
from runner.sweeps.table import columns_of, finished_of, result_of
from runner.tracking.console import Console
from runner.tracking.formats import clean, duration, metric, number

if TYPE_CHECKING:
    from rich.console import RenderableType

_PERIOD_S = 1.0
_MOST_SHARE = 0.05  # of the time for looking at the files
_PLAIN_S = 60.0
_ROWS_BESIDE = 6  # of the terminal, for what is not a job
_WIDE = 100  # columns; below, a job has the last two folders of its name, and no device, time and mark


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


def headline_of(records: Records) -> str:
    """The number of jobs that have ended, and the time that is left, from the ledger alone."""
    again, now = (records.launches or [{}])[-1].get("retry") == "all", len(records.launches) - 1
    counts = Counter(entry.status for entry in records.jobs.values() if entry.launch == now or not again)
    parts = [f"{counts[status]} {status}" for status in ("finished", "failed") if counts[status]]
    left = seconds_left(records)
    return ", ".join([*parts, *([] if left is None else [f"about {duration(left)} left"])])


def seconds_left(records: Records) -> float | None:
    """The time for the jobs that are left, at the pace of those that ended in this launch; None if it is not known.

    Jobs that were skipped, as they had finished before, do not count: they take no time.
    """
    launch, now, jobs = (records.launches or [{}])[-1], len(records.launches) - 1, records.jobs
    ended = {job for job, entry in jobs.items() if entry.launch == now and entry.status in ENDED}
    if not ended or not launch.get("jobs"):
        return None
    settled = ("finished", "failed") if launch.get("retry") == "never" else ("finished",)
    skipped = {job for job, entry in jobs.items() if entry.status in settled and launch.get("retry") != "all"}
    left = len(launch["jobs"].keys() - ended - skipped)
    return (time.time() - float(launch["time"])) / len(ended) * left if left else None


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
    head, cells = columns_of(brief)
    kept = [at for at, name in enumerate(head) if width >= _WIDE or name not in ("", "device", "time")]
    table = table_of([head[at] for at in kept], [[line[at] for at in kept] for line in cells])
    return Group(Text(clean(view.headline), "bold"), table, *below)


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
