"""Runs and jobs of sweeps below a folder, as their files say: which there are, and how each of them ended."""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from runner.config.keys import OF_THE_SWEEP, at, key_of, within
from runner.config.output_folders import holds_run
from runner.config.reading import number_or_none, read_json, read_overrides, read_summary
from runner.config.secrets import mask_text, mask_words
from runner.sweeps.ledger import ENDED, Entry, Ledger, Outcome, Records, outcome
from runner.tracking.run_directory import works

FAILED = ("failed", "died")
WITHOUT_RESULT = (*FAILED, "pruned")
"""What a run of these states reached is never the best."""
_OF_CONFIGS = ("--config-dir", "-cd", "--config-name", "-cn")


@dataclass(frozen=True)
class JobRow:
    """One run, or one job of a sweep as `sweep.json` has it, without the last two."""

    job: str  # its place below the folder that was looked at; in a sweep its number
    varied: tuple[str, ...]  # the overrides that not all others have
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

    @property
    def failed(self) -> bool:
        """Whether the job failed or died; a preempted one can be resumed."""
        return self.status in FAILED


@dataclass
class Found:
    """What lies below some folders.

    Attributes:
        rows: runs in the order of their folders, those of a sweep as its ledger has them, pending ones too.
        notes: what was noticed.
        sweeps: what the ledgers say, by folder.
    """

    rows: list[JobRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sweeps: dict[Path, Records] = field(default_factory=dict)
    _seen: set[Path] = field(default_factory=set)
    _around: dict[Path, Records] = field(default_factory=dict)  # the ledgers beside runs that were added by themselves

    def add(self, folder: Path) -> None:
        """Add what is at or below a folder and was not there before; links to folders are not followed."""
        place = _absolute(folder)
        if place in self._seen:
            return
        if holds_run(folder):
            if place.parent not in self._around:
                self._around[place.parent] = Ledger(place.parent).read()
            records = self._around[place.parent]
            self._add_run(folder, next((each for each in records.jobs.values() if each.folder == place), None), records)
            return
        self._seen.add(place)
        records = Ledger(folder).read()
        entries = {entry.folder: entry for entry in records.jobs.values()}
        if records.launches:
            self.sweeps[folder] = records
        # The folder of a job that started again in another one does not count.
        self._seen |= {_absolute(folder / name) for name in records.folders} - {*map(_absolute, entries)}
        for path in sorted({*self._inside(folder), *entries}, key=_by_number):
            # A search keeps the result of a trial whose folder is gone; any other job starts again.
            if path in entries and (path.is_dir() or (not records.planned and entries[path].status in ENDED)):
                self._add_run(path, entries[path], records)
            elif path not in entries:
                self.add(path)
        left = [words for job, words in records.planned.items() if not _is_there(records, job)]
        self.rows += [JobRow("-", (), tuple(words), "pending", folder=folder) for words in left]
        if left:
            self.notes.append(f"{folder}: {len(left)} of {len(records.planned)} jobs have not started")

    def _add_run(self, folder: Path, entry: Entry | None, around: Records) -> None:
        if (place := _absolute(folder)) not in self._seen:
            self._seen.add(place)
            self.rows.append(row_of(folder, entry, around.flags))

    def _inside(self, folder: Path) -> list[Path]:
        try:
            inside = [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]
        except OSError as error:
            self.notes += [f"{folder}: {error.strerror}"] if folder.exists() else []
            return []
        return [path for path in inside if not path.name.startswith(".")]


def rows_in(folder: Path, found: Found | None = None) -> list[JobRow]:
    """The rows of a sweep, a run or a folder of runs: what varies among them, and the best one marked.

    Of a folder of several sweeps, the jobs that have not started are not among them.
    """
    if found is None:
        (found := Found()).add(folder)
    records = found.sweeps.get(folder)
    rows = [row for row in found.rows if records is not None or row.status != "pending"]
    swept = {key for launch in records.launches for key in launch["swept"]} if records is not None else set()
    counts = Counter(word for row in rows for word in set(row.overrides))
    common = {word for word, count in counts.items() if count == len(rows) > 1 or (swept and key_of(word) not in swept)}
    modes = {row.metric: row.mode for row in rows if row.mode is not None}
    rows = [
        replace(
            row,
            job="-" if row.status == "pending" else _name(row.folder, folder),
            varied=tuple(word for word in row.overrides if word not in common),
            mode=row.mode or modes.get(row.metric),  # the ledger has none, if the folder is gone
        )
        for row in rows
    ]
    together: dict[tuple[str | None, str], list[JobRow]] = {}
    for row in rows:
        if row.value is not None and row.mode is not None and row.status not in WITHOUT_RESULT:
            together.setdefault((row.metric, row.mode), []).append(row)
    best = [
        (min if mode == "min" else max)(same, key=lambda row: row.value or 0.0) for (_, mode), same in together.items()
    ]
    return [replace(row, best=True) if any(row is each for each in best) else row for row in rows]


def row_of(folder: Path, entry: Entry | None = None, flags: Sequence[str] = ()) -> JobRow:
    """What the files in the folder of a run say.

    Args:
        folder: of the run.
        entry: what the ledger of its sweep says about it.
        flags: of the command of its sweep.
    """
    summary, known = read_summary(folder), entry.sentence if entry is not None else None
    found, error = outcome(folder), known
    if summary is None and entry is not None and not folder.exists():
        found = Outcome(entry.status, entry.metric, entry.value, entry.sentence)
    if found.status in ENDED:
        status, error = found.status, found.sentence
    elif works(folder):
        status, error = "running", None
    else:
        status, error = "died", found.sentence or known or _why_died(folder, summary)
    best = (summary or {}).get("best")
    best = best if isinstance(best, dict) and best.get("metric") is not None else {}
    words = tuple(entry.overrides if entry is not None and entry.overrides else _overrides(folder))
    step, failed = number_or_none(best.get("global_step")), status in FAILED
    return JobRow(
        job=folder.name,
        varied=words,
        overrides=words,
        status=status,
        metric=comparable(found.metric) if best or summary is None else None,
        mode=None if not best else "min" if best.get("mode") == "min" else "max",
        value=found.value,
        step=None if step is None else int(step),
        error=error,
        wall_s=number_or_none((summary or {}).get("wall_s")),
        log=str(folder / "run.log") if failed else None,
        repeat=command_alone(words, flags or _flags_of(folder)) if failed else None,
        folder=folder,
        summary=summary or {},
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


def _overrides(folder: Path) -> list[str]:
    try:
        return mask_words(read_overrides(folder))
    except (OSError, ValueError):
        return []


def _why_died(folder: Path, summary: dict[str, Any] | None) -> str:
    if summary is not None and summary.get("status") == "running":
        return "it is still marked as running: it was killed"
    if summary is not None:
        return f"its summary.json is damaged: no run has the status {summary.get('status')}"
    there = os.path.lexists(folder / "summary.json")
    return "its summary.json is damaged, so its result is unknown" if there else "it left no summary.json"


def _is_there(records: Records, job: str) -> bool:
    return job in records.jobs and records.jobs[job].folder.is_dir()


def _name(folder: Path, base: Path) -> str:
    return folder.name if folder == base else str(folder.relative_to(base))


def _absolute(folder: Path) -> Path:
    return Path(os.path.abspath(folder))  # noqa: PTH100  `..` goes, and links stay


def _by_number(path: Path) -> tuple[int, str]:
    return (int(path.name) if path.name.isdecimal() else 2**63, str(path))
