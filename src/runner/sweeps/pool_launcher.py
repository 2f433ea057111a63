"""`hydra/launcher=pool`: Hydra's launcher for jobs side by side on one machine, on top of `runner.sweeps.pool`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from runner.config.cores import cores
from runner.config.errors import FAILED, PREEMPTED, Problem
from runner.config.overrides import canonical
from runner.config.secrets import mask_words
from runner.config.sources import shipped
from runner.sweeps.events import Event, period_s, tell
from runner.sweeps.jobs import completed, varied_words
from runner.sweeps.ledger import ENDED, Entry, Ledger, Records
from runner.sweeps.pool import LOGS, Common, Ended, Pool, Slot, slots_of
from runner.sweeps.rows import command_alone
from runner.tracking.formats import number as in_words

_MOST = 1024  # slots on a device, threads


@dataclass
class PoolConfig:
    """The keys of `hydra.launcher`; `conf/hydra/launcher/pool.yaml` explains them."""

    _target_: str = "hydra_plugins.runner_pool.PoolLauncher"
    devices: Any = "auto"
    per_device: int | None = None
    threads: int | None = None
    detach: bool = False


ConfigStore.instance().store(group="hydra/launcher", name="_pool", node=PoolConfig, provider="runner")


def register() -> None:
    """Let Hydra know of the launcher, which it takes from its own folder of plugins alone."""
    sys.modules[PoolLauncher.__module__] = sys.modules[__name__]
    Plugins.instance().register(PoolLauncher)


def problems_of(launcher: Any, values: dict[str, Any], verb: str, given: str = "hydra/launcher=pool") -> list[Problem]:
    """What is wrong with the keys of the launcher.

    Args:
        launcher: the section `hydra.launcher`.
        values: the composed config of the first job.
        verb: of the command line.
        given: the override that asks for a pool.
    """
    found = []
    if verb != "train":
        found.append(Problem("hydra/launcher", f"is pool, which is for train, and this is {verb}", "basic"))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        message = "is pool, which starts processes itself, and torchrun or srun started several"
        found.append(Problem("hydra/launcher", message, "one process, without torchrun"))
    for key in ("per_device", "threads"):
        if getattr(launcher, key) is not None and not 1 <= getattr(launcher, key) <= _MOST:
            allowed = f"a whole number from 1 to {_MOST}, or null"
            found.append(Problem(f"hydra.launcher.{key}", f"cannot be {getattr(launcher, key)}", allowed))
    try:
        devices = _devices(launcher.devices, str(values.get("device")))
    except ValueError as error:
        return [*found, Problem("hydra.launcher.devices", *error.args)]
    if devices != ["cpu"]:
        if str(values.get("device")).startswith("cuda:"):
            message = f"is {values['device']}, and {given} gives each job one GPU, which it sees as the first"
            found.append(Problem("device", message, "cuda, and hydra.launcher.devices=[...] to choose GPUs"))
        if values.get("devices") not in (1, None):
            message = f"is {values['devices']}, and {given} gives each job one GPU"
            found.append(Problem("devices", message, "1, or jobs one after the other"))
    return found


def _devices(given: Any, device: str) -> list[str]:
    """The GPUs that jobs get, by number, or `cpu` alone.

    Raises:
        ValueError: with what is wrong, and what is allowed.
    """
    allowed = "auto, cpu, a number of GPUs, or a list of them such as [0, 1]"
    if given == "cpu" or (given == "auto" and device in ("cpu", "mps")):
        return ["cpu"]
    there = int(importlib.import_module("torch").cuda.device_count())
    if given == "auto":
        return [str(number) for number in range(there)] or ["cpu"]
    listed = list(given) if OmegaConf.is_list(given) else range(given) if type(given) is int else None
    if not listed or len(set(listed)) < len(listed) or not all(type(each) is int and each >= 0 for each in listed):
        raise ValueError(f"cannot be {given}", allowed)
    if max(listed) >= there:
        raise ValueError(f"is {given}, and this machine has {there} GPUs that can be seen", allowed)
    return [str(each) for each in listed]


def pool_of(folder: Path, task: Any, launcher: Any, values: Any, most: int | None = None, **common: Any) -> Pool:
    """The pool for the jobs of a sweep; `common` are the other fields of `Common`."""
    slots, environment = slots_for(launcher, values, most)
    environment = {**task.verb.environment, **environment}
    return Pool(slots, Common(folder=folder, verb=task.verb.name, environment=environment, **common))


def slots_for(launcher: Any, values: Any, most: int | None = None) -> tuple[list[Slot], dict[str, str]]:
    """The slots of a sweep, at most so many, and variables that are set before torch is imported.

    Jobs keep the number of threads that they have one after the other, as their bits depend on it.
    """
    devices, environment = _devices(launcher.devices, str(values.get("device"))), dict[str, str]()
    if launcher.threads is not None:
        environment["OMP_NUM_THREADS"] = str(launcher.threads)
    given = str(values.get("threads") or launcher.threads or os.environ.get("OMP_NUM_THREADS"))
    threads = int(given) if given.isdecimal() else cores()
    usual = 1 if devices != ["cpu"] else max(1, cores() // threads) if given.isdecimal() else 2
    slots = slots_of(devices, launcher.per_device or usual)[:most]
    if len(slots) * threads > cores():
        environment.setdefault("OMP_WAIT_POLICY", "passive")  # threads that wait leave the cores to the others
        if devices == ["cpu"]:
            print(
                f"{len(slots)} jobs at a time with {threads} threads each, on {cores()} CPU cores: threads=1 may be faster",
                flush=True,
            )
    return slots, environment


class PoolLauncher(Launcher):
    """Runs jobs in the slots of a `Pool`; see `PoolConfig`."""

    __module__ = "hydra_plugins.runner_pool"

    def __init__(self, devices: Any, per_device: int | None, threads: int | None, detach: bool) -> None:
        super().__init__()

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take what Hydra gives."""
        self._config, self._task = config, task_function
        self._ledger = Ledger(Path(str(config.hydra.sweep.dir)))

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run jobs, and wait for them.

        Raises:
            SystemExit: if a signal asked for it, or the process of a job ended without saying how the job did.
        """
        setup_globals()
        self._jobs = {initial_job_idx + at: list(words) for at, words in enumerate(job_overrides)}
        self._varied = dict(zip(self._jobs, varied_words(list(self._jobs.values())), strict=True))
        first = {tuple(words): number for number, words in reversed(self._jobs.items())}  # a value may be given twice
        self._todo, self._values, self._broken = sorted(first.values()), dict[int, float | None](), False
        hydra = self._config.hydra
        folders = [Path(each.path) for each in hydra.runtime.config_sources if each.schema == "file" and each.path]
        common: dict[str, Any] = {
            "words": list(hydra.overrides.hydra),
            "primary": str(hydra.job.config_name),
            "sources": [str(each) for each in folders if each.resolve() != shipped().resolve() and each.is_dir()],
        }
        with pool_of(self._ledger.folder, self._task, hydra.launcher, self._config, **common) as pool:
            for all_ended in pool.run(lambda: self._start_next(pool), period_s()):
                for ended in all_ended:
                    self._end(ended, pool.asked)
                tell(None)
                if not (self._todo or pool.running):
                    break  # without waiting for slots that nothing needs
        if pool.asked or self._broken:
            raise SystemExit(PREEMPTED if pool.asked else FAILED)
        return [completed(words, self._values.get(first[tuple(words)])) for words in self._jobs.values()]

    def _start_next(self, pool: Pool) -> bool:
        if not self._todo:
            return False
        number = self._todo.pop(0)
        records = self._ledger.read()
        job, known = self._find(records, number)
        if known is not None and (found := self._ledger.settled(job)):
            result = f", {found.metric} {in_words(found.value)}" if found.metric else ""
            self._values[number] = found.value
            self._tell(number, "skipped", f"{known.folder} has {found.status} already{result}", known)
        elif records.launches[-1]["fail_fast"] and (failed := records.failed_now):
            self._tell(number, "pending", f"{failed.folder} failed, and fail_fast=true")
        else:
            slot = pool.start(number, self._jobs[number])
            self._tell(number, "started", slot.name)
        return True

    def _end(self, ended: Ended, stopped: str) -> None:
        """Tell how a job ended, and repeat it if the ledger says so."""
        number = ended.number
        self._values[number] = ended.value
        job, known = self._find(self._ledger.read(), number)
        end = self._ledger.end_of(job, ended.sentence, stopped)
        kind, text = end.outcome.status, end.outcome.sentence or ""
        if kind == "retried":
            self._todo.insert(0, number)
        elif kind == "finished":
            text = f"{end.outcome.metric} {in_words(end.outcome.value)}" if end.outcome.metric else ""
        elif kind == "pending" and known is None and not text:
            kind = "finished"  # a sweeper chose the values of a job that the ledger has under others
        elif kind not in (*ENDED, "pending"):
            kind = "preempted"
        self._broken |= end.killed and kind == "failed"
        self._tell(number, kind, text, known)

    def _find(self, records: Records, number: int) -> tuple[str, Entry | None]:
        """The identity of a job, and what the ledger has about it; nothing if it is new and a sweeper chose it."""
        stored = _stored(self._jobs[number])
        for job in [name for name, others in records.planned.items() if others == stored]:
            return job, records.jobs.get(job)
        return next(((job, entry) for job, entry in records.jobs.items() if entry.overrides == stored), ("", None))

    def _tell(self, number: int, kind: Any, text: str, known: Entry | None = None) -> None:
        repeat = command_alone(_stored(self._jobs[number]), self._ledger.read().flags) if kind == "failed" else ""
        log = self._ledger.folder / LOGS / f"{number}.log"
        count, folder = max(self._jobs) + 1, known.folder if known else None
        tell(Event(kind, number + 1, count, self._varied[number], text, folder, log, repeat))


def _stored(words: Sequence[str]) -> list[str]:
    """Overrides of a job as the ledger has them."""
    return mask_words(word for word in canonical(words) if not word.startswith(("hydra.", "hydra/")))
