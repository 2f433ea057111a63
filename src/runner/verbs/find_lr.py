"""`find-lr`: the learning-rate range test."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from runner.base.errors import UserError, blame
from runner.base.files import write_atomically, write_json
from runner.base.secrets import mask_words
from runner.checkpoint import resume
from runner.config import stored
from runner.config.composition import Composition
from runner.config.schema.verbs import FindLr
from runner.config.targets import names_argument
from runner.engine.plan import Position
from runner.engine.range_test import Curve, Suggestions, exponential, range_test, suggest
from runner.run.describe import describe
from runner.run.from_checkpoint import config_and_checkpoint, load_weights_of, output_folder
from runner.run.run import Run
from runner.run.trial import memory_for_training
from runner.tracking.environment import environment
from runner.tracking.plots import rate_curve
from runner.tracking.verb_report import Report
from runner.train import build_run

_REASON = "a fifth of the rate at which the loss begins to rise"


def run(composition: Composition) -> None:
    """Find a learning rate, and write it with a plot into a folder."""
    config, found = config_and_checkpoint(composition, FindLr)
    report, own = Report(config.json), found is None
    # The length of the test replaces that of the run
    tested = dataclasses.replace(config, epochs=None, max_steps=config.num_steps)
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
            curve, suggestions, settings = find_rate(training, config, begin)
    words = " ".join(f"optimizer.{name}={rate:g}" for name, rate in settings.items())
    # A loss that still falls at the last rate has no edge yet: the suggestion is only a lower bound
    lower = not curve.stopped and suggestions.edge == curve.rates[-1]
    warning = f"the loss had not risen by the last rate, {config.end:g}: a larger end may suggest a larger rate"
    record = {
        "command": mask_words(composition.overrides),
        "recommended": settings["lr"],
        "reason": _REASON,
        "overrides": words,
        "suggestions": dataclasses.asdict(suggestions),
        "warning": warning if lower else None,
        "curve": dataclasses.asdict(curve),
    }
    marks = {
        "steepest fall": suggestions.steepest,
        "a fifth of the edge (recommended)": suggestions.fifth,
        "edge: the loss begins to rise": suggestions.edge,
    }
    title = f"{config.name}: learning-rate range test"
    rate_curve(curve.rates, curve.losses, curve.smoothed, marks=marks, target=folder / "lr_range.png", title=title)
    write_atomically(folder / "config.yaml", stored.dump(config).encode(), named=True)
    # Written last: where it is, the other files are complete.
    write_json(folder / "lr_range.json", record | {"environment": environment()}, named=True)
    if report.json(record, folder=str(folder)):
        return
    edge = "the last rate tried" if lower else "too high to train with: the loss rises above it"
    rows = [
        ["steepest fall", f"{suggestions.steepest:.2g}", ""],
        ["a tenth of the lowest", f"{suggestions.tenth:.2g}", ""],
        ["a fifth of the edge", f"{suggestions.fifth:.2g}", "<- recommended"],
        ["lowest loss", f"{suggestions.lowest:.2g}", ""],
        ["edge", f"{suggestions.edge:.2g}", edge],
    ]
    report.table(f"{len(curve.rates)} steps, up to {curve.rates[-1]:.2g}", ["suggestion", "rate", ""], rows)
    if curve.stopped:
        report.line(f"ended early: {curve.stopped}")
    if lower:
        report.warn(warning)
    report.line(f"use {words} ({_REASON})")
    report.folder(folder)


def find_rate(run: Run, config: FindLr, begin: Callable[..., Any]) -> tuple[Curve, Suggestions, dict[str, float]]:
    """Make a range test; the run is of no use afterwards. `begin` is called before each step.

    The last item of the result has what is recommended for the optimizer's arguments that are rates, `lr` first. Raises
    `UserError` if the optimizer has no rate to scale, there is not enough memory, or the loss hardly falls at any rate.
    """
    # The test scales the rate that the user gave, so there has to be one
    node = run.config.optimizer
    reference = node.get("lr") or run.state.optimizer.defaults.get("lr")
    if not isinstance(reference, int | float) or reference <= 0:
        raise UserError("optimizer.lr", f"is {node.get('lr')}, and the range test scales it", "a number above 0")
    rates, source = exponential(config.start, config.end, config.num_steps), run.data.train.loader
    with memory_for_training(run.config):
        curve = range_test(run.step, source, run.plan, rates, reference=reference, interrupted=lambda: begin() or "")
    allowed = "optimizer.lr=..., a number; or find-lr with another start, end or num_steps"
    with blame("lr", "no rate was found", allowed):
        suggestions = suggest(curve)
    # Other rates of the optimizer, such as Muon's for its AdamW part, keep their ratio to the main one
    further = {
        name: value * suggestions.fifth / reference
        for name, value in node.items()
        if name.endswith("_lr") and isinstance(value, int | float) and names_argument(node, name)
    }
    # Two digits: a range test is no more precise, and typing the rate gives exactly this number
    return curve, suggestions, {name: float(f"{r:.1e}") for name, r in {"lr": suggestions.fifth, **further}.items()}
