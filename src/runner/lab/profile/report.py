"""The record for `profile.json`, and what is shown of it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from runner.base.cores import cores
from runner.base.errors import first_line
from runner.config.schema.verbs import Profile
from runner.instrument.nested import tensors_in
from runner.instrument.profiler_ranges import BACKWARD, FORWARD, OPTIMIZER, PREPARE, WAIT
from runner.lab.profile.measure import SMALL_OP_MS, Measured, Op, small_share, table_of
from runner.run.run import Run, training_flops
from runner.runtime.peak_flops import kind_of, peak
from runner.runtime.precision import has_matrix_units
from runner.runtime.stopwatch import OTHER
from runner.tracking.formats import compact, percent
from runner.tracking.verb_report import Report, mib

_MOST_OPS = 8
_PARTS = (WAIT, PREPARE, FORWARD, BACKWARD, OPTIMIZER, OTHER)


def record_of(config: Profile, training: Run, measured: Measured, ops: list[Op]) -> dict[str, Any]:
    """Everything that was found, as plain containers."""
    device, seconds = training.device, measured.seconds
    mean = statistics.fmean(seconds)
    rate = measured.samples / sum(seconds)
    split = _split(measured, mean)
    # A GPU that has no kernel to run waits for the host
    kernels = [op.self_ms for op in ops if op.kernel]
    busy = min(1.0, sum(kernels) / 1000 / mean) if kernels else None
    compute = _compute(training, rate)
    measures = {"busy": busy, "small_ops": small_share(ops), "utilization": compute["utilization"]}
    step = step_profile(config, training, shares={name: part["share"] for name, part in split.items()}, **measures)
    return {
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "precision": training.precision.name,
        "batch_size": config.data.batch_size,
        "accumulate": config.accumulate,
        "steps": measured.counts,
        "cut_short": measured.cut,
        "unusual_steps_ms": [taken * 1000 for taken in measured.unusual],
        "step_ms": {
            "mean": mean * 1000,
            "median": statistics.median(seconds) * 1000,
            "min": min(seconds) * 1000,
            "max": max(seconds) * 1000,
        },
        "samples_per_s": rate,
        "split": split,
        "device_busy": busy,
        "compute": compute,
        "memory": _memory(training, measured),
        "bottleneck": verdict(step),
    }


def _split(measured: Measured, mean: float) -> dict[str, dict[str, float]]:
    count = len(measured.steps)
    found = {}
    for name in _PARTS:
        part = sum(step.seconds.get(name, 0.0) for step in measured.steps) / count
        host = sum(step.host.get(name, 0.0) for step in measured.steps) / count
        found[name] = {"ms": part * 1000, "share": part / mean, "host_ms": host * 1000}
    return found


def _compute(training: Run, rate: float) -> dict[str, Any]:
    """Operations of a sample, and what share of the device's peak so many samples a second use."""
    ceiling = peak(training.device, kind_of(training.precision.dtype, training.device))
    found: dict[str, Any] = {
        "ceiling_flops_per_s": None if ceiling is None else ceiling.flops,
        "ceiling_source": "no peak of this device is listed" if ceiling is None else ceiling.source,
    }
    # Some operations have no known formula, and the profile is useful without them
    try:
        flops = training_flops(training, training.state.position)
    except RuntimeError as error:
        return found | {"utilization": None, "flops_of_sample": None, "not_counted": first_line(error)}
    return found | {
        "utilization": None if ceiling is None else rate * flops.of_sample / ceiling.flops,
        "flops_of_sample": flops.of_sample,
        "forward_flops_of_sample": flops.forward / flops.samples,
        "recomputed_flops_of_sample": flops.recomputed / flops.samples,
        "forward_flops_by_module": {name: count / flops.samples for name, count in flops.by_module.items()},
    }


def _memory(training: Run, measured: Measured) -> dict[str, Any]:
    model = training.model
    return {
        "weights_bytes": sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())),
        "gradients_bytes": sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad),
        "optimizer_bytes": sum(tensor.nbytes for tensor in tensors_in([*training.state.optimizer.state.values()])),
        "peak_bytes": measured.peak.bytes,
        "peak_is": measured.peak.what,
    }


def show(report: Report, record: dict[str, Any], ops: list[Op], written: list[Path]) -> None:
    """The report on the terminal, but for the sentence about the bottleneck, which comes after it."""
    counts, unusual, step, compute = record["steps"], record["unusual_steps_ms"], record["step_ms"], record["compute"]
    report.lines(
        *(f"{phase} ended after {counts[phase]} steps, because budget_s is used up" for phase in record["cut_short"])
    )
    # Unusual steps would shift the mean, so they are reported and not counted
    if unusual:
        report.line(
            f"skipped: {len(unusual)} of {counts['timing']} steps, which took up to {max(unusual):,.0f} ms "
            "(compiling or tuning for a batch of another size, or another program on this machine)"
        )
    columns = ["part of a step", "ms", "share"]
    rows = [[name, f"{part['ms']:.3f}", percent(part["share"])] for name, part in record["split"].items()]
    rows.append(["whole", f"{step['mean']:.3f}", ""])
    # On a GPU, the host runs ahead, so its times say something else
    if record["device_busy"] is not None:
        columns.append("host ms")
        hosts = [part["host_ms"] for part in record["split"].values()]
        rows = [[*row, f"{host:.3f}"] for row, host in zip(rows, [*hosts, sum(hosts)], strict=True)]
    title = f"mean of {counts['timing'] - len(unusual)} steps, median {step['median']:.3f} ms"
    report.table(title, columns, rows)
    if ops:
        kernels = [op for op in ops if op.kernel]
        columns, rows = table_of(kernels or ops)
        report.table(f"{'kernels' if kernels else 'operations'} that take the most time", columns, rows[:_MOST_OPS])
    report.table("memory", ["what", "MiB", ""], _memory_rows(record["memory"]))
    report.line(f"{compact(record['samples_per_s'])} samples/s")
    if compute["flops_of_sample"] is None:
        report.line(f"operations were not counted: {compute['not_counted']}")
    else:
        reached = record["samples_per_s"] * compute["flops_of_sample"]
        share = compute["ceiling_source"]
        if compute["utilization"] is not None:
            share = f"{percent(compute['utilization'])} of {compact(compute['ceiling_flops_per_s'])} ({share})"
        report.line(f"{compact(compute['flops_of_sample'])} FLOP a sample, {compact(reached)} FLOP/s: {share}")
    report.lines(f"written: {', '.join(path.name for path in written)}")


def _memory_rows(memory: dict[str, Any]) -> list[list[str]]:
    rows = [[name, mib(memory[f"{name}_bytes"]), ""] for name in ("weights", "gradients", "optimizer")]
    return [*rows, ["peak", mib(memory["peak_bytes"]), memory["peak_is"]]]


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


def step_profile(config: Profile, training: Run, **measured: Any) -> StepProfile:
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
        **measured,
        device="GPU" if device.type != "cpu" else "cpu",
        batch_size=config.data.samples_a_batch,
        accumulate=config.accumulate,
        workers=loader.workers,
        cores=cores(),
        in_memory_possible=loader.could_be_resident or loader.resident is not None,
        on_device=loader.resident == device,
        off=[key for key, helps in could_help.items() if helps],
    )
