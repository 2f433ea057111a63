"""The record for `profile.json`, and what is shown of it."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch

from runner.build.run import Run, training_flops
from runner.config.cores import cores
from runner.config.schema.verbs import Profile
from runner.instrument.flops import Flops
from runner.instrument.profiler_ranges import BACKWARD, FORWARD, OPTIMIZER, PREPARE, WAIT
from runner.runtime.peak_flops import PeakFlops, kind_of, peak
from runner.runtime.stopwatch import OTHER
from runner.tracking.console import Console
from runner.tracking.formats import compact, percent
from runner.verbs.profile.measure import Measured
from runner.verbs.profile.ops import Op, shown, small_share
from runner.verbs.profile.verdict import facts_of, verdict

_MIB = 2**20
_PARTS = (WAIT, PREPARE, FORWARD, BACKWARD, OPTIMIZER, OTHER)


def record_of(config: Profile, training: Run, measured: Measured, ops: list[Op]) -> dict[str, Any]:
    """Everything that was found, as plain containers."""
    device = training.device
    seconds = measured.seconds
    mean = statistics.fmean(seconds)
    rate = measured.samples / sum(seconds)
    split = _split(measured, mean)
    busy = None
    if measured.traced and any(op.kernel for op in ops):
        busy = min(1.0, sum(op.self_ms for op in ops if op.kernel) / 1000 / mean)
    flops, reason = _flops(training)
    ceiling = peak(device, kind_of(training.precision.dtype, device))
    utilization = None if flops is None else rate * flops.of_sample / ceiling.flops
    shares = {name: part["share"] for name, part in split.items()}
    facts = facts_of(config, training, shares, busy, small_share(ops), utilization, cores())
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
        "compute": _compute(flops, reason, ceiling, utilization),
        "memory": _memory(training, measured),
        "bottleneck": verdict(facts),
    }


def _split(measured: Measured, mean: float) -> dict[str, dict[str, float]]:
    count = len(measured.steps)
    found = {}
    for name in _PARTS:
        part = sum(step.seconds.get(name, 0.0) for step in measured.steps) / count
        host = sum(step.host.get(name, 0.0) for step in measured.steps) / count
        found[name] = {"ms": part * 1000, "share": part / mean, "host_ms": host * 1000}
    return found


def _flops(training: Run) -> tuple[Flops | None, str]:
    try:
        return training_flops(training, training.state.position), ""
    except RuntimeError as error:
        return None, str(error).strip().splitlines()[0]


def _compute(flops: Flops | None, reason: str, ceiling: PeakFlops, utilization: float | None) -> dict[str, Any]:
    found: dict[str, Any] = {
        "ceiling_flops_per_s": ceiling.flops,
        "ceiling_source": ceiling.source,
        "ceiling_measured": ceiling.measured,
        "utilization": utilization,
    }
    if flops is None:
        return found | {"flops_of_sample": None, "not_counted": reason}
    return found | {
        "flops_of_sample": flops.of_sample,
        "forward_flops_of_sample": flops.forward / flops.samples,
        "recomputed_flops_of_sample": flops.recomputed / flops.samples,
        "forward_flops_by_module": {name: count / flops.samples for name, count in flops.by_module.items()},
    }


def _memory(training: Run, measured: Measured) -> dict[str, Any]:
    model, saved = training.model, measured.saved
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    state = [
        value
        for values in training.state.optimizer.state.values()
        for value in values.values()
        if isinstance(value, torch.Tensor)
    ]
    return {
        "weights_bytes": sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())),
        "gradients_bytes": sum(tensor.nbytes for tensor in parameters),
        "optimizer_bytes": sum(tensor.nbytes for tensor in state),
        "saved_bytes": None if saved is None else saved.activations,
        "saved_inputs_bytes": None if saved is None else saved.inputs,
        "saved_by_module": None if saved is None else saved.by_module,
        "peak_bytes": measured.peak.bytes,
        "peak_is": measured.peak.what,
    }


def show(console: Console, record: dict[str, Any], ops: list[Op], written: list[Path]) -> None:
    """The report on the terminal, up to the sentence about the bottleneck."""
    timed, step = record["steps"]["timing"] - len(record["unusual_steps_ms"]), record["step_ms"]
    for phase in record["cut_short"]:
        console.line(f"{phase} ended after {record['steps'][phase]} steps, as budget_s is used up")
    if unusual := record["unusual_steps_ms"]:
        console.line(
            f"skipped: {len(unusual)} of {record['steps']['timing']} steps, which took up to {max(unusual):,.0f} ms "
            "(compiling or tuning for a batch of another size, or another program on this machine)"
        )
    columns = ["part of a step", "ms", "share"]
    rows = [[name, f"{part['ms']:.3f}", percent(part["share"])] for name, part in record["split"].items()]
    rows.append(["whole", f"{step['mean']:.3f}", ""])
    if record["device_busy"] is not None:
        columns.append("host ms")
        hosts = [part["host_ms"] for part in record["split"].values()]
        rows = [[*row, f"{host:.3f}"] for row, host in zip(rows, [*hosts, sum(hosts)], strict=True)]
    console.table(f"mean of {timed} steps, median {step['median']:.3f} ms", columns, rows)
    if ops:
        console.table(*shown(ops))
    memory = record["memory"]
    parts = [("weights", "weights_bytes"), ("gradients", "gradients_bytes"), ("optimizer", "optimizer_bytes")]
    rows = [[name, f"{memory[key] / _MIB:.2f}", ""] for name, key in parts]
    if memory["saved_bytes"] is not None:
        largest = sorted(memory["saved_by_module"].items(), key=lambda item: -item[1])[:3]
        names = ", ".join(f"{name or 'the model itself'} {count / _MIB:.2f}" for name, count in largest)
        rows.append(["saved for backward", f"{memory['saved_bytes'] / _MIB:.2f}", names])
    rows.append(["peak", f"{memory['peak_bytes'] / _MIB:.2f}", memory["peak_is"]])
    console.table("memory", ["what", "MiB", ""], rows)
    compute = record["compute"]
    console.line(f"{compact(record['samples_per_s'])} samples/s")
    if compute["utilization"] is None:
        console.line(f"operations were not counted: {compute['not_counted']}")
    else:
        reached = record["samples_per_s"] * compute["flops_of_sample"]
        console.line(
            f"{compact(compute['flops_of_sample'])} FLOP a sample, {compact(reached)} FLOP/s: "
            f"{percent(compute['utilization'])} of {compact(compute['ceiling_flops_per_s'])} ({compute['ceiling_source']})"
        )
    console.line(f"written: {', '.join(path.name for path in written)}")
    console.line(record["bottleneck"])
