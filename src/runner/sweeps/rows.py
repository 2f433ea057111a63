"""The runs and the jobs of sweeps below a folder, as their files describe them."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from runner.base.reading import number_or_none, read_json, read_overrides, read_summary
from runner.base.secrets import mask_text, mask_words
from runner.config.gone import words_without
from runner.config.keys import OF_THE_SWEEP, at, key_of, within
from runner.config.output_folders import holds_run
from runner.run.directory import works
from runner.sweeps.ledger import ENDED, NAME, Entry, Ledger, outcome
from runner.tracking.formats import amount
from runner.tracking.run_files import Progress, read_progress

FAILED = ("failed", "died")
STATES = ("running", *FAILED, "preempted", "finished", "pruned", "pending")
WITHOUT_RESULT = (*FAILED, "pruned")
"""What a run of these states reached is never the best."""
_OF_CONFIGS = ("--config-dir", "-cd", "--config-name", "-cn")


@dataclass(kw_only=True)
class JobRow:
    """One run, or one job of a sweep as `sweep.json` has it, without the last three."""

    job: str = "-"  # its place below the folder that was looked at; in a sweep its number
    varied: tuple[str, ...] = ()  # the overrides that not all others have
    overrides: tuple[str, ...]
    status: str  # `finished`, `failed`, `preempted`, `died` if it was killed, `running`, `pending` if it did not start, `pruned`
    metric: str | None = None  # the monitored metric, such as `val/accuracy`
    mode: Literal["max", "min"] | None = None
    value: float | None = None  # the best value of the metric
    step: int | None = None  # the `global_step` of that value
    best: bool = False  # it is the first with the best value of this metric
    error: str | None = None  # its first line
    wall_s: float | None = None
    log: str | None = None  # of a job that failed
    repeat: str | None = None  # the command that runs it alone
    folder: Path = field(default=Path(), repr=False)  # that of the sweep for a job that is pending
    summary: dict[str, Any] = field(default_factory=dict, repr=False)  # the content of its `summary.json`
    progress: Progress | None = field(default=None, repr=False)  # of a job that is running

    @property
    def failed(self) -> bool:
        """The job failed or died; a preempted one can be resumed."""
        return self.status in FAILED


@dataclass
class Scan:
    """The runs and sweeps below some folders."""

    # In the order of their folders; those of a sweep as its ledger has them, with the jobs that have not started
    rows: list[JobRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what was ignored or could not be read
    sweeps: dict[Path, Ledger] = field(default_factory=dict)  # their ledgers, by folder
    was: dict[str, Any] = field(default_factory=dict)  # settings in ledgers that are gone, see `runner.config.gone`
    _visited: set[Path] = field(default_factory=set)
    _around: dict[Path, Ledger] = field(default_factory=dict)  # the ledgers beside runs that were added by themselves

    def add(self, folder: Path) -> None:
        """Add what is at or below a folder and was not there before; links to folders are not followed."""
        place = _absolute(folder)
        if place in self._visited:
            return
        # A run may be a job, so the ledger beside it knows its words and its result
        if holds_run(folder):
            if (around := self._around.get(place.parent)) is None:
                around = self._around[place.parent] = self._read(place.parent)
            entry = next((each for each in around.jobs.values() if each.folder == place), None)
            self._add_run(folder, entry, around)
            return
        self._visited.add(place)
        ledger = self._read(folder)
        entries = {entry.folder: entry for entry in ledger.jobs.values()}
        if ledger.launches:
            self.sweeps[folder] = ledger
        inside = set[Path]()
        # A folder that cannot be read is noted, and the others are shown
        try:
            folders = [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
            inside = {path for path in folders if not path.name.startswith(".")}
        except OSError as error:
            self.notes += [] if isinstance(error, FileNotFoundError) else [f"{folder}: {error.strerror}"]
        # The folder of a job that started again in another one does not count.
        self._visited |= {place / path.name for path in inside - entries.keys() if path.name in ledger.folders}
        # A search keeps the result of a trial whose folder is gone; any other job starts again.
        gone = {path for path, entry in entries.items() if not ledger.planned and entry.status in ENDED}
        for path in sorted(
            inside | gone, key=lambda path: (int(path.name) if path.name.isdecimal() else math.inf, path.name)
        ):
            if path in entries:
                self._add_run(path, entries[path], ledger)
            else:
                self.add(path)
        # Jobs that were planned and have no folder are pending
        started = {job for job, entry in ledger.jobs.items() if entry.folder in inside}
        left = [words for job, words in ledger.planned.items() if job not in started]
        self.rows += [JobRow(overrides=tuple(words), status="pending", folder=folder) for words in left]

    def _add_run(self, folder: Path, entry: Entry | None, around: Ledger) -> None:
        if (place := _absolute(folder)) not in self._visited:
            self._visited.add(place)
            self.rows.append(_row_of(folder, entry, around.last.flags or []))

    def _read(self, folder: Path) -> Ledger:
        """The ledger in a folder, with a note on what it has elsewhere."""
        ledger = Ledger.read(folder)
        self.was |= ledger.was
        if outside := list(dict.fromkeys(ledger.outside)):  # a job has several lines
            ignored = f"ignored {amount(len(outside), 'job')} of {NAME} whose folder is a link or not in the sweep"
            self.notes.append(f"{folder}: {ignored}: {outside[0]}{', ...' if len(outside) > 1 else ''}")
        return ledger


def rows_in(folder: Path, scan: Scan | None = None) -> list[JobRow]:
    """The rows of a sweep, a run or a folder of runs: what varies among them, and the best one marked.

    Of a folder of several sweeps, the jobs that have not started are not among them.
    """
    if scan is None:
        (scan := Scan()).add(folder)
    launches = scan.sweeps[folder].launches if folder in scan.sweeps else []
    rows = [row for row in scan.rows if launches or row.status != "pending"]
    # Words that all rows share say nothing about their difference
    swept = {key for launch in launches for key in launch.swept}
    counts = Counter(word for row in rows for word in set(row.overrides))
    common = {word for word, count in counts.items() if count == len(rows) > 1 or (swept and key_of(word) not in swept)}
    modes = {row.metric: row.mode for row in rows if row.mode is not None}
    ranked = dict[tuple[str | None, str], list[JobRow]]()
    for row in rows:
        if row.status != "pending":
            row.job = row.folder.name if row.folder == folder else str(row.folder.relative_to(folder))
        row.varied = tuple(word for word in row.overrides if word not in common)
        row.mode = row.mode or modes.get(row.metric)  # the ledger has none, if the folder is gone
        if row.value is not None and row.mode is not None and row.status not in WITHOUT_RESULT:
            ranked.setdefault((row.metric, row.mode), []).append(row)
    # The best is one of those with a result in the same metric and direction, the first of equal ones
    for (_, mode), those in ranked.items():
        (min if mode == "min" else max)(those, key=lambda row: row.value or 0.0).best = True
    return rows


def _row_of(folder: Path, entry: Entry | None, flags: Sequence[str]) -> JobRow:
    """The row of a run from the files in its folder, its entry in a ledger, and the flags of the command of its sweep."""
    summary, ended, progress = read_summary(folder), outcome(folder), None
    known = entry.sentence if entry is not None else None
    # Without a folder, the ledger is the only one who knows
    if summary is None and entry is not None and not os.path.lexists(folder):
        ended = entry
    # The summary is right if it says ended; otherwise the lock tells a run that works from a dead one
    if ended.status in ENDED:
        status, error = ended.status, ended.sentence
    elif works(folder):
        status, error, progress = "running", None, read_progress(folder)
    else:
        status, error = "died", ended.sentence or known or _why_died(folder, summary)
    words = entry.overrides if entry is not None else []
    if not words:
        with contextlib.suppress(OSError, ValueError):  # a run that failed early has none
            words = mask_words(words_without(read_overrides(folder)))
    content, failed = summary or {}, status in FAILED
    best = found if isinstance(found := content.get("best"), dict) else {}
    step = number_or_none(best.get("global_step"))
    return JobRow(
        overrides=tuple(words),
        status=status,
        metric=comparable(ended.metric),
        mode=None if not best else "min" if best.get("mode") == "min" else "max",
        value=ended.value,
        step=None if step is None else int(step),
        error=error,
        wall_s=number_or_none(content.get("wall_s")),
        log=str(folder / "run.log") if failed else None,
        repeat=command_alone(words, flags or _flags_of(folder)) if failed else None,
        folder=folder,
        summary=content,
        progress=progress,
    )


def comparable(metric: str | None) -> str | None:
    """The name under which runs are compared: `val/accuracy` also if averaged weights reached it (`val/ema_accuracy`)."""
    return metric and re.sub("^val/(ema|swa)_", "val/", metric)


def command_alone(overrides: Iterable[str], flags: Sequence[str]) -> str:
    """The command that runs one job of a sweep by itself."""
    words = [word for word in overrides if not within(key_of(word), OF_THE_SWEEP)]
    return mask_text(shlex.join(["python", "-m", "runner", "train", *flags, *words]))


def _flags_of(folder: Path) -> list[str]:
    """The flags of a run's own command that say where its config is."""
    given = at(read_json(folder / "environment.json"), "command")
    words = [str(word) for word in given] if isinstance(given, list) else []
    parts = [(*word.partition("="), *words[at : at + 1]) for at, word in enumerate(words, 1)]
    return [f"{name}={value or ''.join(after)}" for name, _, value, *after in parts if name in _OF_CONFIGS]


def _why_died(folder: Path, summary: dict[str, Any] | None) -> str:
    if summary is not None and summary.get("status") == "running":
        return "it is still marked as running: it was killed"
    if summary is not None:
        return f"its summary.json is damaged: no run has the status {summary.get('status')}"
    there = os.path.lexists(folder / "summary.json")
    return "its summary.json is damaged, so its result is unknown" if there else "it left no summary.json"


def _absolute(folder: Path) -> Path:
    return Path(os.path.abspath(folder))  # noqa: PTH100  `..` goes, and links stay
