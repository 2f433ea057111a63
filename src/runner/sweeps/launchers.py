"""Hydra's launchers of other packages: what each needs, and what keeps one job's end from ending the others."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from runner.config.errors import FAILED, OK, PREEMPTED, Problem
from runner.config.hydra_messages import not_installed
from runner.config.signals import STOPPING, heard
from runner.sweeps.jobs import completed
from runner.sweeps.ledger import NAME, Ledger

_ACTIVE = ("PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "CONFIGURING", "REQUEUED", "RESIZING", "STOPPED")
_ASKED_S = 5.0  # between two questions to SLURM
_WRITTEN_S = 30.0  # for the result of a job to appear on a shared file system after the job's end


def absent(launcher: str) -> Problem | None:
    """The problem of a launcher of this program whose package is not installed; Hydra's plugins are found or not."""
    if launcher != "ray" or importlib.util.find_spec("ray") is not None:
        return None
    return not_installed("hydra/launcher", launcher, ["basic"])


@contextlib.contextmanager
def sturdy(launcher: str, folder: Path) -> Iterator[None]:
    """While the jobs of a sweep run elsewhere, keep the end of one from ending the others, and stop all on a signal."""
    if launcher in ("basic", "pool") or not (folder / NAME).exists():
        yield
        return
    with _stopping(launcher, folder), _KEEPING.get(launcher, contextlib.nullcontext)():
        yield


def status_of_jobs(folder: Path) -> int:
    """75 if a signal stopped the last launch or one of its jobs, 1 if one that was asked for never began, otherwise 0."""
    ledger = Ledger(folder)
    records = ledger.read()
    now, known = len(records.launches) - 1, records.jobs
    if records.stopped or any(job.status == "preempted" and job.launch == now for job in known.values()):
        return PREEMPTED
    others = [job for job in records.planned if job not in known or known[job].launch < now]
    left = [job for job in others if ledger.settled(job) is None]
    if left and not records.failed_now:
        print(f"{len(left)} of {len(records.planned)} jobs have not started; the same command continues", flush=True)
    return FAILED if left else OK


@contextlib.contextmanager
def _stopping(launcher: str, folder: Path) -> Iterator[None]:
    """The first signal lets jobs save and starts no other one; the second one kills them. Jobs of a cluster go on."""
    before: dict[int, Any] = {}
    asked = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        name = signal.Signals(number).name
        heard.append(name)
        if launcher == "submitit_slurm":
            print(f"{name}: the jobs continue on the cluster; the same command continues this sweep", flush=True)
            raise SystemExit(PREEMPTED)
        jobs = _processes_of_jobs(launcher)
        if asked:
            for job in jobs:
                with contextlib.suppress(Exception):
                    job.kill()
            os._exit(128 + number)
        asked = True
        print(f"{name}: the jobs save and stop; a second one kills them", flush=True)
        Ledger(folder).append("stop")
        for job in jobs:
            with contextlib.suppress(Exception):
                job.send_signal(signal.SIGTERM)

    for number in STOPPING:
        if signal.getsignal(number) != signal.SIG_IGN:
            before[number] = signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _processes_of_jobs(launcher: str) -> list[Any]:
    import psutil

    children = psutil.Process().children(recursive=launcher == "ray")
    if launcher != "ray":
        return list(children)
    found = []
    for child in children:
        with contextlib.suppress(psutil.Error):
            if (child.cmdline() or [""])[0].startswith("ray::") and "IDLE" not in child.cmdline()[0]:
                found.append(child)
    return found


@contextlib.contextmanager
def _of_joblib() -> Iterator[None]:
    from joblib.externals.loky import get_reusable_executor

    core: Any = importlib.import_module("hydra_plugins.hydra_joblib_launcher._core")
    parallel = core.Parallel
    core.Parallel = lambda **settings: lambda tasks: _Together(parallel, settings, list(tasks)).results()
    try:
        yield
    finally:
        core.Parallel = parallel
        get_reusable_executor().shutdown(wait=True)  # its processes would keep their memory, and wait for work


class _Together:
    """Tasks of joblib, which ends all of them when the process of one is killed: the others are started again."""

    def __init__(self, parallel: Any, settings: dict[str, Any], tasks: Sequence[Any]) -> None:
        self._parallel, self._settings, self._tasks = parallel, settings, tasks
        self._results: dict[int, Any] = {}

    def results(self) -> list[Any]:
        """What the tasks return, in their order; nothing for a task whose process was killed twice."""
        with tempfile.TemporaryDirectory() as marks:
            left, interrupted = list(range(len(self._tasks))), list[int]()
            while left and not self._run(left, marks):
                begun = [number for number in left if Path(marks, str(number)).exists()]
                interrupted += [number for number in begun if number not in self._results]
                left = [number for number in left if number not in begun]
            for number in interrupted:  # each alone, so that only the one that is killed again is lost
                self._run([number], marks)
        return [self._results.get(number) or completed() for number in range(len(self._tasks))]

    def _run(self, numbers: list[int], marks: str) -> bool:
        """Run tasks; returns whether no process was killed."""
        import joblib
        from joblib.externals.loky import BrokenProcessPool

        settings = {**self._settings, "return_as": "generator_unordered"}
        if len(numbers) == 1:
            settings["n_jobs"] = 2  # one alone would run in this process
        try:
            calls = (joblib.delayed(_marked)(number, marks, self._tasks[number]) for number in numbers)
            for number, result in self._parallel(**settings)(calls):
                self._results[number] = result
        except BrokenProcessPool:
            return False
        return True


def _marked(number: int, marks: str, task: Any) -> tuple[int, Any]:
    with contextlib.suppress(OSError):
        Path(marks, str(number)).touch()
    function, arguments, named = task
    return number, function(*arguments, **named)


@contextlib.contextmanager
def _of_submitit() -> Iterator[None]:
    job_class: Any = importlib.import_module("submitit.core.core").Job
    results = job_class.results

    def results_or_nothing(self: Any) -> list[Any]:
        try:
            if type(self).__name__ == "SlurmJob":
                _wait_for_slurm(self)
            return list(results(self))
        except Exception as error:
            kind = type(error).__name__
            print(
                f"job {self.job_id} ended without a result ({kind}): {self.paths.stderr}", file=sys.stderr, flush=True
            )
            return [completed()]

    job_class.results = results_or_nothing
    try:
        yield
    finally:
        job_class.results = results


def _wait_for_slurm(job: Any) -> None:
    """Return once a job of SLURM has written its result, or is gone; submitit would ask the accounting, if there is one.

    Raises:
        RuntimeError: if it is gone.
    """
    active = asked = time.monotonic()
    while not job.paths.result_pickle.exists():
        if (now := time.monotonic()) - asked > _ASKED_S:
            asked, active = now, now if _is_active(job.job_id) else active
            if now - active > _WRITTEN_S:
                raise RuntimeError("it is not in the queue any more")
        time.sleep(0.2)


def _is_active(job: str) -> bool:
    command = ["squeue", "--noheader", "--jobs", job, "--states=all", "--format=%T"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return True  # not known
    if done.returncode:
        return "Invalid job id" not in done.stderr  # a controller that does not answer says nothing about the job
    return any(state.strip() in _ACTIVE for state in done.stdout.splitlines())


_KEEPING: dict[str, Callable[[], Any]] = {
    "joblib": _of_joblib,
    "submitit_local": _of_submitit,
    "submitit_slurm": _of_submitit,
}
