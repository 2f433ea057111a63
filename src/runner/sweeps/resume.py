"""A sweep that continues: which folder it has, and what each of its jobs finds in the ledger before it imports torch."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from runner.config import slurm
from runner.config.app import Composition, current
from runner.config.errors import PREEMPTED, ConfigError, Problem, UserError
from runner.config.keys import within
from runner.config.output_folders import holds_run, holds_sweep
from runner.config.secrets import mask_words
from runner.config.stored import differences
from runner.config.truth import is_true
from runner.sweeps.ledger import NAME, Entry, Job, Ledger, Outcome, Plan, Records, identity, outcome
from runner.sweeps.pool import PATIENT
from runner.sweeps.rows import command_alone
from runner.tracking.files import writing
from runner.tracking.formats import number
from runner.tracking.run_directory import Occupied, hold

if sys.platform != "win32":
    import fcntl

_LOOKED_S = 0.5  # between two looks at the lock of another process
_held: dict[Path, int] = {}
"""Locks on the folders of this process's sweeps."""
_launched_by = 0
"""The process that began a sweep last; its jobs run elsewhere if that is not this one."""


def to_continue(root: Path, plan: Plan) -> Path | None:
    """The folder that the sweep gets: the one that is named, that of the newest sweep of the same command, or None for a new one.

    Raises:
        UserError: for a folder that holds something else.
        ConfigError: for a sweep of another base config under `sweep_dir=`, with the differences.
    """
    named, new = plan.values.get("sweep_dir"), is_true(plan.values.get("new_sweep"))
    if named is not None and (plan.given or new):
        raise UserError(
            "sweep_dir", f"is {named}, and {'hydra.sweep.dir' if plan.given else 'new_sweep'} is given too", "one"
        )
    if plan.given is not None:
        return plan.given
    if named is not None:
        folder = Path(str(named))
        records = Ledger(folder).read()
        if records.launches:
            if found := _base_changed(records, plan):
                message = "is a sweep with another base config: "
                message += ", ".join(f"{key} was {before}, now {after}" for key, before, after in found)
                raise ConfigError([Problem("sweep_dir", message, "its values, or another folder")])
        elif holds_run(folder) or holds_sweep(folder):
            kind = "a run" if holds_run(folder) else "a sweep without sweep.jsonl"
            raise UserError("sweep_dir", f"cannot be {folder}: it holds {kind}", "another folder")
        return folder
    if new or (plan.jobs is None and not plan.searches):
        return None  # a sweeper that chooses values does not say whether anything is left
    same = [(records.launches[0]["time"], path.parent) for path, records in _sweeps(root) if _is_same(records, plan)]
    return max(same)[1] if same else None


@contextlib.contextmanager
def one_at_a_time(root: Path, plan: Plan) -> Iterator[None]:
    """Let other processes with the same command wait until this one has its folder, so that they find it and get no other."""
    if plan.given is not None or plan.values.get("sweep_dir") is not None or sys.platform == "win32":
        yield
        return
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


def _sweeps(root: Path) -> Iterator[tuple[Path, Records]]:
    for path in root.glob(f"*/{NAME}"):
        records = Ledger(path.parent).read()
        if records.launches:
            yield path, records


def _is_same(records: Records, plan: Plan) -> bool:
    return records.launches[-1]["swept"] == list(plan.swept) and not _base_changed(records, plan)


def _base_changed(records: Records, plan: Plan) -> list[tuple[str, str, str]]:
    """Keys whose values differ, except where a sweep has several."""
    swept = [key.replace("/", ".") for launch in records.launches for key in launch["swept"]] + list(plan.swept)
    now = json.loads(json.dumps(plan.base(), default=str))
    return [found for found in differences(records.launches[-1]["base"], now) if not within(found[0], swept)]


def begin(folder: Path, plan: Plan) -> None:
    """Lock the folder of a sweep while this process lives or begins another one, and record the launch.

    Raises:
        UserError: another process runs this sweep.
    """
    global _launched_by
    _launched_by = os.getpid()
    folder.mkdir(parents=True, exist_ok=True)
    while _held:
        os.close(_held.popitem()[1])
    lock = _lock(folder)
    if lock is not None:
        _held[folder] = lock
    ledger = Ledger(folder)
    known = ledger.read().jobs
    if known and plan.jobs is not None:
        done = [job for job in plan.jobs if job in known and outcome(known[job].folder).status == "finished"]
        left = "new_sweep=true starts another sweep" if len(done) == len(plan.jobs) else "the others follow"
        if plan.values["retry"] == "all":
            left = "retry=all starts all of them again, in other folders"
        gone = {job: known[job] for job in plan.jobs if job in known and not known[job].folder.is_dir()}
        for job, entry in gone.items():
            ledger.append("removed", **Job(ledger, job, entry.overrides, entry.folder).line(Outcome("removed")))
        names = ", ".join(entry.folder.name for entry in gone.values())
        left += f"; missing folders: {names}, and their jobs start again" if gone else ""
        print(f"{folder}: {len(done)} of {len(plan.jobs)} jobs have finished already; {left}", flush=True)
    jobs = None if plan.jobs is None else {job: mask_words(words) for job, words in plan.jobs.items()}
    wanted = {
        "retry": plan.values["retry"],
        "retries": int(plan.values["retries"]),
        "fail_fast": is_true(plan.values.get("fail_fast")),
    }
    ledger.append("launch", swept=list(plan.swept), base=plan.base(), jobs=jobs, flags=list(plan.flags), **wanted)


def refuse_held(folder: Path) -> None:
    """Refuse the folder of a sweep that another process runs, with how to show it and how to end it."""
    if folder.is_dir() and (lock := _lock(folder)) is not None:
        os.close(lock)


def _lock(folder: Path) -> int | None:
    try:
        return hold(folder)
    except Occupied as error:
        runs = f"{str(error).partition(';')[0].replace('written', 'run')}: python -m runner sweep {folder} shows it"
        raise UserError("sweep_dir", runs, "wait for it, end it with kill, or new_sweep=true for another one") from None


def run_or_skip(cfg: Any, run: Callable[[Any], float | None]) -> float | None:
    """Run a job unless the ledger of its sweep says that it does not have to; returns the value that sweepers optimise.

    `cfg` is the config that Hydra composed for a job, or a composition whose `job_dir` lies in the folder of the sweep.
    """
    composition = cfg if isinstance(cfg, Composition) else current(cfg)
    if composition.job_dir is None:
        return run(composition)
    folder = composition.job_dir.parent.absolute()
    if not isinstance(cfg, Composition):
        from hydra.core.hydra_config import HydraConfig

        folder = Path(str(HydraConfig.get().sweep.dir)).absolute()
    ledger = Ledger(folder)
    launches = ledger.read().launches
    if not launches:
        return run(composition)
    made = composition.job_dir
    swept = launches[-1]["swept"]
    named = identity(composition.values, composition.overrides, swept)
    elsewhere = _launched_by != os.getpid() and PATIENT not in os.environ
    try:
        job, lock = _begin(ledger, named, composition.overrides, made)
        try:
            return _run(job, dataclasses.replace(composition, elsewhere=elsewhere), run, made)
        finally:
            if lock is not None:
                os.close(lock)
    except UserError as error:  # of the ledger: no other job could begin either
        if elsewhere:
            raise
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(error.exit_code) from None


def _run(job: Job, composition: Composition, run: Callable[[Composition], float | None], made: Path) -> float | None:
    """Do with a job what was decided."""
    elsewhere = composition.elsewhere
    if job.folder.resolve() != made.resolve() or job.skipped or job.pending:
        with contextlib.suppress(OSError):
            made.rmdir()  # Hydra makes a folder before it asks
    if job.skipped is not None:
        told = f", {job.skipped.metric} {number(job.skipped.value)}" if job.skipped.metric else ""
        print(f"skipped: {job.folder} has {job.skipped.status} already{told}", flush=True)
        return job.skipped.value
    if job.pending is not None:
        print(f"pending: {job.pending}", flush=True)
        return None
    while True:
        try:
            value = run(dataclasses.replace(composition, job_dir=job.folder, continues=job.continues))
        except SystemExit as stop:
            if elsewhere or stop.code == PREEMPTED:
                job.record()
            if not elsewhere:
                raise
            value, again = None, False  # an exit would end the other jobs of a launcher too
        else:
            again = job.record()
        if elsewhere and slurm.warned(composition.values):
            _requeue_by_submitit()
        if not again:
            if (found := outcome(job.folder)).status == "failed" and not elsewhere:
                repeat = command_alone(job.words, job.ledger.read().launches[-1].get("flags") or [])
                print(f"failed: {found.sentence}\n    log: {job.folder / 'run.log'}\n    again: {repeat}", flush=True)
            return value
        print(f"again: {job.folder} failed, and retries={job.ledger.read().launches[-1]['retries']}", flush=True)
        job = dataclasses.replace(job, continues=True)


def _requeue_by_submitit() -> None:
    """Leave the job to submitit's own handler, which requeues it and ends this process, if that is what runs it."""
    if os.environ.get("SUBMITIT_EXECUTOR") == "slurm":
        import submitit

        try:
            signal.raise_signal(getattr(signal, f"SIG{submitit.JobEnvironment.USR_SIG}"))
        except Exception as error:  # it has a limit, hydra.launcher.max_num_timeout
            print(f"warning: {error}", file=sys.stderr, flush=True)


def _begin(ledger: Ledger, job: str, words: Sequence[str], made: Path) -> tuple[Job, int | None]:
    """Decide on a job once no other process works on it, such as one whose launcher was killed; gives a lock too.

    The lock is that of the run, which takes it again in this process, so that nobody comes between the two.
    """
    told = False
    while True:
        try:
            known = ledger.read().jobs.get(job)
            lock = _hold(known)
            found = ledger.start(job, words, made)
            if known is None and not (found.skipped or found.pending):
                lock = _hold(ledger.read().jobs.get(job))
            return found, lock
        except Occupied as error:
            if not told:
                print(f"waiting: {error}", flush=True)
            told = True
            time.sleep(_LOOKED_S)


def _hold(entry: Entry | None) -> int | None:
    return hold(entry.folder) if entry is not None and entry.folder.is_dir() else None
