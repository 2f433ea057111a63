"""The learning-rate range test of `find-lr`: what it finds, writes and shows."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from runner.base.errors import UserError, blame
from runner.base.files import write_atomically, write_json
from runner.config import stored
from runner.config.schema.verbs import FindLr
from runner.config.targets import names_argument
from runner.engine.range_test import exponential, range_test, suggest
from runner.run.run import Run
from runner.run.trial import memory_for_training
from runner.tracking.environment import environment
from runner.tracking.plots import rate_curve
from runner.tracking.verb_report import Report

_REASON = "a fifth of the rate at which the loss begins to rise"


def find_rate(run: Run, config: FindLr, command: list[str], folder: Path, report: Report) -> None:
    """Make a range test, write what it finds with a plot into a folder, and show it; the run is of no use afterwards.

    Raises `UserError` if the optimizer has no rate to scale, there is not enough memory, or the loss hardly falls at any rate.
    """
    # The test scales the rate that the user gave, so there has to be one
    node, steps = run.config.optimizer, config.num_steps
    reference = node.get("lr") or run.state.optimizer.defaults.get("lr")
    if not isinstance(reference, int | float) or reference <= 0:
        raise UserError("optimizer.lr", f"is {node.get('lr')}, and the range test scales it", "a number above 0")
    rates, source = exponential(config.start, config.end, steps), run.data.train.loader
    with memory_for_training(run.config), report.counting("find-lr", steps) as begin:
        # `begin` is called before each step, and nothing stops the test
        curve = range_test(run.step, source, run.plan, rates, reference=reference, interrupted=lambda: begin() or "")
    allowed = "optimizer.lr=..., a number; or find-lr with another start, end or num_steps"
    with blame("lr", "no rate was found", allowed):
        found = suggest(curve)
    # Other rates of the optimizer, such as Muon's for its AdamW part, keep their ratio to the main one
    scaled = {"lr": found.fifth} | {
        name: value * found.fifth / reference
        for name, value in node.items()
        if name.endswith("_lr") and isinstance(value, int | float) and names_argument(node, name)
    }
    # Two digits: a range test is no more precise, and typing the rate gives exactly this number
    words = " ".join(f"optimizer.{name}={float(f'{rate:.1e}'):g}" for name, rate in scaled.items())
    # A loss that still falls at the last rate has no edge yet: the suggestion is only a lower bound
    lower = not curve.stopped and found.edge == curve.rates[-1]
    warning = f"the loss had not risen by the last rate, {config.end:g}: a larger end may suggest a larger rate"
    record = {
        "command": command,
        "recommended": float(f"{found.fifth:.1e}"),
        "reason": _REASON,
        "overrides": words,
        "suggestions": dataclasses.asdict(found),
        "warning": warning if lower else None,
        "curve": dataclasses.asdict(curve),
    }
    marks = {
        "steepest fall": found.steepest,
        "a fifth of the edge (recommended)": found.fifth,
        "edge: the loss begins to rise": found.edge,
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
        ["steepest fall", f"{found.steepest:.2g}", ""],
        ["a tenth of the lowest", f"{found.tenth:.2g}", ""],
        ["a fifth of the edge", f"{found.fifth:.2g}", "<- recommended"],
        ["lowest loss", f"{found.lowest:.2g}", ""],
        ["edge", f"{found.edge:.2g}", edge],
    ]
    report.table(f"{len(curve.rates)} steps, up to {curve.rates[-1]:.2g}", ["suggestion", "rate", ""], rows)
    if curve.stopped:
        report.line(f"ended early: {curve.stopped}")
    if lower:
        report.warn(warning)
    report.line(f"use {words} ({_REASON})")
    report.folder(folder)
