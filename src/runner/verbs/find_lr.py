"""`find-lr`: the learning-rate range test."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

from runner.base.files import write_atomically, write_json
from runner.base.secrets import mask_words
from runner.checkpoint import resume
from runner.config import stored
from runner.config.composition import Composition
from runner.config.schema.verbs import FindLr
from runner.engine.plan import Position
from runner.run.describe import describe
from runner.run.find_rate import REASON, FoundRate, find_rate
from runner.run.from_checkpoint import config_and_checkpoint, load_weights_of, output_folder
from runner.tracking.environment import environment
from runner.tracking.verb_report import Report
from runner.train import build_run


def run(composition: Composition) -> None:
    """Find a learning rate, and write it with a plot into a folder."""
    config, found = config_and_checkpoint(composition, FindLr)
    report = Report(config.json)
    # The length of the test replaces that of the run
    tested = dataclasses.replace(config, epochs=None, max_steps=config.num_steps)
    own = found is None
    training = build_run(tested, make_cache=own, fresh=own)
    built = training.config  # with what comes from the data
    config = dataclasses.replace(config, data=built.data, task=built.task, model=built.model)
    with contextlib.closing(training.data):
        # With a checkpoint, the test starts from its weights: the best rate depends on them
        if found is not None:
            load_weights_of(found, config, training.model, loss=training.loss, which="raw")
            # The test freezes what is frozen at the checkpoint's position.
            training.state.position = resume.made_of(found, "position", Position)
        given = composition.job_dir or composition.run_dir
        folder = output_folder(config.output, given, config.output_root, "find-lr")
        report.header(f"find-lr of {config.name}  seed {config.seed}  {folder}", describe(config, training))
        report.warnings(training.warnings, found.warnings if found else [])
        with report.counting("find-lr", config.num_steps) as begin:
            # Asked before each step; nothing stops the test.
            rate = find_rate(training, config.num_steps, config.start, config.end, lambda: begin() or "")
    record = {"command": mask_words(composition.overrides), **rate.record()}
    rate.draw(folder / "lr_range.png", f"{config.name}: learning-rate range test")
    write_atomically(folder / "config.yaml", stored.dump(config).encode(), named=True)
    # Written last: where it is, the other files are complete.
    write_json(folder / "lr_range.json", record | {"environment": environment()}, named=True)
    if not report.json(record, folder=str(folder)):
        _show(report, rate, folder)


def _show(report: Report, rate: FoundRate, folder: Path) -> None:
    curve, found = rate.curve, rate.suggestions
    edge = "the last rate tried" if rate.warning else "too high to train with: the loss rises above it"
    rows = [
        ["steepest fall", f"{found.steepest:.2g}", ""],
        ["a tenth of the lowest", f"{found.tenth:.2g}", ""],
        ["a fifth of the edge", f"{found.fifth:.2g}", "<- recommended"],
        ["lowest loss", f"{found.lowest:.2g}", ""],
        ["edge", f"{found.edge:.2g}", edge],
    ]
    report.table(f"{len(curve.rates)} steps, up to {curve.rates[-1]:.2g}", ["suggestion", "rate", ""], rows)
    if curve.stopped:
        report.line(f"ended early: {curve.stopped}")
    if rate.warning:
        report.warn(rate.warning)
    report.line(f"use {rate.words} ({REASON})")
    report.folder(folder)
