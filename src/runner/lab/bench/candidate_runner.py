"""A candidate: built, run for some steps, timed, and released."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import time
import weakref
from collections.abc import Mapping
from typing import Any

import psutil
import torch

from runner.base.errors import UserError
from runner.config.app import Composition
from runner.config.frozen import to_plain, with_changes
from runner.config.resolve import resolve_changes
from runner.config.schema.verbs import Bench
from runner.data.loaders import Loader
from runner.data.module import DataModule
from runner.data.workers import WorkerLoader
from runner.engine.loop import Loop
from runner.engine.plan import Limits
from runner.engine.position import Position
from runner.engine.protocols import Source
from runner.engine.step import train_step
from runner.instrument.nested import tensors_in
from runner.instrument.saved_tensors import SavedTensors
from runner.lab.bench.candidates import BASELINE, Candidate
from runner.lab.bench.stats import Result
from runner.run.hardware import set_switches
from runner.run.run import Run
from runner.runtime.activation import is_switched_on, switch
from runner.runtime.device import choose_device
from runner.runtime.memory import memory_in_use, peak_memory, reset_peak_memory
from runner.train import build_run

# Keys that the data depend on: candidates that differ in others alone share their data.
_ABOUT_DATA = ("data", "transform", "seed", "device", "evaluate", "channels_last", "dtype")
# What torch raises when an operation, a kernel or a compiler cannot do what a candidate asks for, memory included.
CANNOT = (UserError, RuntimeError)
# Steps before a measurement that are not timed.
_WARMUP = 2
# Share of the free memory that candidates may use while they wait for their turn.
_WAITING_SHARE = 0.25


class Workbench:
    """Makes configs, data and runs for the candidates."""

    def __init__(self, config: Bench, composition: Composition) -> None:
        self._config, self._composition = config, composition
        self._own = config.ckpt_path is None  # otherwise a config from a file names the folders
        self._splits: dict[str, DataModule] = {}

    def config(self, settings: Mapping[str, Any]) -> Bench:
        """The validated config with some keys set."""
        if not settings:
            return self._config
        config, problems = resolve_changes(self._config, settings, self._composition)
        if problems or config is None:
            raise UserError("; ".join(f"{problem.key}: {problem.message}" for problem in problems))
        return config

    def build(self, config: Bench) -> Run:
        """A run with data that candidates share."""
        key = _about_data(config)
        if config.compile:
            import torch._dynamo.config

            # Each compiled candidate has its own graphs; beyond the limit torch runs a model uncompiled.
            torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        training = build_run(config, data=self._splits.get(key), make_cache=self._own, fresh=self._own)
        self._splits[key] = training.data
        return training

    def read_data(self, config: Bench) -> None:
        """Read the data of a config, or start its workers, so that building later does not take time for it."""
        if _about_data(config) not in self._splits:
            self.build(config)

    def keep_statistics(self, splits: DataModule) -> None:
        """Use the statistics of the first candidate's data, if any were measured, for all others."""
        statistics = {"data.normalize.mean": list(splits.mean), "data.normalize.std": list(splits.std)}
        self._config = with_changes(self._config, statistics if splits.mean else {})
        self._splits[_about_data(self._config)] = splits

    def close(self) -> None:
        """End worker processes."""
        for splits in self._splits.values():
            splits.close()


def _about_data(config: Bench) -> str:
    values = to_plain(config)
    return json.dumps([values[name] for name in _ABOUT_DATA], default=str)


class CandidateRunner:
    """Builds, runs and measures one candidate."""

    def __init__(self, bench: Workbench, candidate: Candidate = BASELINE) -> None:
        self.candidate = candidate
        self.name = candidate.name
        self.config = bench.config(candidate.settings)
        self._bench = bench
        self.device, _ = choose_device(self.config.device)
        self._training: Run | None = None
        self._recomputes = False

    @property
    def training(self) -> Run:
        """The run of the candidate, built on first use."""
        if self._training is None:
            self._training = self._bench.build(self.config)
            self._recomputes = is_switched_on()
        return self._training

    @property
    def loader(self) -> Loader:
        """The loader of training batches."""
        return self.training.data.train.loader

    def first_steps(self, steps: int, usual: float = math.inf) -> Result:
        """Build the candidate again and make its first steps, at least 2."""
        self.release()
        # Data and its workers are shared, so their time would count against whoever comes first.
        self._bench.read_data(self.config)
        reset_peak_memory(self.device)
        before = memory_in_use(self.device)
        began = time.perf_counter()
        training = self.training
        wait(self.device)
        built = time.perf_counter()
        # Samples of an optimizer step, on average over an epoch.
        samples = sum(map(training.plan.size, range(training.plan.batches))) / training.plan.steps
        clock = timed(training, self.loader, steps, 1, usual * samples * (steps - 1))
        return Result(
            self.candidate,
            samples,
            loss=training.state.meter.read(),
            first_s=clock.per_sample,
            start_s=built - began + clock.warmup_s,
            peak_bytes=max(0, peak_memory(self.device).bytes - before),
            saved_bytes=self._saved_bytes(),
        )

    def measure(self, steps: int) -> float:
        """Seconds a sample of training for some steps."""
        training, loader = self.training, self.loader
        self.configure()
        if isinstance(loader, WorkerLoader):
            # Batches that were read ahead must not make many workers look faster.
            ahead = -(-loader.workers * self.config.data.prefetch // self.config.accumulate)
            warmup = max(_WARMUP, ahead)
            return timed(training, loader, warmup + steps, warmup).per_sample
        # The first batch makes many others, whose time belongs to the measurement.
        timed(training, loader, _WARMUP)
        return timed(training, loader, steps).per_sample

    def configure(self) -> None:
        """Set torch's process-wide switches."""
        set_switches(self.config, self.device)
        switch(self._recomputes)

    def _saved_bytes(self) -> int | None:
        """Bytes that the graph of a batch keeps for backward; None for a compiled model, which torch gives no access to."""
        if self.config.compile:
            return None
        training = self.training
        (batch,) = self.loader.batches(0, 0, 1)
        with SavedTensors(training.model, tensors_in(batch.data)) as saved:
            train_step(training.state, training.parts, batch, 1.0, len(batch.indices), update=True)
        return saved.activations

    def release(self) -> None:
        """Free the candidate's memory; it is built again when it is needed."""
        if self._training is None:
            return
        # Another candidate needs the memory now, not when Python happens to look for cycles.
        model = weakref.ref(self._training.model)
        self._training = None
        if model() is not None:  # held by a cycle, as compiled models are, and collecting takes time
            gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def room_for(runner: CandidateRunner, count: int) -> bool:
    """True if so many candidates may keep weights and optimizer state in memory while they wait for their turn."""
    device, state = runner.device, runner.training.state
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    tensors = [*state.model.parameters(), *state.model.buffers(), *tensors_in([*state.optimizer.state.values()])]
    return sum(tensor.nbytes for tensor in tensors) * count < _WAITING_SHARE * free


# A candidate that is slower in its first steps than this would only take time from the others.
_TOO_SLOW = 5
_SHORT_S = 0.1  # steps that take less are never too slow: on a busy machine, waiting for a core takes as long


class Clock:
    """A callback that waits for the device and takes the time at the start, after the warm-up and at the end.

    Args:
        device: what to wait for.
        warmup: steps after which to take the time; 0 for none.
        usual_s: seconds that the steps after those take usually.
    """

    def __init__(self, device: torch.device, warmup: int, usual_s: float) -> None:
        self._device, self._warmup, self._limit_s = device, warmup, max(_SHORT_S, _TOO_SLOW * usual_s)
        self._taken: list[tuple[float, int]] = []
        self._done = 0

    def on_start(self, loop: Loop) -> None:
        """Take the time."""
        wait(self._device)
        self._taken.append((time.perf_counter(), loop.samples_seen))

    on_end = on_start

    def on_step(self, loop: Loop) -> None:
        """Count a step, and take the time after the warm-up."""
        self._done += 1
        if self._done == self._warmup:
            self.on_start(loop)
        elif self._done > self._warmup and time.perf_counter() - self._taken[-1][0] > self._limit_s:
            raise UserError(f"more than {_TOO_SLOW} times slower than the baseline in its first steps")

    @property
    def warmup_s(self) -> float:
        """Seconds of the warm-up."""
        return self._taken[1][0] - self._taken[0][0]

    @property
    def per_sample(self) -> float:
        """Seconds a sample after the warm-up."""
        (began, before), (ended, after) = self._taken[-2:]
        return (ended - began) / (after - before)


def timed(training: Run, source: Source, steps: int, warmup: int = 0, usual_s: float = math.inf) -> Clock:
    """Do some optimizer steps from the beginning of the first epoch, without evaluation, checkpoints or logging.

    `source` gives the batches; `steps` includes the `warmup`, and `usual_s` is that of `Clock`.
    """
    # Every candidate trains on the same batches
    training.state.position = Position()
    # Only batches that are used: workers would make others while another candidate is measured.
    plan = dataclasses.replace(training.plan, limit=min(training.plan.batches, steps * training.plan.accumulate))
    clock = Clock(training.device, warmup, usual_s)
    limits = Limits(None, steps)
    loop = Loop(
        training.state,
        source,
        plan,
        parts=training.parts,
        limits=limits,
        evaluate=None,
        callbacks=[clock],
        monitor=training.monitor,
    )
    loop.run()
    return clock


def wait(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
