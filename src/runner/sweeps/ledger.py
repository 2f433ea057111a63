"""The ledger of a sweep: `sweep.jsonl` in its folder, one line for each event, from which the same command continues.

Every job decides from this file, before anything heavy is imported, whether it has to run and in which folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runner.config.changes import changes_result
from runner.config.keys import flatten, key_of, within
from runner.config.output_folders import holds_run
from runner.config.reading import number_or_none, read_regular, read_summary
from runner.config.secrets import mask_text, mask_values, mask_words
from runner.tracking.files import writing

if sys.platform != "win32":
    import fcntl

NAME = "sweep.jsonl"
_LARGEST = 2**30  # bytes
_OF_LAUNCH = ("time", "swept", "base", "jobs", "retry", "fail_fast")
ENDED = ("finished", "pruned", "failed", "preempted")
# A run may be resumed with other values of these, but they decide what a job of a sweep is.
_COUNT_TOO = ("ckpt_path", "dry_run", "data.root")


def counted(values: dict[str, Any], swept: Sequence[str] = ()) -> dict[str, Any]:
    """The values by dotted key that make a job what it is: those that change its result, and all of the swept keys."""
    count_too = (*_COUNT_TOO, *swept)
    leaves = flatten(mask_values(values)).items()
    return {key: value for key, value in leaves if changes_result(key) or within(key, count_too)}


def identity(values: dict[str, Any], words: Sequence[str], swept: Sequence[str]) -> str:
    """What tells a job from the others of its sweep, whatever its number.

    Args:
        values: the resolved config.
        words: the overrides of the job; those of swept presets count, as a preset may set keys that do not.
        swept: keys and groups that have several values in the sweep.
    """
    keys = [key.replace("/", ".") for key in swept]
    presets = [word for word in mask_words(words) if key_of(word) in swept and key_of(word).split("/")[0] not in values]
    content = [counted(values, keys), sorted(word.lstrip("+") for word in presets if "." not in key_of(word))]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Plan:
    """A sweep before its first job.

    Attributes:
        values: the composed config of the first job.
        swept: keys and groups that have several values.
        jobs: the overrides of each job by its identity; None if a sweeper chooses them later.
        base: composes the command without the swept values; see `counted`.
        flags: of the command, as far as one job alone needs them.
        given: folder that `hydra.sweep.dir` names.
        detach: whether the sweep runs in the background.
        searches: whether the jobs are chosen by a study that says whether anything is left.
    """

    values: dict[str, Any]
    swept: Sequence[str] = ()
    jobs: dict[str, list[str]] | None = None
    base: Callable[[], dict[str, Any]] = dict
    flags: Sequence[str] = ()
    given: Path | None = None
    detach: bool = False
    searches: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
        status: `finished`, `pruned`, `failed`, `preempted`, or another one of a run that did not end.
        metric: name of the monitored metric, if it was computed.
        value: its best value; None if it was never finite.
        sentence: why the run did not finish.
    """

    status: str
    metric: str | None = None
    value: float | None = None
    sentence: str | None = None


@dataclass(frozen=True)
class Entry:
    """What the last line about a job says: its folder, its overrides with secrets masked, and the launch it belongs to."""

    folder: Path
    overrides: list[str]
    status: str
    launch: int
    sentence: str | None = None
    metric: str | None = None
    value: float | None = None


@dataclass(frozen=True)
class End:
    """How a job of the last launch ended, seen from outside of its process.

    Attributes:
        outcome: its status is `retried` too if the job is repeated at once, and `pending` if it did not start.
        entry: what the ledger had about it.
        killed: whether its process could not record it.
    """

    outcome: Outcome
    entry: Entry | None
    killed: bool = False


@dataclass
class Records:
    """What a ledger says: its launches in order, and the last line about each job by identity."""

    launches: list[dict[str, Any]] = field(default_factory=list)
    jobs: dict[str, Entry] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)
    stopped: bool = False  # whether a signal stopped the last launch
    retried: Counter[str] = field(default_factory=Counter)
    """How often each job was repeated at once in the last launch."""

    @property
    def flags(self) -> list[str]:
        """Flags of the last command, as far as one job alone needs them."""
        return list(self.launches[-1].get("flags") or []) if self.launches else []

    @property
    def planned(self) -> dict[str, list[str]]:
        """The overrides of each job of the last launch by identity; empty if a sweeper chooses them later."""
        return (self.launches[-1]["jobs"] or {}) if self.launches else {}

    @property
    def failed_now(self) -> Entry | None:
        """A job that failed in the last launch."""
        now = len(self.launches) - 1
        return next((job for job in self.jobs.values() if job.status == "failed" and job.launch == now), None)


class Ledger:
    """The ledger in the folder of a sweep; several processes may append to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / NAME

    def read(self) -> Records:
        """What the file says; lines that a crash left incomplete are skipped."""
        try:
            return self._records(read_regular(self.path, _LARGEST))
        except OSError:
            return Records()

    def append(self, event: str, **content: Any) -> None:
        """Append a line, on the disk when this returns.

        Raises:
            UserError: it cannot be written.
        """
        with self._locked() as file:
            self._write(file, event, content)

    def _records(self, text: bytes) -> Records:
        records = Records()
        for line in text.splitlines():
            try:
                found = json.loads(line)
                event = found["event"]
                if event in ("launch", "stop"):
                    if event == "launch":
                        _ = [found[key] for key in _OF_LAUNCH]
                        records.launches.append(found)
                    records.stopped = event == "stop"
                    records.retried.clear()
                    continue
                name, overrides = str(found["folder"]), [str(word) for word in found["overrides"]]
                told = found.get("sentence"), found.get("metric"), number_or_none(found.get("value"))
                entry = Entry(self.folder / name, overrides, event, len(records.launches) - 1, *told)
                records.jobs[str(found["job"])] = entry
                records.retried[str(found["job"])] += event == "retried"
                records.folders.add(name)
            except (ValueError, LookupError, TypeError, RecursionError):
                continue
        return records

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        """The file, open, while no other process appends to it."""
        # A folder may come from someone else, and a link in it would lead elsewhere.
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
        with writing(self.path):
            file = os.open(self.path, flags, 0o644)
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                if sys.platform != "win32":
                    fcntl.lockf(file, fcntl.LOCK_EX)
            yield file
        finally:
            os.close(file)

    def _write(self, file: int, event: str, content: dict[str, Any]) -> None:
        before = _content(file)
        torn = before and not before.endswith(b"\n")
        line = json.dumps({"event": event, "time": round(time.time(), 3), **content}, default=str)
        left = (b"\n" if torn else b"") + line.encode() + b"\n"
        with writing(self.path):
            try:
                while left:  # a disk that becomes full takes a part
                    left = left[os.write(file, left) :]
                os.fsync(file)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(file, len(before))
                raise

    def start(self, job: str, words: Sequence[str], wanted: Path) -> Job:
        """Decide what to do with a job, and record that it started if it has to run.

        Args:
            job: its identity.
            words: its overrides.
            wanted: the folder that Hydra has for it; another one is used if that is another job's.
        """
        words = mask_words(words)
        with self._locked() as file:
            records = self._records(_content(file))
            launch, known = records.launches[-1], records.jobs.get(job)
            if known is not None and (found := self._settled(file, records, job, known)):
                return Job(self, job, words, known.folder, skipped=found)
            if known is not None and launch["retry"] == "all" and known.launch < len(records.launches) - 1:
                known = None
            if records.stopped:
                return Job(self, job, words, wanted, pending="a signal stopped the sweep")
            if launch["fail_fast"] and (failed := records.failed_now):
                return Job(self, job, words, wanted, pending=f"{failed.folder} failed, and fail_fast=true")
            folder = known.folder if known is not None else self._free(wanted, records)
            begun = Job(self, job, words, folder, continues=known is not None)
            if known is not None or not (
                holds_run(folder) or folder in [entry.folder for entry in records.jobs.values()]
            ):
                self._write(file, "started", begun.line(Outcome("started")))
            return (
                begun  # in a folder that is another's, the run itself refuses to start, or continues with resume=auto
            )

    def settled(self, job: str) -> Outcome | None:
        """How a job ended that does not have to run, or None for any other."""
        with self._locked() as file:
            records = self._records(_content(file))
            known = records.jobs.get(job)
            return None if known is None else self._settled(file, records, job, known)

    def _settled(self, file: int, records: Records, job: str, known: Entry) -> Outcome | None:
        retry = records.launches[-1]["retry"]
        found = outcome_of(known)
        if retry == "all" and known.launch < len(records.launches) - 1:
            return None
        if found.status not in ("finished", "pruned") and (found.status != "failed" or retry != "never"):
            return None
        if known.status != found.status:
            self._write(file, found.status, Job(self, job, known.overrides, known.folder).line(found))
        return found

    def end(self, job: str, found: Outcome) -> bool:
        """Record how a job ended; returns whether it is repeated at once, as `retries` says."""
        with self._locked() as file:
            records = self._records(_content(file))
            known, launch = records.jobs[job], records.launches[-1]
            again = found.status == "failed" and records.retried.get(job, 0) < launch.get("retries", 0)
            event = "retried" if again else found.status
            self._write(file, event, Job(self, job, known.overrides, known.folder).line(found))
        return again

    def end_of(self, job: str, sentence: str = "", stopped: str = "") -> End:
        """How a job ended whose process is gone, which is recorded if the process could not.

        Args:
            job: its identity.
            sentence: why its process could not say how the job ended; empty if it could.
            stopped: name of the signal that the sweep was stopped with, if it was.
        """
        records = self.read()
        entry, launch = records.jobs.get(job), records.launches[-1]
        begun = entry if entry is not None and entry.launch == len(records.launches) - 1 else None
        found = Outcome("unknown") if entry is None else outcome_of(entry)
        if begun is not None and found.status in ("finished", "pruned"):
            if begun.status != found.status:
                self.end(job, found)  # its process was killed between its summary and its line here
        elif sentence and (begun is None or begun.status not in ENDED):
            found = Outcome("failed", sentence=sentence)
            if stopped:
                found = Outcome("preempted", sentence=f"{stopped}, before it had saved")
            if begun is not None and self.end(job, found):
                found = dataclasses.replace(found, status="retried")
            return End(found, entry, killed=True)
        elif begun is None and self.settled(job) is None:
            failed = records.failed_now if launch["fail_fast"] else None
            why = None if failed is None else f"{failed.folder} failed, and fail_fast=true"
            found = Outcome("pending", sentence=why)
        return End(found, entry)

    def _free(self, wanted: Path, records: Records) -> Path:
        if wanted.name not in records.folders or not wanted.name.isdecimal():
            return wanted
        names = {*records.folders, *(path.name for path in self.folder.iterdir())}
        return wanted.with_name(str(1 + max(int(name) for name in names if name.isdecimal())))


def _content(file: int) -> bytes:
    # Not by its path: closing another descriptor of the file would give up the lock.
    os.lseek(file, 0, os.SEEK_SET)
    return os.read(file, os.fstat(file).st_size)


@dataclass(frozen=True)
class Job:
    """What was decided about a job.

    Attributes:
        folder: its run directory.
        continues: whether it continues in its folder what it began there.
        skipped: what it became before, if it does not have to run.
        pending: what keeps it from starting.
    """

    ledger: Ledger
    identity: str
    words: list[str]
    folder: Path
    continues: bool = False
    skipped: Outcome | None = None
    pending: str | None = None

    def line(self, outcome: Outcome) -> dict[str, Any]:
        """The content of a line of the ledger."""
        where = os.path.relpath(self.folder, self.ledger.folder)
        return {"job": self.identity, "overrides": self.words, "folder": where, **dataclasses.asdict(outcome)}

    def record(self) -> bool:
        """Record how the job ended, as the summary in its folder says; returns whether it is repeated at once."""
        found = outcome(self.folder)
        return found.status in ENDED and self.ledger.end(self.identity, found)


def outcome(folder: Path) -> Outcome:
    """How the run in a folder ended, as its summary says; a monitored metric that was never finite counts as a failure."""
    summary = read_summary(folder)
    if summary is None:
        return Outcome("unknown")
    status, error = str(summary.get("status")), mask_text(str(summary.get("error") or "")).strip()
    metric, value = _objective(summary)
    if status == "finished" and metric is not None and value is None:
        status, error = "failed", f"its objective is not finite: {metric} is nan"
    return Outcome(status, metric, value, error.partition("\n")[0] or None)


def outcome_of(entry: Entry) -> Outcome:
    """How a job ended: as its summary says, or as the ledger does if the process that writes the summary was killed."""
    found = outcome(entry.folder)
    if found.status not in ENDED and entry.status in ENDED and entry.status != "finished":
        return dataclasses.replace(found, status=entry.status, sentence=entry.sentence)
    return found


def _objective(summary: dict[str, Any]) -> tuple[str | None, float | None]:
    best, last = summary.get("best"), summary.get("last")
    if isinstance(best, dict) and best.get("metric") is not None:
        return str(best["metric"]), number_or_none(best.get("value"))
    monitor = str(summary.get("monitor"))
    return monitor if isinstance(last, dict) and monitor.removeprefix("val/") in last else None, None
