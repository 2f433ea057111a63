"""What a layout of ranks would cost: `runner.distributed.layout` applied to a step that is measured on this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from runner.base.errors import UserError
from runner.config.frozen import with_changes
from runner.config.schema.train import Train
from runner.distributed import layout
from runner.distributed.layout import Memory, Traffic, Weight
from runner.instrument.nested import tensors_in
from runner.instrument.saved_tensors import SavedTensors
from runner.run.finetune import explaining
from runner.run.model import example_batch
from runner.run.ranks import gathered_apart
from runner.run.run import Run
from runner.run.validate import validate_limits
from runner.runtime.memory import readable
from runner.tracking.console import Console

_ALONE = {"devices": 1, "strategy": "auto", "compile": False, "sync_batchnorm": False}  # how the step is measured


@dataclass(frozen=True)
class Layout:
    """What a rank is predicted to hold and send."""

    ranks: int
    strategy: str  # single, ddp or fsdp
    batch: int  # samples of a batch of all ranks
    samples: tuple[int, int]  # of a batch, that a rank gets at least and at most
    memory: Memory
    traffic: Traffic
    warnings: list[str]


# Names of parts of memory in the table, and where the numbers are from.
_ROWS = {
    "optimizer": ("optimizer state", "measured after a step"),
    "activations": ("activations", "measured: kept for backward, with copies of weights made by amp"),
    "average": ("average of the weights", ""),
    "gathered": ("gathered blocks", "the largest one with its gradients, and parameters outside of blocks"),
}


def dry_run(config: Train, build: Callable[[Train], Run], console: Console) -> None:
    """Print what the layout of `config` would cost; nothing is trained and nothing is written.

    Raises:
        UserError: if the config cannot be run.
    """
    found = predict(config, build)
    for warning in found.warnings:
        console.warn(warning)
    (least, most), sizes, sent = found.samples, vars(found.memory), vars(found.traffic)
    held = [(*_ROWS.get(name, (name, "")), readable(size)) for name, size in sizes.items() if size]
    kinds = [f"{name.replace('_', '-')} {readable(size)}" for name, size in sent.items() if size]
    rows = [
        ["samples", f"{least:,} to {most:,}", f"of each batch of {found.batch:,}"],
        *([name, size, reason] for name, reason, size in held),
        ["total", readable(found.memory.total), "without memory reserved by libraries"],
        ["sent per step", readable(found.traffic.total), ", ".join(kinds)],
    ]
    title = f"{config.name} on {found.ranks} rank{'s' * (found.ranks > 1)}, strategy {found.strategy}: a dry run"
    console.table(title, ["per rank", "predicted", "from"], rows)


def predict(config: Train, build: Callable[[Train], Run]) -> Layout:
    """The layout that `devices` and `strategy` ask for, from a step of a single process; see `dry_run`."""
    ranks, strategy = _asked(config)
    # A layout of GPUs may be predicted on a machine without any
    here = config.device if config.device in ("auto", "cpu") or torch.cuda.is_available() else "cpu"
    run = build(with_changes(config, _ALONE | {"device": here}))
    with contextlib.closing(run.data), run.state.freezing.as_at(None):  # training everything takes the most
        # The rank with the most samples needs the most memory, so its share is the one to measure
        batch = run.plan.size(0)
        samples = layout.samples_of_ranks(batch, ranks)
        # A rank without samples computes with one
        samples = samples[0], max(1 + config.sync_batchnorm, samples[1])
        problem = f"{batch} is {samples[1]} for each of {ranks} ranks, and a step with these fails: "
        with explaining("data.batch_size", problem, "a larger data.batch_size, or fewer devices"):
            activations = _activations(run, samples[1])
        weights = _weights(run)
    buffers = sum(buffer.nbytes for buffer in run.model.buffers())
    held: dict[str, Any] = {"buffers": buffers, "averaged": run.state.averaged is not None, "activations": activations}
    warnings = [*run.warnings, *validate_limits(run)]
    # What one process cannot show is said, so that nobody takes the numbers for a promise
    for said, warning in (
        (config.compile, "compile has no effect on the measured step, and may make real ones smaller"),
        (config.sync_batchnorm, "sync_batchnorm=true has no effect on the measured step, but sends more data"),
        (config.devices == "auto", f"devices=auto is {ranks} on this machine; set a number to predict for others"),
        (samples[0] == 0, f"data.batch_size={batch} is smaller than {ranks} ranks, so some ranks are idle"),
    ):
        warnings += [warning] if said else []
    memory, traffic = layout.ddp_memory(weights, **held), layout.ddp_traffic(weights, ranks, buffers=buffers)
    # FSDP divides weights within a replica, so the number of replicas decides what a rank holds
    if strategy == "fsdp":
        replicas = config.fsdp.replicas
        how: dict[str, Any] = {"reshard": config.fsdp.reshard_after_forward, "batches": config.accumulate}
        if ranks % replicas:
            allowed = f"a divisor of {ranks}, the number of processes"
            raise UserError("fsdp.replicas", f"is {replicas}, which does not divide the processes", allowed)
        memory = layout.fsdp_memory(weights, ranks // replicas, **how, **held)
        traffic = layout.fsdp_traffic(weights, ranks // replicas, **how, replicas=replicas)
    return Layout(ranks, strategy, batch, samples=samples, memory=memory, traffic=traffic, warnings=warnings)


def _asked(config: Train) -> tuple[int, str]:
    """How many ranks there would be, on any number of machines, and their strategy."""
    if config.devices == "auto":
        ranks = max(1, torch.cuda.device_count())
    else:
        ranks = max(1, len(config.devices)) if isinstance(config.devices, list) else config.devices
    if config.strategy == "auto":
        return ranks, "ddp" if ranks > 1 else "single"
    return (1 if config.strategy == "single" else ranks), config.strategy


def _activations(run: Run, samples: int) -> int:
    """Bytes that autograd keeps of a batch, in an optimizer step, which also makes the optimizer's state."""
    batch, last = example_batch(run.data, samples), run.config.accumulate - 1
    with SavedTensors(run.model, tensors_in(batch.data)) as saved:
        for number in range(last + 1):
            run.step(run.state, run.parts, batch, 1 / (last + 1), samples, update=number == last)
    return saved.activations


def _weights(run: Run) -> list[Weight]:
    """The sizes of the parameters, of the optimizer state after a step, and the blocks they are in."""
    # FSDP gathers a block at a time, so each weight is counted with its block
    blocks, _ = gathered_apart(run.model, run.config.fsdp.blocks)
    units = {id(parameter): name for name, block in blocks for parameter in block.parameters()}
    found = []
    for parameter in run.model.parameters():
        unit, trained = units.get(id(parameter), ""), parameter.requires_grad
        # State of a weight's shape is divided with the weight; step counters are whole on every rank
        state = tensors_in(dict(run.state.optimizer.state.get(parameter, {})))
        divided = sum(tensor.nbytes for tensor in state if tensor.shape == parameter.shape)
        whole = sum(tensor.nbytes for tensor in state) - divided
        found.append(
            Weight(tuple(parameter.shape), parameter.element_size(), trained, divided=divided, whole=whole, unit=unit)
        )
    return found
