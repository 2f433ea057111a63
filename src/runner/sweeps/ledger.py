"""The ledger of a sweep: `sweep.jsonl` in its folder, a line for each launch and each change of a job.

The same command continues from it. Only the process that holds the lock of the sweep's folder writes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, TypeAdapter

from runner.base.files import append, writing
from runner.base.reading import number_or_none, read_overrides, read_regular, read_summary
from runner.base.secrets import mask_text, mask_words
from runner.config.gone import drop, words_without
from runner.config.keys import key_of

NAME = "sweep.jsonl"
ENDED = ("finished", "pruned", "failed", "preempted")
_LARGEST = 2**30  # bytes
_LONGEST_NAME = 60  # of a folder; ours are numbers


@dataclass(frozen=True)
class Outcome:
    """The end of a run."""

    status: str  # `finished`, `pruned`, `failed`, `preempted`, or another one of a run that did not end
    metric: str | None = None  # name of the monitored metric, if it was computed
    value: float | None = None  # its best value; None if it was never finite
    sentence: str | None = None  # why the run did not finish


@dataclass(frozen=True, kw_only=True)
class Entry(Outcome):
    """The last line about a job; its status is one of `ENDED`, `started` or `removed`; an earlier version wrote `retried`, too."""

    folder: Path  # its run directory, inside the sweep
    overrides: list[str]  # of the job, secrets masked
    launch: int = 0  # index of the launch that wrote the line


@dataclass(frozen=True)
class Launch:
    """The line that the process of a sweep begins with."""

    time: Annotated[float, Field(strict=True, allow_inf_nan=False)]  # in Unix seconds
    swept: list[str]  # keys and groups that have several values
    base: dict[str, Any]  # the values by dotted key that all jobs have in common
    jobs: dict[str, list[str]] | None  # the overrides of each by identity; None for a search, which chooses them later
    retry: str
    flags: list[str] | None = None  # of the command, as far as one job alone needs them


_LAUNCH = TypeAdapter(Launch)


@dataclass
class Ledger:
    """The ledger in the folder of a sweep: its launches in order, and the last line about each job by identity."""

    folder: Path
    launches: list[Launch] = field(default_factory=list)
    jobs: dict[str, Entry] = field(default_factory=dict)
    folders: set[str] = field(default_factory=set)
    torn: bool = False  # a crash left the last line incomplete
    # Folders of jobs that are ignored, as they are links or not in the sweep: a ledger may come from someone else
    outside: list[str] = field(default_factory=list)
    was: dict[str, Any] = field(default_factory=dict)  # settings of the base that are gone, see `runner.config.gone`

    @property
    def last(self) -> Launch:
        """The last launch, an empty one if there is none."""
        return self.launches[-1] if self.launches else Launch(0.0, [], {}, {}, "failed")

    @property
    def planned(self) -> dict[str, list[str]]:
        """The overrides of each job of the last launch by identity; empty for a search."""
        return self.last.jobs or {}

    @classmethod
    def read(cls, folder: Path) -> Self:
        """What the file has; lines that are not the ledger's, or that a crash left incomplete, are skipped.

        A line that is lost may have named the folder of a planned job: the run in it has the words of the job.
        """
        ledger = cls(folder)
        with contextlib.suppress(OSError):
            content = read_regular(folder / NAME, _LARGEST)
            known = [ledger._add(line) for line in content.splitlines()]
            ledger.torn = bool(known) and not (known[-1] or content.endswith(b"\n"))
        lost = {compared(words): job for job, words in ledger.planned.items() if job not in ledger.jobs}
        for words, path in (ledger.unnamed() if lost else {}).items():
            if (job := lost.get(words)) is not None:
                now = len(ledger.launches) - 1
                ledger.jobs[job] = Entry("started", folder=path, overrides=ledger.planned[job], launch=now)
        for job, entry in list(ledger.jobs.items()):
            if entry.folder.is_symlink():
                ledger.outside.append(ledger.jobs.pop(job).folder.name)
        return ledger

    def unnamed(self) -> dict[tuple[str, ...], Path]:
        """The runs in the folder that no line names, by their words as `compared` gives them."""
        found = dict[tuple[str, ...], Path]()
        for path in self.folder.glob("*/overrides.yaml"):
            if path.parent.name not in self.folders and not path.parent.is_symlink():
                with contextlib.suppress(OSError, ValueError):  # a run that cannot be read is none of them
                    found[compared(words_without(read_overrides(path.parent), self.last.base))] = path.parent
        return found

    def append(self, event: str, **content: Any) -> None:
        """Append a line to the file, on the disk when this returns, and to what was read from it.

        Raises:
            UserError: it cannot be written.
        """
        line = json.dumps({"event": event, "time": round(time.time(), 3), **content}, default=str).encode()
        path, without_links = self.folder / NAME, lambda path, flags: os.open(path, flags | os.O_NOFOLLOW, 0o644)
        with writing(path), FileIO(str(path), "a+", opener=without_links) as file:
            # A crash or a full disk may have left half a line: end it, so that this one stands alone
            size = file.tell()
            torn = size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"
            append(file, b"\n" * torn + line + b"\n")
            os.fsync(file.fileno())
        self._add(line)

    def append_job(self, job: str, entry: Entry) -> None:
        """Append a line about a job."""
        known = {name: value for name in ("sentence", "metric", "value") if (value := getattr(entry, name))}
        words = mask_words(entry.overrides)
        self.append(entry.status, folder=entry.folder.name, overrides=words, **known, job=job)

    def _add(self, line: bytes) -> bool:
        """Add what a line says; tells whether it could be read."""
        try:
            found = json.loads(line)
            event = found["event"]
            if event == "launch":
                was, launch = drop(found["base"]), _LAUNCH.validate_python(found)
                for words in (launch.jobs or {}).values():
                    words[:] = words_without(words, launch.base)
                self.was |= was
                self.launches.append(launch)
                return True
            job, name = str(found["job"]), str(found["folder"])
            # A ledger from somebody else must not lead out of the folder of the sweep
            if Path(name).name != name or name in ("", "..") or len(name) > _LONGEST_NAME:
                self.outside.append(name)
                return True
            entry = Entry(
                event,
                _text(found.get("metric")),
                number_or_none(found.get("value")),
                _text(found.get("sentence")),
                folder=self.folder / name,
                overrides=words_without(map(str, found["overrides"]), self.last.base),
                launch=len(self.launches) - 1,
            )
        except (ValueError, LookupError, TypeError, RecursionError):
            return False
        # The latest line of a job counts
        self.jobs[job] = entry
        self.folders.add(name)
        return True


def compared(words: Sequence[str]) -> tuple[str, ...]:
    """The overrides of a job in a canonical order, without `resume`, which jobs on a cluster have."""
    return tuple(sorted(word for word in words if key_of(word) != "resume"))


def _text(value: Any) -> str | None:
    return str(value) if value else None


def outcome(folder: Path) -> Outcome:
    """The end of the run in a folder by its summary; a monitored metric that was never finite counts as a failure."""
    summary = read_summary(folder)
    if summary is None:
        return Outcome("unknown")
    status, error = str(summary.get("status")), mask_text(str(summary.get("error") or "")).strip()
    best, last = summary.get("best"), summary.get("last")
    metric: str | None = None
    value: float | None = None
    if isinstance(best, dict) and best.get("metric") is not None:
        metric, value = str(best["metric"]), number_or_none(best.get("value"))
    elif isinstance(last, dict) and (monitor := str(summary.get("monitor"))).removeprefix("val/") in last:
        metric = monitor
    if status == "finished" and metric is not None and value is None:
        status, error = "failed", f"its objective is not finite: {metric} is nan"
    return Outcome(status, metric, value, error.partition("\n")[0] or None)


def outcome_of(entry: Entry) -> Outcome:
    """The end of a job: by its summary, or by the ledger if the process that writes the summary was killed."""
    found = outcome(entry.folder)
    if found.status not in ENDED and entry.status in ENDED and entry.status != "finished":
        return dataclasses.replace(found, status=entry.status, sentence=entry.sentence)
    return found
