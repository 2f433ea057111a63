"""A sweep from its folder to its table: the jobs that are left, started by a launcher and recorded in the ledger."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from runner.base.errors import FAILED, OK, PREEMPTED, ConfigError, Problem, UserError
from runner.base.files import make_folder, writing
from runner.base.reading import is_true
from runner.base.secrets import mask_text, mask_words
from runner.config.composition import Composition
from runner.config.gone import warning
from runner.config.keys import OF_THE_SWEEP, key_of, within
from runner.config.output_folders import holds_run
from runner.config.stored import differences
from runner.launch.jobs import Ended, Job, Launcher, run
from runner.run.directory import Occupied, claim, hold, works
from runner.sweeps.ledger import ENDED, NAME, Entry, Ledger, Outcome, compared, outcome, outcome_of
from runner.sweeps.plan import Plan, Planned, identity
from runner.sweeps.rows import command_alone
from runner.sweeps.table import headline_of
from runner.tracking.console import Console
from runner.tracking.formats import number

LOGS = "logs"
"""Folder of the sweep with what each job prints, `<folder>.log`."""
_LOOKED_S = 0.5  # between two looks at a job that another process still runs


def quoted(path: Path) -> str:
    """A path as a value of an override."""
    if re.fullmatch(r"[\w./-]+", str(path)):
        return str(path)
    text = str(path).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"


def base_changed(ledger: Ledger, plan: Plan) -> list[tuple[str, str, str]]:
    """Keys whose values differ from those of a sweep, except where it has several: (key, before, now)."""
    swept = [key.replace("/", ".") for launch in ledger.launches for key in launch.swept] + list(plan.swept)
    found = differences(ledger.last.base, plan.base)
    return [each for each in found if not within(each[0], [key.replace("/", ".") for key in swept])]


@contextlib.contextmanager
def opened_folder(root: Path, plan: Plan) -> Iterator[Path]:
    """Find or make the folder of a sweep, and hold it: the one that is named, or in `root` that of the newest sweep of the command.

    Raises:
        UserError: another process runs the sweep, or the folder holds something else.
    """
    named, new = plan.command.place, is_true(plan.command.values["sweep"]["new"])
    # Hydra's key works too, but two folders cannot both be meant
    places = [key for key in ("sweep.dir", "hydra.sweep.dir") if key in map(key_of, plan.command.accepted)]
    if len(places) > 1:
        raise UserError("sweep.dir", "and hydra.sweep.dir are both given", "one of them")
    if named and new:
        raise UserError("sweep.dir", f"is {named}, and sweep.new is given too", "one of them")
    # Two processes with the same command at the same time must find one folder, not make two
    with contextlib.nullcontext() if named else _one_at_a_time(root):
        folder = named or (None if new else _same_sweep(root, plan)) or claim(root)
        if holds_run(folder):
            raise UserError("sweep.dir", f"cannot be {folder}: it holds a run", "another folder")
        make_folder(folder)
        try:
            # The lock says that a sweep runs here, and is gone with the process
            lock = hold(folder)
        except Occupied as error:
            runs = f"{str(error).partition(';')[0].replace('written', 'run')}: python -m runner sweep {folder} shows it"
            allowed = "wait for it, end it with kill, or sweep.new=true for another one"
            raise UserError("sweep.dir", runs, allowed) from None
    try:
        yield folder
    finally:
        if lock is not None:
            os.close(lock)


def _same_sweep(root: Path, plan: Plan) -> Path | None:
    """The folder of the newest sweep of the same command."""
    same = []
    for path in root.glob(f"*/{NAME}"):
        ledger = Ledger.read(path.parent)
        if ledger.launches and ledger.last.swept == list(plan.swept) and not base_changed(ledger, plan):
            same.append((ledger.launches[0].time, path.parent))
    return max(same)[1] if same else None


@contextlib.contextmanager
def _one_at_a_time(root: Path) -> Iterator[None]:
    """Let other processes with the same command wait until this one holds its folder, so that they find it and get no other."""
    try:
        with writing(root):
            root.mkdir(parents=True, exist_ok=True)
            folder = os.open(root, os.O_RDONLY)
    except UserError as error:
        raise UserError("output_root", str(error)) from error
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


class Jobs:
    """The jobs of a sweep, one after the other: those that are known beforehand, unless a search chooses them."""

    count: int

    def __init__(self, jobs: Sequence[Planned]) -> None:
        self.count = 1 + max((job.number for job in jobs), default=-1)
        self._left = list(jobs)

    def next(self) -> Planned | None:
        """The next job; None if there is none now."""
        return self._left.pop(0) if self._left else None

    def ended(self, planned: Planned, found: Outcome, folder: Path) -> None:
        """Called with a job that has ended, or had before."""


class Sweep:
    """A sweep whose folder this process holds; `call`, importable by name, runs a job in a process that is forked for it."""

    def __init__(self, folder: Path, plan: Plan, call: Callable[[Composition], Any], console: Console) -> None:
        self.folder, self.plan, self.ledger = folder, plan, Ledger(folder)
        self.status, self.say = OK, console.line
        self._call, self._console = call, console
        self._retry = str(plan.command.values["sweep"]["retry"])
        self._running: dict[int, Planned] = {}
        self._occupied: list[Planned] = []  # that another process still runs
        self._looked = 0.0

    # The folder

    def begin(self) -> None:
        """Read the ledger, and record the launch.

        Raises:
            UserError: the folder is not a sweep's, holds runs without a ledger, or cannot be written.
            ConfigError: it is a sweep of another base config, with the differences.
        """
        ledger = self.folder / NAME
        # A sweep's folder may come from someone else, and nothing is written through a link or a named pipe in it
        if os.path.lexists(ledger) and (ledger.is_symlink() or not ledger.is_file()):
            raise UserError("sweep.dir", f"{ledger} is not a regular file", "another folder")
        self.ledger, plan = Ledger.read(self.folder), self.plan
        if self.ledger.torn:
            self.say(f"{ledger}: its last line is incomplete, as after a crash or on a full disk, and does not count")
        known = self.ledger.jobs
        for text in warning(str(self.folder), self.ledger.was):
            self.say(f"warning: {text}")
        # A sweep of an earlier version knows its jobs by settings that are gone, too
        other = (*plan.swept, *OF_THE_SWEEP)
        was = self.ledger.was = {key: each for key, each in self.ledger.was.items() if not within(key, other)}
        if was and plan.jobs is not None:
            own = [identity(job.composition.values | was, job.composition.overrides, plan.swept) for job in plan.jobs]
            renamed = [dataclasses.replace(job, identity=name) for job, name in zip(plan.jobs, own, strict=True)]
            self.plan = plan = dataclasses.replace(plan, jobs=renamed)
        # A ledger of other settings would compare results that do not belong together
        if self.ledger.launches:
            if found := base_changed(self.ledger, plan):
                message = "is a sweep with another base config: "
                message += ", ".join(f"{key} was {before}, now {after}" for key, before, after in found)
                raise ConfigError([Problem("sweep.dir", message, "its values, or another folder")])
        # Without its ledger nothing says which sweep the runs in a folder belong to
        elif any(map(holds_run, self.folder.glob("*/"))) and not (
            known if plan.jobs is None else [job for job in plan.jobs if job.identity in known]
        ):
            problem = f"cannot be {self.folder}: it holds runs, and no {NAME} of this sweep"
            raise UserError("sweep.dir", problem, "another folder")
        if known and plan.jobs is not None:
            self._say_what_is_left(plan.jobs)
        # The planned jobs are recorded, so that a view can show those that have not started
        jobs = {job.identity: mask_words(job.composition.overrides) for job in plan.jobs or ()}
        launch = {"swept": list(plan.swept), "base": plan.base, "jobs": None if plan.jobs is None else jobs}
        self.ledger.append("launch", **launch, flags=plan.command.flags, retry=self._retry)

    def _say_what_is_left(self, jobs: Sequence[Planned]) -> None:
        there = {job.identity: entry for job in jobs if (entry := self.ledger.jobs.get(job.identity)) is not None}
        done = sum(_settled(entry, "failed") for entry in there.values())
        left = "sweep.new=true starts another sweep" if done == len(jobs) else "the others follow"
        if self._retry == "all":
            left = "sweep.retry=all starts all of them again, in other folders"
        # A user removes a folder to have its job run again
        if gone := {job: entry for job, entry in there.items() if _is_gone(entry)}:
            names = ", ".join(entry.folder.name for entry in gone.values())
            left += f"; missing folders: {names}, and their jobs start again"
        for job, entry in gone.items():
            self.ledger.append_job(job, dataclasses.replace(entry, status="removed"))
        self.say(f"{self.folder}: {done} of {len(jobs)} jobs have finished already; {left}")

    # The jobs

    def run(self, jobs: Jobs, launcher: Launcher) -> None:
        """Run the jobs that are left until all have ended or a signal asks to stop; sets the exit status."""
        self._jobs, self._launcher = jobs, launcher
        before = len(self.ledger.launches) - 1
        signal = run(launcher, self._next, self._started, self._ended, lambda: bool(self._occupied))
        if signal and launcher.survives:
            self.say(f"{signal}: the jobs continue; the same command continues this sweep")
        last = [entry for entry in self.ledger.jobs.values() if entry.launch == before]
        if signal or any(entry.status == "preempted" for entry in last):
            self.status = PREEMPTED
        elif any(entry.status == "failed" for entry in last):
            self.status = FAILED

    def _next(self) -> Job | None:
        while (planned := self._candidate()) is not None:
            known, words = self.ledger.jobs.get(planned.identity), planned.composition.overrides
            if known is None and self.plan.jobs is None:  # a search plans its jobs one by one
                lost = self.ledger.unnamed().get(compared(mask_words(words)))
                known = None if lost is None else Entry("started", folder=lost, overrides=words, launch=-1)
            # With retry=all, each job starts again once per launch
            again = self._retry == "all" and known is not None and known.launch < len(self.ledger.launches) - 1
            if known is None or again or _is_gone(known):
                return self._begin(planned, Entry("started", folder=self._free(planned), overrides=words))
            if _settled(known, self._retry):
                self._skip(planned, known)
            # A launcher whose jobs survive finds them again itself.
            elif not self._launcher.survives and _is_written(known):
                self._occupied.append(planned)
                still = "is still being written by an earlier process, and is waited for"
                self.say(f"job {planned.number + 1}: {known.folder} {still}")
            else:
                return self._begin(planned, Entry("started", folder=known.folder, overrides=known.overrides))
        return None

    def _candidate(self) -> Planned | None:
        busy = {job.identity for job in self._running.values()}
        # Folders that another process held are looked at from time to time
        if self._occupied and time.monotonic() > self._looked + _LOOKED_S:
            self._looked = time.monotonic()
            for waiting in self._occupied:
                entry = self.ledger.jobs.get(waiting.identity)
                if waiting.identity not in busy and (entry is None or not _is_written(entry)):
                    self._occupied.remove(waiting)
                    return waiting
        planned = self._jobs.next()
        if planned is None or planned.identity not in busy:
            return planned
        # Another trial with the same values runs: its result is that of this one
        self._occupied.append(planned)
        return None

    def _begin(self, planned: Planned, entry: Entry) -> Job:
        """Prepare the job of a folder that is free or its own."""
        continues = holds_run(entry.folder)
        # The ledger comes before the start: a crash in between leaves a job that starts again, not an unknown one
        self.ledger.append_job(planned.identity, entry)
        self._running[planned.number] = planned
        # The job always resumes in its folder, whatever the command says
        words = [word for word in planned.composition.overrides if key_of(word) != "resume"]
        command = [sys.executable, "-m", "runner", "train", *self.plan.command.flags, *words]
        own: dict[str, Any] = {"job_dir": entry.folder, "run_dir": None, "continues": continues, "supervised": True}
        return Job(
            number=planned.number,
            call=functools.partial(self._call, dataclasses.replace(planned.composition, **own)),
            command=[*command, "hydra.mode=RUN", f"hydra.run.dir={quoted(entry.folder.absolute())}", "resume=auto"],
            log=self._log(entry.folder),
            environment=planned.environment,
        )

    def _free(self, planned: Planned) -> Path:
        """A folder for a job: its number, or the next one that nothing has."""
        names = {*self.ledger.folders, *(path.name for path in self.folder.iterdir())}
        if str(planned.number) not in names:
            return self.folder / str(planned.number)
        return self.folder / str(1 + max(int(name) for name in names if name.isdecimal()))

    def _skip(self, planned: Planned, known: Entry) -> None:
        found = outcome_of(known)
        # The process of the sweep was killed before it could record the end
        if known.status != found.status:
            self._record(planned.identity, known, found)
        self._tell(planned, "skipped", f", {known.folder} has {found.status} already{_result(found)}")
        self._jobs.ended(planned, found, known.folder)

    def _started(self, job: Job, place: str) -> None:
        told = "".join(f"{mark}{text}" for mark, text in ((": ", place), ("; ", headline_of(self.ledger))) if text)
        self._tell(self._running[job.number], "started", told)

    def _ended(self, ended: Ended, signal: str) -> None:
        planned = self._running.pop(ended.number)
        known = self.ledger.jobs[planned.identity]
        # The run's own summary says how it ended; the process knows only its status
        found = outcome(known.folder)
        if found.status not in ENDED:
            sentence = ended.sentence or "its process ended and left no result"
            found = Outcome("failed", sentence=_last_error(self._log(known.folder)) or sentence)
            # A signal to the sweep ended it, so the job has not failed
            if signal:
                found = Outcome("preempted", sentence=f"{signal}, before it had saved")
            else:  # a folder that is missing later was removed by someone
                make_folder(known.folder)
        self._record(planned.identity, known, found)
        told = f": {found.sentence}" if found.sentence else ""
        self._tell(planned, found.status, _result(found) if found.status == "finished" else told)
        self._jobs.ended(planned, found, known.folder)

    def _log(self, folder: Path) -> Path:
        return self.folder / LOGS / f"{folder.name}.log"

    def _record(self, job: str, known: Entry, found: Outcome) -> None:
        self.ledger.append_job(job, dataclasses.replace(known, **vars(found)))

    def _tell(self, planned: Planned, event: str, text: str) -> None:
        """Show what happened to a job."""
        line = f"job {planned.number + 1} of {self._jobs.count}: {mask_text(planned.varied) or 'as all others'}: "
        line += event + mask_text(text)
        if event != "failed":
            self.say(line)
            return
        folder = self.ledger.jobs[planned.identity].folder
        again = command_alone(mask_words(planned.composition.overrides), self.ledger.last.flags or [])
        where = f"\n    log: {folder / 'run.log'}\n    output: {self._log(folder)}"
        self._console.error(f"{line}{where}\n    again: {again}")


def _result(found: Outcome) -> str:
    return f", {found.metric} {number(found.value)}" if found.metric else ""


def _settled(entry: Entry, retry: str) -> bool:
    """Whether a job has a result that counts."""
    status = outcome_of(entry).status
    return status in ("finished", "pruned") or (status == "failed" and retry == "never")


def _is_gone(entry: Entry) -> bool:
    """Whether someone removed the folder of a job that had one."""
    return not entry.folder.is_dir() and entry.status not in ("started", "preempted")


def _is_written(entry: Entry) -> bool:
    """Whether another process writes the run of a job; a killed one of another machine counts until an end is recorded."""
    return works(entry.folder, elsewhere=outcome_of(entry).status not in ENDED)


def _last_error(log: Path) -> str:
    """What a job that could not begin printed last: an error message, or an empty string for something else."""
    try:
        lines = log.read_text(errors="replace")[-2000:].strip().splitlines()
    except OSError:
        return ""
    return lines[-1].removeprefix("error: ") if lines and lines[-1].startswith("error: ") else ""
