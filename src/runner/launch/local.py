"""Jobs as processes of this machine, each forked from a server that has imported torch; one after the other with one slot."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from runner.base.cores import cores
from runner.base.errors import UserError
from runner.base.files import make_folder
from runner.launch import processes
from runner.launch.jobs import Ended, Job, Launcher

T = TypeVar("T")
Slot = tuple[str, Mapping[str, str]]  # a place for one job, such as `GPU 1`, and the variables that a job there gets
_MOST = 1024  # slots on a device, threads


class Local(Launcher):
    """A launcher for this machine; `conf/hydra/launcher/pool.yaml` explains its keys. Its jobs save and end when it does.

    Args:
        devices: `auto`, `cpu`, a number of GPUs, or a list of their numbers.
        per_device: jobs at a time on each device; None for the usual number.
        threads: CPU threads of a job.
        values: the composed config of the first job.
        most: the most jobs at a time; 1 gives the only job at a time all devices.

    Raises:
        UserError: for a key that cannot be used, or one of the job that does not fit.
    """

    def __init__(
        self,
        devices: Any = "auto",
        per_device: int | None = None,
        threads: int | None = None,
        *,
        values: Mapping[str, Any],
        most: int | None = None,
    ) -> None:
        for key, number in {"per_device": per_device, "threads": threads}.items():
            if number is not None and not (type(number) is int and 1 <= number <= _MOST):
                allowed = f"a whole number from 1 to {_MOST}, or null"
                raise UserError(f"hydra.launcher.{key}", f"cannot be {number}", allowed)
        self._environment = {"OMP_NUM_THREADS": str(threads)} if threads is not None else {}
        self._running: dict[int, tuple[BaseProcess, Slot]] = {}
        # A single slot needs no device of its own: the job chooses as if it ran alone
        self._free = [("", {})] if most == 1 else self._slots(_gpus(devices, values), per_device, values)[:most]
        self.slots: int | None = len(self._free)

    def _slots(self, gpus: Sequence[int], per_device: int | None, values: Mapping[str, Any]) -> list[Slot]:
        """Slots on GPUs, or, without any, on the CPU."""
        # Jobs keep the number of threads that they have one after the other, as their bits depend on it
        text = str(values.get("threads") or (os.environ | self._environment).get("OMP_NUM_THREADS"))
        # Without a number, torch takes every core for each job
        threads = int(text) if text.isdecimal() else cores()
        usual = 1 if gpus else max(1, cores() // threads) if text.isdecimal() else 2
        count = per_device or usual
        visible = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
        own = {f"GPU {gpu}": visible[gpu] if visible else str(gpu) for gpu in gpus}
        # Neighbours on a device are filled last
        places = [*own.items()] * count if gpus else [(f"CPU {number}", "") for number in range(count)]
        # More threads than cores: threads that spin while they wait would slow down the others
        if len(places) * threads > cores():
            self._environment.setdefault("OMP_WAIT_POLICY", "passive")
            if not gpus:
                said = f"{count} jobs at a time with {threads} threads each, on {cores()} CPU cores"
                print(f"{said}: threads=1 may be faster", flush=True)
        return [(name, {"CUDA_VISIBLE_DEVICES": device}) for name, device in places]

    def prepare(self, preload: Sequence[str]) -> None:
        """Start the server that jobs are forked from; it imports modules while this process does other things."""
        before = dict(os.environ)
        try:
            os.environ.update(self._environment)
            processes.start_fork_server(preload)
        finally:
            os.environ.clear()
            os.environ.update(before)

    def call(self, function: Callable[[], T]) -> T:
        """Call a function in a process that is forked for it, and return what it returns; both are pickled."""
        with ProcessPoolExecutor(1, mp_context=processes.FORKED) as pool:
            return pool.submit(function).result()

    def start(self, jobs: Sequence[Job]) -> list[str]:
        """See `Launcher.start`."""
        slots = [self._free.pop(0) for _ in jobs]
        for job, slot in zip(jobs, slots, strict=True):
            make_folder(job.log.parent)
            environment = {**os.environ, **self._environment, **slot[1], **job.environment}
            # A process of its own: its memory is free afterwards, and an abort takes only this job
            self._running[job.number] = processes.start(job.call, environment, job.log.absolute()), slot
        return [name for name, _ in slots]

    def wait(self, timeout_s: float) -> list[Ended]:
        """See `Launcher.wait`."""
        if not (running := self._children()):
            time.sleep(timeout_s)
        processes.wait(running, timeout_s, lambda: any(child.exitcode is not None for child in running))
        ended = []
        for number, (child, slot) in list(self._running.items()):
            if child.exitcode is not None:
                del self._running[number]
                self._free.append(slot)
                assert child.pid is not None
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    # Its data workers would notice only after seconds that it has ended
                    os.killpg(child.pid, signal.SIGKILL)
                ended.append(Ended.with_status(number, child.exitcode))
                child.close()
        return ended

    def stop(self, kill: bool) -> None:
        """See `Launcher.stop`."""
        processes.send(self._children(), signal.SIGKILL if kill else signal.SIGTERM)

    def close(self) -> None:
        """See `Launcher.close`."""
        self.stop(kill=False)  # none runs, unless an error ends the sweep
        for child in self._children():
            child.join()

    def _children(self) -> list[BaseProcess]:
        return [child for child, _ in list(self._running.values())]


def _gpus(given: Any, values: Mapping[str, Any]) -> Sequence[int]:
    """The numbers of the GPUs that jobs get; none if they run on the CPU."""
    key, allowed = "hydra.launcher.devices", "auto, cpu, a number of GPUs, or a list of them such as [0, 1]"
    device = str(values.get("device"))
    # A sweep on the CPU need not import torch
    if given == "cpu" or (given == "auto" and device in ("cpu", "mps")):
        return []
    import torch

    # The launcher asks for devices before any job: a wrong number fails before the first one starts
    there = torch.cuda.device_count()
    gpus = range(there)
    if given != "auto":
        gpus = range(given) if type(given) is int else given
        listed = isinstance(gpus, Sequence) and all(type(each) is int and each >= 0 for each in gpus)
        if not (gpus and listed and len(set(gpus)) == len(gpus)):
            raise UserError(key, f"cannot be {given}", allowed)
        if max(gpus) >= there:
            raise UserError(key, f"is {given}, and this machine has {there} GPUs that can be seen", allowed)
    # Every slot has one GPU, so a job that asks for several could not run
    pool = "and each of several jobs at a time gets one GPU"
    if gpus and device.startswith("cuda:"):
        wanted = "cuda, and hydra.launcher.devices=[...] to choose GPUs"
        raise UserError("device", f"is {device}, {pool}, which it sees as the first", wanted)
    if gpus and values.get("devices") not in (1, None):
        raise UserError("devices", f"is {values['devices']}, {pool}", "1, or jobs one after the other")
    return gpus
