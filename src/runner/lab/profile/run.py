"""One call of `profile`, from the config to the last line."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from pathlib import Path
from typing import Any

from runner.base.errors import DiskFull
from runner.base.files import write_atomically, write_json
from runner.base.secrets import mask_words
from runner.config import stored
from runner.config.app import Composition
from runner.config.schema.verbs import Profile
from runner.lab.profile.measure import Measured, Op, measure, ops_in, text_of
from runner.lab.profile.report import record_of, show
from runner.run.describe import describe
from runner.run.from_checkpoint import config_and_checkpoint, output_folder
from runner.runtime.stopwatch import core_wait, waited_for_core
from runner.tracking.environment import environment
from runner.tracking.verb_report import Report
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
        ops = ops_in(measured.profiler, measured.traced) if measured.profiler is not None else []
        record: dict[str, Any] = {"overrides": mask_words(composition.overrides)}
        record |= record_of(config, training, measured, ops)
    written = _write(folder, record, measured, ops, stored.dump(config))
    if not report.json(record, folder=str(folder)):
        show(report, record, ops, written)
        report.lines(*busy(waited), record["bottleneck"])
        report.folder(folder)
    return float(record["samples_per_s"])


def _write(folder: Path, record: dict[str, Any], measured: Measured, ops: list[Op], config: str) -> list[Path]:
    """Write everything."""
    written = []
    if measured.profiler is not None:
        trace, table, text = folder / "trace.json", folder / "ops.json", folder / "ops.txt"
        _write_trace(measured.profiler, trace)
        write_json(table, [dataclasses.asdict(op) for op in ops], named=True)
        write_atomically(text, text_of(ops, measured.traced).encode(), named=True)
        written += [trace, text, table]
    if measured.snapshot is not None:
        written.append(measured.snapshot)
    write_atomically(folder / "config.yaml", config.encode(), named=True)
    record["files"] = [path.name for path in written] + ["config.yaml"]
    record["environment"] = environment()
    # It comes last, so that where it is, the others are.
    write_json(folder / "profile.json", record, named=True)
    return [*written, folder / "config.yaml", folder / "profile.json"]


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
