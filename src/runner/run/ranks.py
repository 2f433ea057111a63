"""A run on several processes: what the first one decides for all, and what is checked to be the same on each."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from runner.base.cores import cores
from runner.base.errors import ConfigError, Problem, UserError
from runner.checkpoint import find
from runner.checkpoint.weights import weights_sha256
from runner.config import stored
from runner.config.rules import needing_one_process
from runner.config.schema.train import Train
from runner.data.module import DataModule
from runner.distributed.batchnorm import synchronize
from runner.distributed.sharding import is_sharded, shard
from runner.distributed.world import World, restarted, started_by_launcher, world
from runner.instrument.no_trace import evaluating
from runner.run.finetune import Modules
from runner.run.run import Hardware, Run
from runner.run.run_directory import Job, RunDirectory
from runner.runtime.blocks import Block, named_blocks, repeated_blocks
from runner.tasks.task import Task

_TRIED = 32  # targets
_COMPARED = (1, 10, 100, 1000)  # steps after which buffers are compared
_WEIGHTS = "different initial weights"


def checkpoint_of_rank(job: Job) -> find.LoadedCheckpoint | None:
    """The checkpoint that a rank resumes from, which it reads itself: after a restart the newest one of the run."""
    saved = restarted() and find.named(job.path / "checkpoints", "last")
    path = job.path if saved else job.checkpoint
    return find.load(str(path), job.path.parent, prefer="last", later=True) if path else None


def count_ranks(config: Train) -> int:
    """How many processes `devices` asks for on this machine.

    Raises `UserError` if there are not so many GPUs, or far fewer cores.
    """
    gpus = torch.cuda.device_count() if config.device in ("auto", "cuda") else 0
    devices = config.devices
    if devices == "auto":
        return max(1, gpus)
    numbers = devices if isinstance(devices, list) else range(devices)
    if not gpus and len(numbers) > (most := max(8, cores())):  # a few can try a layout on any machine
        raise UserError("devices", f"asks for {len(numbers):,} processes on the CPU", f"at most {most}")
    if gpus and len(numbers) > 1 and max(numbers) >= gpus:
        raise UserError(
            "devices", f"asks for device {max(numbers)}, and torch sees {gpus}", f"0 to {gpus - 1}, or device=cpu"
        )
    return len(numbers)


def check_one_process(config: Train) -> None:
    """Check a config once the number of processes is known, which `devices=auto`, torchrun and SLURM decide.

    Raises `ConfigError` if there are several, and the config asks for what needs a single one.
    """
    size = int(os.environ["WORLD_SIZE"]) if started_by_launcher() else count_ranks(config)
    problems = [Problem(*each) for each in needing_one_process(config, f"there are {size} processes")]
    if size > 1 and problems:
        raise ConfigError(problems)


def device_of_rank(config: Train) -> torch.device:
    """The device of this rank."""
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if config.device not in ("auto", "cuda") or not torch.cuda.is_available():
        return torch.device("cpu")
    number = config.devices[local] if isinstance(config.devices, list) else local
    return torch.device("cuda", number % torch.cuda.device_count())


def synchronize_norms(config: Train, model: nn.Module) -> list[str]:
    """Do what `sync_batchnorm` asks for; returns a warning if it has no effect."""
    if not config.sync_batchnorm:
        return []
    if world().size == 1:
        return ["sync_batchnorm=true has no effect: one process trains, and has the whole batch"]
    return [] if synchronize(model) else ["sync_batchnorm=true has no effect: the model has no BatchNorm"]


def uneven_loss(loss: nn.Module, task: Task, data: DataModule) -> list[str]:
    """A warning if the loss of a batch is not the mean of its samples' losses, found out on some targets; or nothing."""
    if not data.pairs:  # a step of its own says what the mean is over
        return []
    # Targets in memory are quick to take; else the examples that were read at the start have to do
    targets = torch.stack([target for _, target in data.examples.values()])
    if "train" in data.targets:
        targets = data.targets["train"][data.parts["train"][1][:_TRIED]]
    targets = task.targets(targets.to(data.device))
    size = (len(targets), task.outputs(data.classes))
    # Any logits will do if they differ from row to row; a sine needs no random numbers
    logits = torch.arange(size[0] * size[1], device=targets.device).view(size).sin()
    with evaluating(loss):
        try:
            each = [float(loss(logits[row : row + 1], targets[row : row + 1])) for row in range(len(logits))]
            whole = float(loss(logits, targets))
        except (RuntimeError, ValueError, TypeError, IndexError):
            return []  # some losses take only larger batches
    # Weighted losses fail this test: they divide by the weights in the batch, not by its size
    if math.isclose(whole, sum(each) / len(each), rel_tol=1e-3, abs_tol=1e-6):
        return []
    return [
        "the loss of a batch is not the mean over its samples: the processes average what each computes of its own rows, "
        "so their number changes the result, as accumulate does"
    ]


def check_same(run: Run, world: World) -> None:
    """Check that all ranks have the same config, data and initial weights.

    Raises `UserError` naming the first rank that differs from rank 0.
    """
    # Differences found here have a message; found later, they would be silent or hang a collective call
    if world.size == 1:
        return
    own = {"a different version of torch": torch.__version__, "different data": repr(run.data.fingerprint())}
    own |= {"a different config": stored.dump(run.config)}
    # The weights of a sharded model were compared before they were divided
    loss = {f"loss/{name}": tensor for name, tensor in run.state.loss.state_dict().items()}
    own |= {_WEIGHTS: weights_sha256(loss | ({} if is_sharded(run.model) else run.model.state_dict()))}
    _require_same(own, world)


def _require_same(own: dict[str, str], world: World) -> None:
    """Check what may differ, causes first: the config has facts that come from the data."""
    for rank, other in enumerate(ranks := world.gather(own)):
        if wrong := [name for name in own if other[name] != ranks[0][name]]:
            problem = f"rank {rank} of {world.size} has {wrong[0]} from rank 0"
            raise UserError("devices", problem, "the same files, packages and environment for every rank")


def gathered_apart(model: nn.Module, patterns: Sequence[str] | None) -> tuple[list[Block], list[str]]:
    """The blocks of `fsdp.blocks` whose weights FSDP gathers one block at a time, and the names of those where it cannot.

    Torch divides a weight once in each unit, so a weight of two units would become two.
    """
    blocks = repeated_blocks(model)
    if patterns is not None:
        blocks = named_blocks(model, patterns, "fsdp.blocks", "null")

    def places(root: nn.Module) -> Counter[nn.Parameter]:
        return Counter(weight for module in root.modules() for weight in module.parameters(recurse=False))

    everywhere = places(model)
    shared = [name for name, block in blocks if any(everywhere[each] > n for each, n in places(block).items())]
    return [(name, block) for name, block in blocks if name not in shared], shared


def shard_model(
    config: Train, model: nn.Module, hardware: Hardware, warnings: list[str]
) -> Mapping[nn.Parameter, nn.Parameter]:
    """Divide the weights of a model among the ranks if `strategy` says so; see `runner.distributed.sharding.shard`.

    Returns the parameters now, by those that they replace. Raises `UserError` if the ranks have different weights, or the
    settings do not fit model, device or number of ranks.
    """
    # DDP keeps the whole model on every rank
    if config.strategy != "fsdp":
        return {}
    if world().size == 1:
        warnings.append("strategy=fsdp has no effect: one process trains, and has the whole model")
        return {}
    settings, ranks = config.fsdp, world()
    # Each rank keeps its part of its own weights, so they have to agree before they are divided
    _require_same({_WEIGHTS: weights_sha256(model.state_dict())}, ranks)
    if isinstance(model, Modules):
        raise UserError("strategy", "is fsdp, and the task adds modules to the model", "strategy=ddp")
    # Settings that torch refuses later, in its own words
    if ranks.size % settings.replicas:
        raise UserError("fsdp.replicas", f"is {settings.replicas}, which does not divide the {ranks.size} processes")
    if hardware.precision.scaler is not None:
        problem = "chose fp16 on this device, whose scaled loss strategy=fsdp does not support"
        raise UserError("amp", problem, "bf16 or false, or strategy=ddp")
    if scalars := [name for name, parameter in model.named_parameters() if not parameter.ndim]:
        problem = f"has weights without dimensions, which strategy=fsdp cannot shard: {', '.join(scalars[:3])}"
        raise UserError("model", problem, "weights of shape (1,), or strategy=ddp")
    # Blocks are gathered apart, so that a rank holds the whole weights of one block at a time
    blocks, shared = gathered_apart(model, settings.blocks)
    if shared:
        warnings.append(
            f"strategy=fsdp gathers {', '.join(shared[:3])}{', ...' if len(shared) > 3 else ''} with the parameters outside "
            "the blocks: they share weights with other modules"
        )
    return shard(model, [module for _, module in blocks], hardware.device, settings)


class RankBuffers:
    """A callback that warns once of buffers that differ between ranks, but for running statistics of normalisation layers."""

    def __init__(self, run: Run, directory: RunDirectory) -> None:
        self._roots, self._warn, self._steps = (run.model, run.loss), directory.console.warn, 0

    def on_step(self, loop: Any) -> None:
        """Compare them."""
        self._steps += 1
        if world().size == 1 or self._steps not in _COMPARED:
            return
        own = {
            f"{name}.{part}".strip("."): weights_sha256({part: buffer})
            for root in self._roots
            for name, module in root.named_modules()
            if not isinstance(module, _NormBase)
            for part, buffer in module.named_buffers(recurse=False)
        }
        others = world().gather(own)
        if differing := [name for name in own if any(each.get(name) != own[name] for each in others)]:
            self._steps = max(_COMPARED)
            which = f"buffers differ between processes, and only the first one's are kept: {', '.join(differing)}"
            self._warn(f"{which}; a state of each sample, or a queue, needs devices=1")
