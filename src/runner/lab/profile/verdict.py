"""One sentence: what a step spends most of its time on, and which key to try first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from runner.base.cores import cores
from runner.config.schema.verbs import Profile
from runner.instrument.profiler_ranges import BACKWARD, FORWARD, OPTIMIZER, PREPARE, WAIT
from runner.lab.profile.ops import SMALL_OP_MS
from runner.run.run import Run
from runner.runtime.peak_flops import kind_of
from runner.runtime.precision import has_matrix_units
from runner.runtime.stopwatch import OTHER
from runner.tracking.formats import percent

_MUCH = 0.2  # share of a step that is worth doing something about, beside computing
_LAUNCHES = 0.6  # share of a step below which a GPU that computes waits for its next kernel
_LITTLE = 0.05  # share of the peak below which more work at a time helps before anything else
_SMALL = 0.5  # share of the operations' time from which their calls are what takes it


@dataclass(frozen=True)
class StepProfile:
    """The measurements and settings that the sentence depends on."""

    shares: Mapping[str, float]  # share of a step by range
    busy: float | None  # share of a step in which the GPU computes; None without one
    small_ops: float | None  # share of host operations' time that goes into very short ones; None without a trace
    utilization: float | None  # share of the peak; None if not known
    device: str  # `GPU` or `cpu`
    batch_size: int  # samples of a batch
    accumulate: int  # batches of a step
    workers: int | None  # worker processes that read samples; None if images are in memory
    cores: int  # CPU cores there are
    in_memory_possible: bool  # whether the images could be, or are, held in memory
    on_device: bool  # whether they are there already
    off: Sequence[str]  # the keys for speed that are off and could help, in the order in which to try them


def verdict(step: StepProfile) -> str:
    """The part of a step that takes the time, how much of it, and what to try."""
    wait, prepare, optimizer, other, forward, backward = (
        step.shares.get(name, 0.0) for name in (WAIT, PREPARE, OPTIMIZER, OTHER, FORWARD, BACKWARD)
    )
    larger_batch = f"try data.batch_size={4 * step.batch_size} (now {step.batch_size})"
    # A part counts as large only beside forward and backward, which are the work itself
    much = max(_MUCH, (forward + backward) / 2)
    # The input comes first: whatever else is made faster, a step does not end before its data is there.
    if wait >= _MUCH and wait >= prepare:
        return f"Waiting for data takes {percent(wait)} of a step: {_for_waiting(step)}."
    if prepare >= _MUCH:
        return f"Copying and augmenting takes {percent(prepare)} of a step: {_for_preparing(step)}."
    if optimizer >= much:
        return f"The optimizer takes {percent(optimizer)} of a step: try accumulate={2 * step.accumulate}, or {larger_batch}."
    if other >= much:
        return (
            f"Callbacks and the loop around them take {percent(other)} of a step: {larger_batch}, or remove callbacks."
        )
    # Many small kernels leave the GPU waiting for launches
    if step.busy is not None and step.busy < _LAUNCHES:
        fix = f"try compile=true, or {larger_batch}" if "compile" in step.off else larger_batch
        return (
            f"The GPU computes in only {percent(step.busy)} of a step and waits for its next kernel in the rest: {fix}."
        )
    # The same on the CPU: the cost of a call is larger than its work
    if step.device == "cpu" and step.small_ops is not None and step.small_ops >= _SMALL:
        what = f"Operations of less than {SMALL_OP_MS} ms take {percent(step.small_ops)} of the computing"
        return f"{what}, so calling them costs more than computing them: {larger_batch}."
    # The rest is computing: a device that is hardly used wants larger batches, a busy one faster arithmetic
    used, fix = "", f"try {step.off[0]}=true" if step.off else ""
    if step.utilization is not None:
        used = f", at {percent(step.utilization)} of what the {step.device} can compute"
        fix = larger_batch if step.utilization < _LITTLE else fix
    name, share = max((FORWARD, forward), (BACKWARD, backward), key=lambda part: part[1])
    fix = fix or "the keys for speed are on, so try a smaller model or smaller images"
    return f"{name.capitalize()} takes most of a step ({percent(share)}{used}): {fix}."


def _for_waiting(step: StepProfile) -> str:
    if step.workers is None:
        return "the data set returns its samples slowly"
    if step.in_memory_possible:
        return "try data.placement=auto, which keeps the images in memory"
    if step.workers < step.cores:
        return f"try data.num_workers={step.cores} (now {step.workers})"
    return f"all {step.cores} CPU cores read already, so try data.cache=disk, or a smaller data.image_size"


def _for_preparing(step: StepProfile) -> str:
    if step.device != "cpu" and step.in_memory_possible and not step.on_device:
        return "try data.placement=device"
    return "try fewer transforms in transform.train, or transform=none to see what they cost"


def step_profile(
    config: Profile,
    training: Run,
    *,
    shares: Mapping[str, float],
    busy: float | None,
    small_ops: float | None,
    utilization: float | None,
) -> StepProfile:
    """Add the settings of a run to what was measured."""
    device, loader = training.device, training.data.train.loader
    convolutions = any(isinstance(module, torch.nn.modules.conv._ConvNd) for module in training.model.modules())
    could_help = {
        "amp": config.amp is False and has_matrix_units(device),
        "tf32": device.type == "cuda" and kind_of(None, device) != "tf32" and not config.deterministic,
        "channels_last": convolutions and not config.channels_last,
        "compile": device.type == "cuda" and not config.compile,
    }
    return StepProfile(
        shares=shares,
        busy=busy,
        small_ops=small_ops,
        utilization=utilization,
        device="GPU" if device.type != "cpu" else "cpu",
        batch_size=config.data.samples_a_batch,
        accumulate=config.accumulate,
        workers=loader.workers,
        cores=cores(),
        in_memory_possible=loader.could_be_resident or loader.resident is not None,
        on_device=loader.resident == device,
        off=[key for key, helps in could_help.items() if helps],
    )
