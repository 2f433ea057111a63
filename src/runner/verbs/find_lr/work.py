"""One call of `find-lr`, from the config to the last line."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from runner.build.auto_lr import REASON, FoundRate, find_rate
from runner.build.describe import describe
from runner.checkpoint import resume
from runner.config import stored
from runner.config.app import Composition
from runner.config.errors import UserError
from runner.config.schema.find_lr import FindLr
from runner.config.secrets import mask_words
from runner.engine.position import Position
from runner.engine.state import load_weights
from runner.tracking.console import Console
from runner.tracking.environment import environment
from runner.tracking.files import finite, write_atomically, write_json
from runner.train import build_run
from runner.verbs._checkpoint import folder_for, line_or_checkpoint
from runner.verbs._work import guarded


def run(cfg: DictConfig) -> float | None:
    """Find a rate once: the entry point that Hydra calls.

    Returns:
        The rate that is recommended, for sweepers.

    Raises:
        SystemExit: with the exit status if it failed.
    """
    return guarded(_find, cfg)


def _find(composition: Composition) -> float:
    config, found = line_or_checkpoint(composition, FindLr)
    # With json=true, standard output is one JSON object and nothing else.
    console = Console(None, progress=False, stream=sys.stderr if config.json else None)
    tested = dataclasses.replace(config, epochs=None, max_steps=config.num_steps)
    own = found is None
    training = build_run(tested, make_cache=own, fresh=own)
    built = training.config  # with what comes from the data
    config = dataclasses.replace(config, data=built.data, task=built.task, model=built.model)
    with contextlib.closing(training.splits):
        if found is not None:
            try:
                load_weights(training.model, found.contents["model"])
            except ValueError as error:
                raise UserError(f"{found.path}: {error}") from error
            # What is frozen there is what is frozen in the test.
            position = resume.made_of(found, "position", Position)
            training.state.position = dataclasses.replace(position, skipped_steps=[])
        folder = folder_for(config.output, composition.job_dir or composition.run_dir, config.output_root, "find-lr")
        console.header(f"find-lr of {config.name}  seed {config.seed}  {folder}", describe(config, training))
        for warning in [*training.warnings, *(found.warnings if found else [])]:
            console.warn(warning)
        rate = find_rate(training, config.num_steps, config.start, config.end)
    record = {"command": mask_words(composition.words), **rate.record()}
    _write(folder, record, rate, config.name, stored.dump(config))
    if config.json:
        print(json.dumps(finite(record | {"folder": str(folder)})))
    else:
        _show(console, rate, folder)
    return rate.settings["lr"]


def _write(folder: Path, record: dict[str, Any], rate: FoundRate, name: str, config: str) -> None:
    """Write everything; `lr_range.json` comes last, so that where it is, the others are."""
    rate.draw(folder / "lr_range.png", f"{name}: learning-rate range test")
    write_atomically(folder / "config.yaml", config.encode())
    write_json(folder / "lr_range.json", record | {"environment": environment()})


def _show(console: Console, rate: FoundRate, folder: Path) -> None:
    curve, found = rate.curve, rate.suggestions
    rows = [
        ["steepest fall", f"{found.steepest:.2g}", ""],
        ["a tenth of the lowest", f"{found.tenth:.2g}", ""],
        ["a fifth of the edge", f"{found.fifth:.2g}", "<- recommended"],
        ["lowest loss", f"{found.lowest:.2g}", ""],
        [
            "edge",
            f"{found.edge:.2g}",
            "the last rate tried" if rate.warning else "too high to train with: the loss rises above it",
        ],
    ]
    console.table(f"{len(curve.rates)} steps, up to {curve.rates[-1]:.2g}", ["suggestion", "rate", ""], rows)
    if curve.stopped:
        console.line(f"ended early: {curve.stopped}")
    if rate.warning:
        console.warn(rate.warning)
    console.line(f"use {rate.words} ({REASON})")
    print(folder, flush=True)
