"""One sentence: what a step spends most of its time on, and which key to try first."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from runner.instrument.profiler_ranges import BACKWARD, FORWARD, OPTIMIZER, PREPARE, WAIT
from runner.runtime.peak_flops import kind_of
from runner.runtime.precision import has_matrix_units
from runner.runtime.stopwatch import OTHER
from runner.tracking.formats import percent
from runner.verbs.profile.ops import SMALL_OP_MS

if TYPE_CHECKING:
    from runner.build.run import Run
    from runner.config.schema.profile import Profile

_MUCH = 0.2  # share of a step that is worth doing something about, beside computing
_LAUNCHES = 0.6  # share of a step below which a GPU that computes waits for its next kernel
_LITTLE = 0.05  # share of the peak below which more work at a time helps before anything else
_SMALL = 0.5  # share of the operations' time from which their calls are what takes it


@dataclass(frozen=True)
class Facts:
    """What the sentence depends on.

    Attributes:
        shares: share of a step by range.
        device: its type.
        busy: share of a step in which the GPU computes; None without one.
        small_ops: share of the operations' time on the host that goes into very short ones; None without a trace.
        utilization: share of the peak; None if not known.
        batch_size: samples of a batch.
        workers: worker processes that read samples; None if images are in memory.
        cores: CPU cores there are.
        cached: whether decoded images are kept, or could not be.
        in_memory_possible: whether the images could be, or are, held in memory.
        on_device: whether they are there already.
        amp: whether mixed precision is on, or would be no faster.
        tf32: likewise; True where there is no such thing.
        channels_last: likewise; True where no layer is a convolution.
        compiled: likewise; True where it would need a compiler that is not there.
        fused: whether the optimizer is fused, or cannot be.
        accumulate: batches of a step.
    """

    shares: Mapping[str, float]
    device: str
    busy: float | None
    small_ops: float | None
    utilization: float | None
    batch_size: int
    workers: int | None
    cores: int
    cached: bool
    in_memory_possible: bool
    on_device: bool
    amp: bool
    tf32: bool
    channels_last: bool
    compiled: bool
    fused: bool
    accumulate: int


def verdict(facts: Facts) -> str:
    """What takes the time, how much of it, and what to try."""
    shares = facts.shares
    waiting, preparing = shares.get(WAIT, 0.0), shares.get(PREPARE, 0.0)
    computing = shares.get(FORWARD, 0.0) + shares.get(BACKWARD, 0.0)
    if waiting >= _MUCH and waiting >= preparing:
        return f"Waiting for data takes {percent(waiting)} of a step: {_for_waiting(facts)}."
    if preparing >= _MUCH:
        return f"Copying and augmenting takes {percent(preparing)} of a step: {_for_preparing(facts)}."
    if shares.get(OPTIMIZER, 0.0) >= max(_MUCH, computing / 2):
        return f"The optimizer takes {percent(shares[OPTIMIZER])} of a step: {_for_optimizer(facts)}."
    if shares.get(OTHER, 0.0) >= max(_MUCH, computing / 2):
        share = percent(shares[OTHER])
        return (
            f"Callbacks and the loop around them take {share} of a step: {_larger_batch(facts)}, or remove callbacks."
        )
    if facts.busy is not None and facts.busy < _LAUNCHES:
        fix = _larger_batch(facts) if facts.compiled else f"try compile=true, or {_larger_batch(facts)}"
        return f"The GPU computes in only {percent(facts.busy)} of a step and waits for its next kernel in the rest: {fix}."
    if facts.device == "cpu" and facts.small_ops is not None and facts.small_ops >= _SMALL:
        what = f"Operations of less than {SMALL_OP_MS} ms take {percent(facts.small_ops)} of the computing"
        return f"{what}, so calling them costs more than what they do: {_larger_batch(facts)}."
    most = max((FORWARD, BACKWARD), key=lambda name: shares.get(name, 0.0))
    used = (
        "" if facts.utilization is None else f", at {percent(facts.utilization)} of what the {facts.device} can compute"
    )
    return (
        f"{most.capitalize()} takes most of a step ({percent(shares.get(most, 0.0))}{used}): {_for_computing(facts)}."
    )


def _for_waiting(facts: Facts) -> str:
    if facts.workers is None:
        return "the data set gives its samples slowly"
    if facts.in_memory_possible:
        return "try data.placement=auto, which keeps the images in memory"
    if facts.workers < facts.cores:
        return f"try data.num_workers={facts.cores} (now {facts.workers})"
    cores = f"all {facts.cores} CPU cores read already, so try"
    return f"{cores} {'a smaller data.image_size' if facts.cached else 'data.cache=disk'}"


def _for_preparing(facts: Facts) -> str:
    if facts.device != "cpu" and facts.in_memory_possible and not facts.on_device:
        return "try data.placement=device"
    if facts.workers is not None and facts.device != "cpu":
        return "try data.pin_memory=true with data.non_blocking=true, or fewer transforms in transform.train"
    return "try fewer transforms in transform.train, or transform=none to see what they cost"


def _for_optimizer(facts: Facts) -> str:
    if not facts.fused:
        return "try optimizer.fused=true"
    return f"try accumulate={2 * facts.accumulate}, or {_larger_batch(facts)}"


def _larger_batch(facts: Facts) -> str:
    return f"try data.batch_size={4 * facts.batch_size} (now {facts.batch_size})"


def _for_computing(facts: Facts) -> str:
    if facts.utilization is not None and facts.utilization < _LITTLE:
        return _larger_batch(facts)
    if not facts.amp:
        key = "amp=true"
    elif not facts.tf32:
        key = "tf32=true"
    elif not facts.channels_last:
        key = "channels_last=true"
    elif not facts.compiled:
        key = "compile=true"
    else:
        return "the keys for speed are on, so try a smaller model or smaller images"
    return f"try {key}"


def facts_of(
    config: Profile,
    training: Run,
    shares: Mapping[str, float],
    busy: float | None,
    small_ops: float | None,
    utilization: float | None,
    cores: int,
) -> Facts:
    """Gather what the sentence depends on."""
    device, loader = training.device, training.data.train.loader
    convolutions = any(isinstance(module, torch.nn.modules.conv._ConvNd) for module in training.model.modules())
    takes_fused = "fused" in inspect.signature(type(training.state.optimizer)).parameters
    return Facts(
        shares=shares,
        device="GPU" if device.type != "cpu" else "cpu",
        busy=busy,
        small_ops=small_ops,
        utilization=utilization,
        batch_size=config.data.samples_a_batch,
        workers=loader.workers,
        cores=cores,
        cached=config.data.cache is not None,
        in_memory_possible=loader.could_be_resident or loader.resident is not None,
        on_device=loader.resident == device,
        amp=config.amp is not False or not has_matrix_units(device),
        tf32=kind_of(None, device) == "tf32" or device.type != "cuda" or bool(config.deterministic),
        channels_last=config.channels_last or not convolutions,
        compiled=bool(config.compile) or device.type != "cuda",
        fused=not takes_fused
        or bool(training.kernels.arguments.get("fused"))
        or config.optimizer.get("fused") is not None,
        accumulate=config.accumulate,
    )
