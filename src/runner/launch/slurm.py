"""Jobs of a sweep as array jobs of SLURM, which continue when the process of the sweep ends."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from runner.base.errors import UserError
from runner.base.files import make_folder
from runner.base.reading import is_true
from runner.launch.jobs import Ended, Job, Launcher

_PERIOD_S = 5.0  # between two looks at the queue
_ANSWER_S = 120.0  # SLURM's own commands give up earlier
_ELEMENTS = 1000  # of an array; SLURM's default limit is 1001
_OVER = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
    *("REVOKED", "TIMEOUT"),
)


class Slurm(Launcher):
    """A launcher for SLURM; `conf/hydra/launcher/slurm.yaml` explains its keys. Its jobs continue without the sweep.

    The jobs that start together are one array. Its name ends with a digest of the sweep's folder, and the number of an element
    is that of the job's folder, so that a continued sweep finds its jobs in the queue whenever its process was killed.

    Args:
        values: the composed config of the first job.
        name: of the array; None for that of the runs.
        setup: lines of shell that each job runs first.
        srun_args: further arguments of srun.
        array_parallelism: jobs of an array at a time.
        signal_delay_s: seconds before the time limit at which a job is warned.
        additional_parameters: further options of sbatch, which take precedence.
        options: options of sbatch, with `_` for `-`, by their names there or in submitit; None for SLURM's default.

    Raises:
        UserError: there is no SLURM.
    """

    slots: int | None = None
    survives = True

    def __init__(
        self,
        *,
        values: Mapping[str, Any],
        name: str | None = None,
        setup: Sequence[str] | None = None,
        srun_args: Sequence[str] | None = None,
        array_parallelism: int | None = None,
        signal_delay_s: int = 120,
        additional_parameters: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        # Fail before the sweep makes its folder
        if shutil.which("sbatch") is None:
            allowed = "a machine that has SLURM's commands, or hydra/launcher=pool"
            raise UserError("hydra/launcher", "is slurm, and there is no sbatch on this machine", allowed)
        self._name = re.sub(r"[^\w.-]", "_", str(name or values["name"]))
        self._setup, self._most = list(setup or []), array_parallelism
        cpus = options.get("cpus_per_task")  # srun does not take it from sbatch
        # Keys are those of Hydra's SLURM launcher, and options those of sbatch
        self._srun = ["srun", *([f"--cpus-per-task={cpus}"] if cpus else []), *(srun_args or [])]
        renamed = {"tasks_per_node": "ntasks-per-node", "timeout_min": "time", "mem_gb": "mem"}
        gigabytes = options.get("mem_gb")
        given = {**options, "mem_gb": gigabytes and f"{gigabytes}G"}
        # SLURM warns the job before its time ends, so that it saves and starts again
        signals = values["slurm"]["signal"] or []
        warning = [signals] if isinstance(signals, str) else signals
        self._options = {
            **{renamed.get(key, key.replace("_", "-")): value for key, value in given.items()},
            "signal": f"{warning[-1]}@{signal_delay_s}" if warning else None,
            "requeue" if is_true(values["slurm"]["requeue"]) else "no-requeue": True,
            **(additional_parameters or {}),
        }
        self._running: dict[int, str] = {}
        self._missing: set[int] = set()  # jobs that were over at the last look
        self._due = 0.0

    def start(self, jobs: Sequence[Job]) -> list[str]:
        """See `Launcher.start`.

        Raises:
            UserError: SLURM refuses the jobs, or does not answer.
        """
        # A sweep that was killed finds its jobs in the queue, and does not submit them twice
        queue = {id: name.split("-")[-2:] for id, (state, name) in self._queue().items() if state not in _OVER}
        active = {("-".join(place), id.partition("_")[2]): id for id, place in queue.items()}
        found = {job.number: active[_place(job)] for job in jobs if _place(job) in active}
        new = [job for job in jobs if job.number not in found]
        # An array holds one group of jobs, because SLURM limits the size of arrays
        for group, array in itertools.groupby(new, key=lambda job: _place(job)[0]):
            found |= self._submit(f"{self._name}-{group}", list(array))
        self._running |= found
        self._due = time.monotonic() + _PERIOD_S
        return [f"SLURM {found[job.number]}" for job in jobs]

    def wait(self, timeout_s: float) -> list[Ended]:
        """See `Launcher.wait`."""
        time.sleep(timeout_s)
        # Asking often would burden the controller
        if not self._running or time.monotonic() < self._due:
            return []
        try:
            states = {id: state for id, (state, _) in self._queue().items()}
        except UserError:
            return []  # a controller that does not answer says nothing about the jobs
        finally:
            self._due = time.monotonic() + _PERIOD_S
        over = {number for number, id in self._running.items() if states.get(id, _OVER[0]) in _OVER}
        # A job has ended if it is over at two looks: its files may appear later than that on a shared file system.
        ended = over & self._missing
        self._missing = over - ended
        gone = {number: self._running.pop(number) for number in sorted(ended)}
        said = {id: f"SLURM job {id} is {states.get(id) or 'not in the queue any more'}" for id in gone.values()}
        return [Ended(number, said[id]) for number, id in gone.items()]

    def stop(self, kill: bool) -> None:
        """End a wait for SLURM's commands: the jobs continue."""
        raise KeyboardInterrupt

    def _submit(self, name: str, jobs: Sequence[Job]) -> dict[int, str]:
        """Submit an array, and return the number of each job there."""
        # A file for each element, appended to: a job that starts again continues its log
        logs = jobs[0].log.parent.absolute()
        make_folder(logs)
        group = int(jobs[0].log.stem) // _ELEMENTS
        numbers = {job.number: _place(job)[1] for job in jobs}
        options = {
            "job-name": name,
            "array": ",".join(numbers.values()) + (f"%{self._most}" if self._most else ""),
            "output": logs / (f"{group}%3a.log" if group else "%a.log"),
            "open-mode": "append",
            **self._options,
        }
        given = {key: value for key, value in options.items() if value is not None and value is not False}
        words = [f"--{key}" if value is True else f"--{key}={value}" for key, value in given.items()]
        text = _call(["sbatch", "--parsable", *words], "\n".join(self._script(jobs)))
        # On a cluster of several, the answer has the name of the cluster too
        array = text.strip().partition(";")[0]
        return {number: f"{array}_{element}" for number, element in numbers.items()}

    def _script(self, jobs: Sequence[Job]) -> Iterator[str]:
        yield from ("#!/bin/bash", *self._setup, 'case "$SLURM_ARRAY_TASK_ID" in')
        for job in jobs:
            variables = [f"{name}={value}" for name, value in job.environment.items()]
            yield f"{_place(job)[1]}) job=({shlex.join(['env', *variables, *job.command])}) ;;"
        yield from ("esac", f'{shlex.join(self._srun)} "${{job[@]}}"', "")

    def _queue(self) -> dict[str, tuple[str, str]]:
        """State and name of the array of each element of the user's arrays, by its id, such as 1234_0."""
        words = ["squeue", "--noheader", "--array", "--states=all", f"--user={os.getuid()}", "--format=%F_%K %T %j"]
        lines = [line.split(maxsplit=2) for line in _call(words).splitlines()]
        return {fields[0]: (fields[1], fields[-1]) for fields in lines if len(fields) > 1}


def _place(job: Job) -> tuple[str, str]:
    """The end of the name of the array that a job is in, and its number there."""
    sweep, number = job.log.parent.resolve(), int(job.log.stem)
    digest = hashlib.sha256(str(sweep).encode()).hexdigest()[:8]
    return f"{digest}-{number // _ELEMENTS}", str(number % _ELEMENTS)


def _call(words: Sequence[str], text: str = "") -> str:
    """What a command of SLURM prints.

    Raises:
        UserError: it failed.
    """
    # In a job of SLURM, its variables would become options of the jobs that are submitted from there.
    inside = "SLURM_JOB_ID" in os.environ
    others = {k: v for k, v in os.environ.items() if not (inside and k.startswith("SLURM_") and k != "SLURM_CONF")}
    try:
        done = subprocess.run(
            words, input=text, env=others, capture_output=True, text=True, check=True, timeout=_ANSWER_S
        )
        return done.stdout
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().partition("\n")[0]
        raise UserError("hydra/launcher", f"is slurm, and {words[0]} failed: {said or error}") from error
