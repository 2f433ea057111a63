"""One call of `profile`, from the config to the last line."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from runner.assembly.describe import describe
from runner.assembly.training import build_training
from runner.checkpoint import find
from runner.config import stored
from runner.config.app import Composition
from runner.config.errors import UserError
from runner.config.resolve import checked, merged
from runner.config.schema.profile import PROFILE_ONLY, Profile
from runner.tracking.console import Console
from runner.tracking.environment import environment
from runner.tracking.files import finite, write_atomically, write_json
from runner.tracking.run_directory import claim, timestamp
from runner.verbs._profiling.measure import Measured, measure
from runner.verbs._profiling.ops import Op, ops_in, text_of
from runner.verbs._profiling.report import record_of, show
from runner.verbs._work import guarded


def run(cfg: DictConfig) -> float | None:
    """Profile once: the entry point that Hydra calls.

    Returns:
        Samples a second, for sweepers.

    Raises:
        SystemExit: with the exit status if it failed.
    """
    return guarded(_profile, cfg)


def settle(composition: Composition) -> tuple[Profile, dict[str, Any]]:
    """The config to profile: that of the command line, or of the checkpoint that `ckpt_path` names with the line on top.

    Raises:
        UserError: with everything that is wrong.
    """
    values = composition.values
    if values.get("ckpt_path") is not None:
        found = find.load(str(values["ckpt_path"]), Path(str(values["output_root"])) / str(values["name"]), "last")
        own = {key: values[key] for key in PROFILE_ONLY}
        values, _ = merged(found.contents["config"], str(found.path), composition)
        values |= own
    return checked(values, composition, Profile), values


def _profile(composition: Composition) -> float:
    config, values = settle(composition)
    # With json=true, standard output is one JSON object and nothing else.
    console = Console(None, progress=False, stream=sys.stderr if config.json else None)
    steps = config.warmup_steps + config.steps + config.trace_steps + 1
    # A schedule has to reach as far as there are steps; nothing else depends on how long the run would be.
    shortened = dataclasses.replace(config, epochs=None, max_steps=steps, swa=None)
    own = composition.values["ckpt_path"] is None
    training = build_training(shortened, values, make_cache=own, fresh=own)
    with contextlib.closing(training.splits):
        folder = _folder(composition, config)
        console.header(f"profile of {config.name}  seed {config.seed}  {folder}", describe(config, training))
        for warning in training.warnings:
            console.warn(warning)
        measured = measure(config, training, folder, console.line)
        ops = ops_in(measured.profiler, measured.traced) if measured.profiler is not None else []
        record: dict[str, Any] = {"overrides": composition.words}
        record |= record_of(config, training, measured, ops)
    written = _write(folder, record, measured, ops, stored.dump(values))
    if config.json:
        print(json.dumps(finite(record | {"folder": str(folder)})))
    else:
        show(console, record, ops, written)
        print(folder, flush=True)
    return float(record["samples_per_s"])


def _folder(composition: Composition, config: Profile) -> Path:
    chosen = Path(config.output) if config.output is not None else composition.job_dir or composition.run_dir
    if chosen is None:
        return claim(Path(config.output_root) / "profiles", timestamp())
    try:
        chosen.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"output: cannot make the folder {chosen}: {error.strerror}") from error
    return chosen


def _write(folder: Path, record: dict[str, Any], measured: Measured, ops: list[Op], config: str) -> list[Path]:
    """Write everything; `profile.json` comes last, so that where it is, the others are."""
    written = []
    if measured.profiler is not None:
        trace, table, text = folder / "trace.json", folder / "ops.json", folder / "ops.txt"
        measured.profiler.export_chrome_trace(str(trace))
        write_json(table, [dataclasses.asdict(op) for op in ops])
        write_atomically(text, text_of(ops, measured.traced).encode())
        written += [trace, text, table]
    if measured.snapshot is not None:
        written.append(measured.snapshot)
    write_atomically(folder / "config.yaml", config.encode())
    record["files"] = [path.name for path in written] + ["config.yaml"]
    record["environment"] = environment()
    write_json(folder / "profile.json", record)
    return [*written, folder / "config.yaml", folder / "profile.json"]
