"""The record for `profile.json`, and what is shown of it."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch

from runner.base.errors import first_line
from runner.config.schema.verbs import Profile
from runner.instrument.nested import tensors_in
from runner.instrument.profiler_ranges import BACKWARD, FORWARD, OPTIMIZER, PREPARE, WAIT
from runner.lab.profile.measure import Measured
from runner.lab.profile.ops import Op, small_share, table_of
from runner.lab.profile.verdict import step_profile, verdict
from runner.run.run import Run, training_flops
from runner.runtime.peak_flops import kind_of, peak
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
    step = step_profile(
        config,
        training,
        shares={name: part["share"] for name, part in split.items()},
        busy=busy,
        small_ops=small_share(ops),
        utilization=compute["utilization"],
    )
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
    # The ceiling is measured where no data sheet tells it
    ceiling = peak(training.device, kind_of(training.precision.dtype, training.device))
    found: dict[str, Any] = {
        "ceiling_flops_per_s": ceiling.flops,
        "ceiling_source": ceiling.source,
        "ceiling_measured": ceiling.measured,
    }
    # Some operations have no known formula, and the profile is useful without them
    try:
        flops = training_flops(training, training.state.position)
    except RuntimeError as error:
        return found | {"utilization": None, "flops_of_sample": None, "not_counted": first_line(error)}
    return found | {
        "utilization": rate * flops.of_sample / ceiling.flops,
        "flops_of_sample": flops.of_sample,
        "forward_flops_of_sample": flops.forward / flops.samples,
        "recomputed_flops_of_sample": flops.recomputed / flops.samples,
        "forward_flops_by_module": {name: count / flops.samples for name, count in flops.by_module.items()},
    }


def _memory(training: Run, measured: Measured) -> dict[str, Any]:
    model, saved = training.model, measured.saved
    return {
        "weights_bytes": sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())),
        "gradients_bytes": sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad),
        "optimizer_bytes": sum(tensor.nbytes for tensor in tensors_in([*training.state.optimizer.state.values()])),
        "saved_bytes": None if saved is None else saved.activations,
        "saved_inputs_bytes": None if saved is None else saved.inputs,
        "saved_by_module": None if saved is None else saved.by_module,
        "peak_bytes": measured.peak.bytes,
        "peak_is": measured.peak.what,
    }


def show(report: Report, record: dict[str, Any], ops: list[Op], written: list[Path]) -> None:
    """The report on the terminal, up to the sentence about the bottleneck."""
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
    if compute["utilization"] is None:
        report.line(f"operations were not counted: {compute['not_counted']}")
    else:
        reached = record["samples_per_s"] * compute["flops_of_sample"]
        report.line(
            f"{compact(compute['flops_of_sample'])} FLOP a sample, {compact(reached)} FLOP/s: "
            f"{percent(compute['utilization'])} of {compact(compute['ceiling_flops_per_s'])} ({compute['ceiling_source']})"
        )
    report.lines(f"written: {', '.join(path.name for path in written)}", record["bottleneck"])


def _memory_rows(memory: dict[str, Any]) -> list[list[str]]:
    rows = [[name, mib(memory[f"{name}_bytes"]), ""] for name in ("weights", "gradients", "optimizer")]
    if memory["saved_bytes"] is not None:
        largest = sorted(memory["saved_by_module"].items(), key=lambda item: -item[1])[:3]
        names = ", ".join(f"{name or 'the model itself'} {mib(count)}" for name, count in largest)
        rows.append(["saved for backward", mib(memory["saved_bytes"]), names])
    return [*rows, ["peak", mib(memory["peak_bytes"]), memory["peak_is"]]]
