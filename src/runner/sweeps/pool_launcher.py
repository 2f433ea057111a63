"""`hydra/launcher=pool`: Hydra's launcher for jobs side by side on one machine, on top of `runner.sweeps.pool`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from runner.config.cores import cores
from runner.config.errors import FAILED, PREEMPTED, Problem
from runner.config.overrides import canonical
from runner.config.secrets import mask_words
from runner.config.sources import shipped
from runner.sweeps.events import Event, period_s, tell
from runner.sweeps.jobs import varied_words
from runner.sweeps.ledger import ENDED, Entry, Ledger, Outcome, Records, outcome_of
from runner.sweeps.pool import Common, Ended, Pool, PoolBroken, Slot, slots_of
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


def problems_of(launcher: Any, values: dict[str, Any], verb: str) -> list[Problem]:
    """What is wrong with the keys of the launcher.

    Args:
        launcher: the section `hydra.launcher`.
        values: the composed config of the first job.
        verb: of the command line.
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
            message = (
                f"is {values['device']}, and hydra/launcher=pool gives each job one GPU, which it sees as the first"
            )
            found.append(Problem("device", message, "cuda, and hydra.launcher.devices=[...] to choose GPUs"))
        if values.get("devices") not in (1, None):
            message = f"is {values['devices']}, and hydra/launcher=pool gives each job one GPU"
            found.append(Problem("devices", message, "1, or hydra/launcher=basic"))
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


def slots_for(launcher: Any, values: Any) -> tuple[list[Slot], dict[str, str]]:
    """The slots of a sweep, and variables that are set before torch is imported.

    Jobs keep the number of threads that they have one after the other, as their bits depend on it.
    """
    devices, environment = _devices(launcher.devices, str(values.get("device"))), dict[str, str]()
    if launcher.threads is not None:
        environment["OMP_NUM_THREADS"] = str(launcher.threads)
    given = str(values.get("threads") or launcher.threads or os.environ.get("OMP_NUM_THREADS"))
    threads = int(given) if given.isdecimal() else cores()
    usual = 1 if devices != ["cpu"] else max(1, cores() // threads) if given.isdecimal() else 2
    slots = slots_of(devices, launcher.per_device or usual)
    if len(slots) * threads > cores():
        environment.setdefault("OMP_WAIT_POLICY", "passive")  # threads that wait leave the cores to the others
        if devices == ["cpu"]:
            print(
                f"{len(slots)} jobs at a time with {threads} threads each, on {cores()} CPU cores: threads=1 may be faster",
                flush=True,
            )
    return slots, environment


@dataclass
class _State:
    """The jobs of one call of the launcher."""

    jobs: dict[int, list[str]]  # overrides by number
    varied: dict[int, str]
    todo: list[int]
    values: dict[int, float | None] = field(default_factory=dict)
    broken: bool = False  # whether a process ended without saying how its job did


class PoolLauncher(Launcher):
    """Runs jobs in the slots of a `Pool`; see `PoolConfig`."""

    __module__ = "hydra_plugins.runner_pool"

    def __init__(self, devices: Any, per_device: int | None, threads: int | None, detach: bool) -> None:
        super().__init__()

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take what Hydra gives."""
        self._config, self._verb = config, task_function.verb  # type: ignore[attr-defined]
        self._ledger = Ledger(Path(str(config.hydra.sweep.dir)))

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run jobs, and wait for them.

        Raises:
            SystemExit: if a signal asked for it, or the process of a job ended without saying how the job did.
        """
        setup_globals()
        jobs = {initial_job_idx + at: list(words) for at, words in enumerate(job_overrides)}
        varied = dict(zip(jobs, varied_words(list(jobs.values())), strict=True))
        first = {tuple(words): number for number, words in reversed(jobs.items())}  # a value may be given twice
        state = _State(jobs, varied, sorted(first.values()))
        slots, environment = slots_for(self._config.hydra.launcher, self._config)
        hydra = self._config.hydra
        folders = [Path(each.path) for each in hydra.runtime.config_sources if each.schema == "file" and each.path]
        common = Common(
            folder=self._ledger.folder,
            words=list(hydra.overrides.hydra),
            verb=self._verb.name,
            primary=str(hydra.job.config_name),
            sources=[str(each) for each in folders if each.resolve() != shipped().resolve() and each.is_dir()],
            environment={**self._verb.environment, **environment},
        )
        with Pool(slots, common) as pool:
            try:
                self._run(pool, state)
            except PoolBroken as error:
                print(f"error: {error}", flush=True)
                raise SystemExit(FAILED) from None
        if pool.asked:
            raise SystemExit(PREEMPTED)
        if state.broken:
            raise SystemExit(FAILED)
        return [_returned(words, state.values.get(first[tuple(words)])) for words in jobs.values()]

    def _run(self, pool: Pool, state: _State) -> None:
        while state.todo or pool.running:
            while state.todo and pool.free:
                self._start(pool, state, state.todo.pop(0))
            if pool.asked and not pool.running:
                break
            for ended in pool.wait(period_s()):
                self._end(pool, state, ended)
            tell(None)

    def _start(self, pool: Pool, state: _State, number: int) -> None:
        records = self._ledger.read()
        job, known = self._find(records, state.jobs[number])
        if known is not None and (found := self._ledger.settled(job)):
            result = f", {found.metric} {in_words(found.value)}" if found.metric else ""
            state.values[number] = found.value
            self._tell(state, number, "skipped", f"{known.folder} has {found.status} already{result}", known)
        elif records.launches[-1]["fail_fast"] and (failed := records.failed_now):
            self._tell(state, number, "pending", f"{failed.folder} failed, and fail_fast=true")
        else:
            slot = pool.start(number, state.jobs[number])
            self._tell(state, number, "started", slot.name)

    def _end(self, pool: Pool, state: _State, ended: Ended) -> None:
        """Record how a job ended if its process could not, and tell it."""
        number = ended.number
        state.values[number] = ended.value
        records = self._ledger.read()
        job, known = self._find(records, state.jobs[number])
        is_new = known is not None and known.launch == len(records.launches) - 1
        if not ended.sentence or (known is not None and is_new and known.status in ENDED):
            found = outcome_of(known) if known is not None else Outcome("finished")
        else:
            found = Outcome("failed", sentence=ended.sentence)
            if pool.asked:
                found = Outcome("preempted", sentence=f"{pool.asked}, before it had saved")
            if is_new and self._ledger.end(job, found):
                state.todo.insert(0, number)
                self._tell(state, number, "retried", ended.sentence, known)
                return
        state.broken |= found.status == "failed" and not is_new
        result = f"{found.metric} {in_words(found.value)}" if found.metric else ""
        kind = found.status if found.status in ENDED else "preempted"
        self._tell(state, number, kind, result if kind == "finished" else found.sentence or "", known)

    def _find(self, records: Records, words: list[str]) -> tuple[str, Entry | None]:
        """The identity of a job, and what the ledger has about it; nothing if it is new and a sweeper chose it."""
        stored = _stored(words)
        planned = records.launches[-1]["jobs"] or {}
        for job in [name for name, others in planned.items() if others == stored]:
            return job, records.jobs.get(job)
        return next(((job, entry) for job, entry in records.jobs.items() if entry.overrides == stored), ("", None))

    def _tell(self, state: _State, number: int, kind: Any, text: str = "", known: Entry | None = None) -> None:
        flags = self._ledger.read().launches[-1].get("flags") or []
        repeat = command_alone(_stored(state.jobs[number]), flags) if kind == "failed" else ""
        log = self._ledger.folder / "logs" / f"{number}.log"
        count = max(state.jobs) + 1
        folder = known.folder if known else None
        tell(Event(kind, number + 1, count, state.varied[number], text, folder, log, repeat))


def _stored(words: Sequence[str]) -> list[str]:
    """Overrides of a job as the ledger has them."""
    return mask_words(word for word in canonical(words) if not word.startswith(("hydra.", "hydra/")))


def _returned(words: list[str], value: float | None) -> JobReturn:
    result = JobReturn(overrides=words)
    result.status = JobStatus.COMPLETED
    result.return_value = value
    return result
