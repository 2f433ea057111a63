"""What a layout of ranks would cost: `runner.distributed.layout` applied to a few steps that are measured on this machine."""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from runner.build.finetune import explaining
from runner.build.model import example_input, example_targets, indices_for
from runner.build.ranks import gathered_apart
from runner.build.run import Run
from runner.build.validate import validate_limits
from runner.config.errors import UserError
from runner.config.frozen import with_changes
from runner.config.schema.train import Train
from runner.data.loaders import Batch
from runner.distributed import layout
from runner.distributed.layout import Memory, Traffic, Weight
from runner.instrument.nested import tensors_in
from runner.instrument.saved_tensors import SavedTensors
from runner.runtime.memory import readable
from runner.tracking.console import Console

_WARMUP, _STEPS, _BUDGET_S = 3, 7, 20.0
_ALONE = {"devices": 1, "strategy": "auto", "compile": False, "sync_batchnorm": False}  # how the steps are measured


@dataclass(frozen=True)
class Layout:
    """What a rank is predicted to hold, send and compute."""

    ranks: int
    strategy: str  # single, ddp or fsdp
    batch: int  # samples of a batch of all ranks
    samples: tuple[int, int]  # of a batch, that a rank gets at least and at most
    memory: Memory
    traffic: Traffic
    compute_s: float  # seconds that a step with the most samples took on `device`
    device: torch.device
    link_gb_s: float
    warnings: list[str]

    @property
    def step_s(self) -> tuple[float, float]:
        """Seconds of a step at least and at most, see `layout.step_seconds`."""
        return layout.step_seconds(self.compute_s, layout.link_seconds(self.traffic.total, self.link_gb_s))

    def rows(self) -> list[list[str]]:
        """What, how much of it, and where the number is from."""
        least, most = self.samples
        link, bounds = layout.link_seconds(self.traffic.total, self.link_gb_s), self.step_s
        sizes = {name: size for name, size in vars(self.memory).items() if size or name in _ALWAYS}
        sent = ", ".join(
            f"{name.replace('_', '-')} {readable(size)}" for name, size in vars(self.traffic).items() if size
        )
        return [
            ["samples", f"{least:,} to {most:,}", f"of each batch of {self.batch:,}"],
            *[[_NAMES.get(name, name), readable(size), _REASONS.get(name, "")] for name, size in sizes.items()],
            ["total", readable(self.memory.total), "without memory reserved by libraries"],
            ["sent per step", readable(self.traffic.total), sent],
            [
                "computing a step",
                _ms(self.compute_s),
                f"measured on this {self.device.type}, {most:,} sample{'s' * (most > 1)}",
            ],
            ["sending", _ms(link), f"at dist.link_gb_s={self.link_gb_s:g}"],
            ["step", f"{_ms(bounds[0])} to {_ms(bounds[1])}", "if all or none of the communication overlaps"],
        ]


_ALWAYS = ("parameters", "gradients", "optimizer", "activations")
_NAMES = {"optimizer": "optimizer state", "average": "average of the weights", "gathered": "gathered blocks"}
_REASONS = {
    "optimizer": "measured after some steps",
    "activations": "measured: kept for backward, with copies of weights made by amp",
    "gathered": "the largest one with its gradients, and parameters outside of blocks",
}


def dry_run(config: Train, build: Callable[[Train], Run], console: Console) -> float:
    """Print what the layout of `config` would cost; nothing is trained and nothing is written.

    Returns:
        The predicted seconds of a step if nothing overlaps, for sweepers.

    Raises:
        UserError: if the config cannot be run.
    """
    found = predict(config, build)
    for warning in found.warnings:
        console.warn(warning)
    title = f"{config.name} on {found.ranks} rank{'s' * (found.ranks > 1)}, strategy {found.strategy}: a dry run"
    console.table(title, ["per rank", "predicted", "from"], found.rows())
    return found.step_s[1]


def predict(config: Train, build: Callable[[Train], Run]) -> Layout:
    """The layout that `devices` and `strategy` ask for, from a few steps of a single process; see `dry_run`."""
    ranks, strategy = _asked(config)
    here = config.device if config.device in ("auto", "cpu") or torch.cuda.is_available() else "cpu"
    run = build(with_changes(config, _ALONE | {"device": here}))
    with contextlib.closing(run.data), run.state.freezing.as_at(None):  # training everything takes the most
        batch = run.plan.size(0)
        samples = layout.samples_of_ranks(batch, ranks)
        samples = samples[0], max(1 + config.sync_batchnorm, samples[1])  # a rank without samples computes with one
        problem = f"{batch} is {samples[1]} for each of {ranks} ranks, and a step with these fails: "
        with explaining("data.batch_size", problem, "a larger data.batch_size, or fewer devices"):
            activations, compute_s = _measure(run, samples[1])
        weights = _weights(run)
    buffers, averaged = sum(buffer.nbytes for buffer in run.model.buffers()), run.state.averaged is not None
    held = functools.partial(layout.ddp_memory, weights)
    warnings = [*run.warnings, *validate_limits(run)]
    if config.compile:
        warnings.append("compile has no effect on the measured steps, and may make real ones faster and smaller")
    if config.sync_batchnorm:
        warnings.append("sync_batchnorm=true has no effect on the measured steps, but sends more data")
    if config.devices == "auto":
        warnings.append(f"devices=auto is {ranks} on this machine; set a number to predict for others")
    if samples[0] == 0:
        warnings.append(f"data.batch_size={batch} is smaller than {ranks} ranks, so some ranks are idle")
    if strategy == "fsdp":
        settings, batches = config.fsdp, config.accumulate
        if ranks % settings.replicas:
            allowed = f"a divisor of {ranks}, the number of processes"
            raise UserError("fsdp.replicas", f"is {settings.replicas}, which does not divide the processes", allowed)
        divided, reshard = ranks // settings.replicas, settings.reshard_after_forward
        held = functools.partial(layout.fsdp_memory, weights, divided, reshard=reshard, batches=batches)
        traffic = layout.fsdp_traffic(weights, divided, reshard=reshard, batches=batches, replicas=settings.replicas)
    else:
        traffic = layout.ddp_traffic(weights, ranks, buffers=buffers)
    memory = held(buffers=buffers, averaged=averaged, activations=activations)
    link = config.dist.link_gb_s
    return Layout(ranks, strategy, batch, samples, memory, traffic, compute_s, run.device, link, warnings)


def _asked(config: Train) -> tuple[int, str]:
    """How many ranks there would be, on any number of machines, and their strategy."""
    if config.devices == "auto":
        ranks = max(1, torch.cuda.device_count())
    else:
        ranks = max(1, len(config.devices)) if isinstance(config.devices, list) else config.devices
    if config.strategy == "auto":
        return ranks, "ddp" if ranks > 1 else "single"
    return (1 if config.strategy == "single" else ranks), config.strategy


def _measure(run: Run, samples: int) -> tuple[int, float]:
    """Bytes that autograd keeps of a batch, and median seconds of an optimizer step, in which weights change."""
    images, targets = example_input(run.data, samples), example_targets(run.data, samples)
    batch, last = Batch(images, targets, indices_for(images)), run.config.accumulate - 1

    def step() -> float:
        began = time.perf_counter()
        for number in range(last + 1):
            run.step(run.state, run.parts, batch, 1 / (last + 1), samples, number == last)
        if run.device.type == "cuda":
            torch.cuda.synchronize(run.device)
        return time.perf_counter() - began

    with SavedTensors(run.model, [images, targets]) as saved:
        first = step()
    seconds, deadline = list[float](), time.perf_counter() + _BUDGET_S
    while len(seconds) < _WARMUP + _STEPS and time.perf_counter() + first < deadline:
        seconds.append(step())
    return saved.activations, statistics.median(seconds[_WARMUP:] or seconds or [first])


def _weights(run: Run) -> list[Weight]:
    """The sizes of the parameters, of the optimizer state after some steps, and the blocks they are in."""
    blocks, _ = gathered_apart(run.model, run.config.fsdp.blocks)
    units = {id(parameter): name for name, block in blocks for parameter in block.parameters()}
    found = []
    for parameter in run.model.parameters():
        unit, trained = units.get(id(parameter), ""), parameter.requires_grad
        state = tensors_in(dict(run.state.optimizer.state.get(parameter, {})))
        divided = sum(tensor.nbytes for tensor in state if tensor.shape == parameter.shape)
        whole = sum(tensor.nbytes for tensor in state) - divided
        found.append(Weight(tuple(parameter.shape), parameter.element_size(), trained, divided, whole, unit))
    return found


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.4g} ms"
