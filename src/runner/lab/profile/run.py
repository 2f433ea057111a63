"""One call of `profile`, from the config to the last line."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from runner.base.errors import DiskFull
from runner.base.files import write_atomically, write_json
from runner.base.secrets import mask_words
from runner.config import stored
from runner.config.composition import Composition
from runner.config.schema.verbs import Profile
from runner.lab.profile.measure import Measurement, measure
from runner.run.describe import describe
from runner.run.from_checkpoint import config_and_checkpoint, output_folder
from runner.run.run import Run
from runner.runtime.core_wait import core_wait, waited_for_core
from runner.tracking.environment import environment
from runner.tracking.formats import compact, percent
from runner.tracking.verb_report import Report, mib
from runner.train import build_run, busy


def run(composition: Composition) -> float:
    """Profile training steps.

    Returns:
        Samples a second, for sweepers.
    """
    config, found = config_and_checkpoint(composition, Profile)
    report = Report(config.json)
    steps = config.warmup_steps + config.steps + config.trace_steps + 1
    # A schedule has to reach as far as there are steps; nothing else depends on how long the run would be.
    shortened = dataclasses.replace(config, epochs=None, max_steps=steps)
    # Without a checkpoint, the profile begins as a new run would
    own = found is None
    training = build_run(shortened, make_cache=own, fresh=own)
    built = training.config  # with what comes from the data
    config = dataclasses.replace(config, data=built.data, task=built.task, model=built.model)
    with contextlib.closing(training.data):
        folder = output_folder(
            config.output, composition.job_dir or composition.run_dir, config.output_root, "profiles"
        )
        report.header(f"profile of {config.name}  seed {config.seed}  {folder}", describe(config, training))
        report.warnings(found.warnings if found else [], training.warnings)
        since = time.perf_counter(), waited_for_core()
        measured = measure(config, training, folder, report.line)
        waited = core_wait(since)
    record = {"overrides": mask_words(composition.overrides), **_record(config, training, measured)}
    _write(folder, record, measured, stored.dump(config))
    if not report.json(record, folder=str(folder)):
        _show(report, record)
        report.lines(
            *busy(waited), *(f"{part}: {percent(share)} of a step" for part, share in record["shares"].items())
        )
        report.folder(folder)
    return float(record["samples_per_s"])


def _record(config: Profile, training: Run, measured: Measurement) -> dict[str, Any]:
    """The content of `profile.json`, as plain containers."""
    device, seconds = training.device, [step.total() for step in measured.steps]
    times = {"mean": statistics.fmean(seconds), "median": statistics.median(seconds)}
    times |= {"min": min(seconds), "max": max(seconds)}
    return {
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "precision": training.precision.name,
        "batch_size": config.data.batch_size,
        "accumulate": config.accumulate,
        "steps": measured.counts,
        "cut_short": measured.cut,
        "unusual_steps_ms": [taken * 1000 for taken in measured.unusual],
        "step_ms": {name: taken * 1000 for name, taken in times.items()},
        "samples_per_s": measured.samples / sum(seconds),
        "shares": measured.shares(),
        "peak_bytes": measured.peak.bytes,
        "peak_is": measured.peak.what,
    }


def _show(report: Report, record: dict[str, Any]) -> None:
    counts, unusual, step = record["steps"], record["unusual_steps_ms"], record["step_ms"]
    report.lines(
        *(f"{phase} ended after {counts[phase]} steps, because budget_s is used up" for phase in record["cut_short"])
    )
    # Unusual steps would shift the mean, so they are reported and not counted
    if unusual:
        report.line(
            f"skipped: {len(unusual)} of {counts['timing']} steps, which took up to {max(unusual):,.0f} ms "
            "(compiling or tuning for a batch of another size, or another program on this machine)"
        )
    report.lines(
        f"written: {', '.join(record['files'])}",
        f"peak memory: {mib(record['peak_bytes'])} MiB, {record['peak_is']}",
        f"step: mean {step['mean']:.3f} ms, median {step['median']:.3f} ms, {compact(record['samples_per_s'])} samples/s",
    )


def _write(folder: Path, record: dict[str, Any], measured: Measurement, config: str) -> None:
    written = [measured.snapshot.name] if measured.snapshot is not None else []
    if measured.profiler is not None:
        _write_trace(measured.profiler, folder / "trace.json")
        averages = measured.profiler.key_averages()
        order = "self_device_time_total" if record["device"].startswith("cuda") else "self_cpu_time_total"
        table = averages.table(sort_by=order, row_limit=100, max_name_column_width=72)
        write_atomically(folder / "ops.txt", table.encode(), named=True)
        written += ["trace.json", "ops.txt"]
    write_atomically(folder / "config.yaml", config.encode(), named=True)
    record |= {"files": [*written, "config.yaml"], "environment": environment()}
    # It comes last, so that where it is, the others are.
    write_json(folder / "profile.json", record, named=True)


def _write_trace(profiler: Any, path: Path) -> None:
    """Write a trace; torch says nothing when it cannot, and leaves a part of it under another name.

    Raises:
        DiskFull: if there is no trace afterwards.
    """
    try:
        profiler.export_chrome_trace(str(path.resolve()))
    finally:
        path.resolve().with_name(f"{path.name}.tmp").unlink(missing_ok=True)
    if not path.is_file():
        raise DiskFull(f"torch could not write {path}: is the disk full? Free some space, or set output=FOLDER")
