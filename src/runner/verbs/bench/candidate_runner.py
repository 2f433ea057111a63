"""A candidate on the test stand: built, run for some steps, timed, compared with itself, and put away."""

from __future__ import annotations

import gc
import json
import math
import time
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import psutil
import torch

from runner.build.hardware import set_switches
from runner.build.run import Run
from runner.checkpoint.digest import weights_sha256
from runner.config.app import Composition
from runner.config.errors import ConfigError, UserError
from runner.config.frozen import to_plain, with_changes
from runner.config.resolve import resolve_changes
from runner.config.schema.bench import Bench
from runner.data.build import DataModule
from runner.data.workers import WorkerLoader
from runner.engine.step import train_step
from runner.instrument.saved_tensors import SavedTensors
from runner.runtime.activation import is_switched_on, switch
from runner.runtime.device import choose_device
from runner.runtime.memory import memory_in_use, peak_memory, reset_peak_memory
from runner.train import build_run
from runner.verbs.bench.candidates import BASELINE, Candidate
from runner.verbs.bench.timing import Clock, Repeated, Timed, read, run, wait

# Keys that change nothing about the batches: candidates that differ in these alone share their data.
_NOT_ABOUT_DATA = frozenset(
    {
        *("amp", "compile", "compiler", "activation_checkpointing", "threads", "deterministic"),
        *("cudnn_benchmark", "tf32", "matmul_precision", "model", "loss", "optimizer", "scheduler"),
    }
)
# What torch raises when an operation, a kernel or a compiler cannot do what a candidate asks for, memory included.
CANNOT = (UserError, RuntimeError)
# Steps after which it shows that a candidate is far too slow.
_FEW = 3
# Share of the free memory that candidates may hold while they wait for their turn.
_SHARE_HELD = 0.25


class Workbench:
    """Makes configs, data and trainings for the candidates.

    Args:
        config: what was asked for.
        composition: what the command line amounts to.
    """

    def __init__(self, config: Bench, composition: Composition) -> None:
        self._config, self._composition = config, composition
        self._own = config.ckpt_path is None  # and no config from a file says where to read and write
        self._splits: dict[str, DataModule] = {}

    def config(self, settings: Mapping[str, Any]) -> Bench:
        """The validated config with some keys set.

        Raises:
            UserError: with what is wrong, in one line where it is not the user's own words that are.
        """
        config, problems = resolve_changes(self._config, settings, self._composition)
        if problems or config is None:
            if not settings:
                raise ConfigError(problems)
            raise UserError("; ".join(f"{problem.key}: {problem.message}" for problem in problems))
        return config

    def build(self, config: Bench, splits: DataModule | None = None) -> Run:
        """What a run would train, on data that other candidates may use too.

        Args:
            config: the config.
            splits: data to use in place of what the config says.

        Raises:
            UserError: if the parts do not fit together.
        """
        key = _about_data(config)
        if config.compile:
            _allow_recompiling()
        training = build_run(config, data=splits or self._splits.get(key), make_cache=self._own, fresh=self._own)
        if splits is None:
            self._splits[key] = training.splits
        return training

    def read_data(self, config: Bench) -> None:
        """Have the data of a config in memory, or its workers ready, so that building it later takes no time for that."""
        if _about_data(config) not in self._splits:
            self.build(config)

    def keep_statistics(self, splits: DataModule) -> None:
        """Give all further candidates the statistics that were measured for the first one."""
        self._config = with_changes(
            self._config, {"data.normalize.mean": list(splits.mean), "data.normalize.std": list(splits.std)}
        )
        self._splits[_about_data(self._config)] = splits

    def close(self) -> None:
        """End worker processes."""
        for splits in self._splits.values():
            splits.close()


def _allow_recompiling() -> None:
    """Let each compiled candidate have graphs of its own: beyond a limit torch runs a model uncompiled, and says little."""
    import torch._dynamo.config

    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)


def _about_data(config: Bench) -> str:
    return json.dumps(
        {name: value for name, value in to_plain(config).items() if name not in _NOT_ABOUT_DATA}, default=str
    )


class FirstSteps(NamedTuple):
    """What the first steps of a training showed.

    Attributes:
        loss: mean training loss.
        digest: fingerprint of the weights after them.
        step_s: seconds of a usual step.
        start_s: seconds to build everything but the data and to make the first step, less those of a usual step.
        build_s: seconds to build everything but the data.
        peak_bytes: memory at most, beyond what was in use before.
    """

    loss: float
    digest: str
    step_s: float
    start_s: float
    build_s: float
    peak_bytes: int


class TooSlow(Exception):
    """A candidate whose steps take longer than it was given; the argument is the seconds of one."""


class Stand:
    """One candidate.

    Args:
        bench: makes what it needs.
        candidate: what to measure.

    Raises:
        UserError: if the candidate is no valid config.
    """

    def __init__(self, bench: Workbench, candidate: Candidate = BASELINE) -> None:
        self.candidate = candidate
        self.config = bench.config(dict(candidate.settings))
        self._bench = bench
        self.device, _ = choose_device(self.config.device)
        self._training: Run | None = None
        self._recomputes = False

    @property
    def training(self) -> Run:
        """The objects of the candidate, built if they are not there."""
        if self._training is None:
            self._training = self._bench.build(self.config)
            self._recomputes = is_switched_on()
        return self._training

    @property
    def samples(self) -> float:
        """Samples of an optimizer step, on average over an epoch."""
        plan = self.training.plan
        return sum(map(plan.size, range(plan.batches))) / plan.steps

    @property
    def read_ahead(self) -> int:
        """Optimizer steps whose batches may have been read before they are asked for."""
        return -(-self.workers * self.config.data.prefetch // self.config.accumulate)

    def first_steps(self, steps: int, longest_s: float = math.inf) -> FirstSteps:
        """Build anew and make the first steps.

        Args:
            steps: how many, at least 2.
            longest_s: seconds that one of them may take.

        Raises:
            TooSlow: after a few steps, if they take longer.
            UserError, RuntimeError: if it cannot be run.
        """
        self.release()
        self._bench.read_data(self.config)
        device = self.device
        reset_peak_memory(device)
        before = memory_in_use(device)
        began = time.perf_counter()
        training = self.training
        wait(device)
        built = time.perf_counter()
        few = 1 + min(_FEW, steps - 1)

        def watch(clock: Clock) -> None:
            if (per_step := (clock.seconds(few) - clock.seconds(1)) / (few - 1)) > longest_s:
                raise TooSlow(per_step)

        clock = run(training, training.splits.train.loader, steps, {1: None, few: watch})
        first = clock.seconds(1)
        # Of the steps after the first; after the few, where there are more, as some of those still warm up.
        since = few if steps > few else 1
        usual = (clock.seconds(steps) - clock.seconds(since)) / (steps - since)
        return FirstSteps(
            loss=training.state.meter.read(),
            digest=weights_sha256(training.model.state_dict()),
            step_s=usual,
            start_s=max(0.0, built - began + first - usual),
            build_s=built - began,
            peak_bytes=max(0, peak_memory(device).bytes - before),
        )

    def seeded(self, seed: int, steps: int) -> float:
        """The loss after the first steps from other initial weights, on the same batches."""
        config = self._bench.config({**dict(self.candidate.settings), "seed": seed})
        training = self._bench.build(config, self.training.splits)
        run(training, training.splits.train.loader, steps)
        return training.state.meter.read()

    def measure(self, steps: int, warmup: int, epoch: int = 0) -> Timed:
        """Train for some steps, the switches of torch set as this candidate has them."""
        training = self.training
        loader = training.splits.train.loader
        self.configure()
        if self.in_memory:
            # Many batches are made at once with the first one, which belongs to the time.
            run(training, loader, warmup, epoch=epoch)
            return run(training, loader, steps, epoch=epoch).since(0)
        return run(training, loader, warmup + steps, {warmup: None}, epoch).since(warmup)

    def read(self, steps: int, warmup: int, epoch: int) -> Timed:
        """Take the batches of some steps from the loader, and do nothing with them."""
        self.configure()
        plan = self.training.plan
        if self.in_memory:
            read(self.training, warmup * plan.accumulate, 0, epoch)
            warmup = 0
        return read(self.training, steps * plan.accumulate, warmup * plan.accumulate, epoch)

    def compute(self, steps: int, warmup: int) -> Timed:
        """Train on one batch, which is on the device already."""
        self.configure()
        training = self.training
        (batch,) = training.splits.train.loader.batches(0, 0, 1)
        return run(training, Repeated(batch, training.plan), warmup + steps, {warmup: None}).since(warmup)

    @property
    def in_memory(self) -> bool:
        """Whether batches are gathered from memory, and not read one by one."""
        return not isinstance(self.training.splits.train.loader, WorkerLoader)

    @property
    def workers(self) -> int:
        """Processes that read samples."""
        loader = self.training.splits.train.loader
        return loader.workers if isinstance(loader, WorkerLoader) else 0

    def configure(self) -> None:
        """Set torch's process-wide switches."""
        set_switches(self.config, self.device)
        switch(self._recomputes)

    def saved_bytes(self) -> int | None:
        """What the graph of a batch keeps for backward; None for a compiled model, whose graph is not torch's."""
        training = self.training
        if self.config.compile:
            return None
        (batch,) = training.splits.train.loader.batches(0, 0, 1)
        training.state.train()
        with SavedTensors(training.model, [batch.images, batch.targets]) as saved:
            train_step(training.state, training.parts, batch, 1.0, len(batch.targets), True)
        return saved.activations

    def held_bytes(self) -> int:
        """Memory of weights and optimizer while the candidate waits for its turn."""
        state = self.training.state
        tensors = [*state.model.parameters(), *state.model.buffers()]
        for entry in state.optimizer.state.values():
            tensors += [value for value in entry.values() if isinstance(value, torch.Tensor)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def release(self) -> None:
        """Free what the candidate holds; it is built again when it is needed."""
        if self._training is None:
            return
        model = weakref.ref(self._training.model)
        self._training = None
        if model() is not None:  # held by a cycle, as compiled models are; looking for those takes a while
            gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def room_for(stand: Stand, count: int) -> bool:
    """Whether so many candidates may stay in memory while each waits for its turn."""
    device = stand.device
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    return stand.held_bytes() * count < _SHARE_HELD * free


def reason(error: Exception) -> str:
    """The first line of what is wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
