"""One call of `audit`, from the config to the last line."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from runner.build.describe import describe
from runner.config import keys
from runner.config.app import Composition
from runner.config.errors import ConfigError, UserError
from runner.config.frozen import to_plain
from runner.config.resolve import resolve_changes, resolve_config
from runner.config.schema.verbs import Audit
from runner.config.validate import shown
from runner.data.nondeterminism import Nondeterminism, find_nondeterminism
from runner.tracking.console import Console
from runner.tracking.files import finite
from runner.verbs._checkpoint import config_and_checkpoint
from runner.verbs.audit import report, stored
from runner.verbs.audit.hints import Cause, cause_of
from runner.verbs.audit.instrumented_run import Side
from runner.verbs.audit.record import BATCH, Difference, Entry, differences

DIFFERENT = 1
_SUSPECTED = 8  # samples that transforms are tried on


def run(composition: Composition) -> float:
    """Compare two runs, or two checkpoints.

    Returns:
        0.0 if nothing differs, otherwise 1.0, for sweepers.

    Raises:
        SystemExit: with exit status 1 if something differs, unless the job is one of a sweep.
    """
    values = composition.values
    a, b = values.get("a"), values.get("b")
    as_json = values.get("json") is True
    # With json=true, standard output is one JSON object and nothing else.
    console = Console(None, progress=False, stream=sys.stderr if as_json else None)
    if a is not None or b is not None:
        config = resolve_config(composition, Audit)
        compared = stored.compare(str(config.a), str(config.b), Path(config.output_root) / config.name)
        report.show_stored(console, compared)
        same, record = compared.same, report.stored_record(compared)
    else:
        found = _trained(composition, console)
        report.show_result(console, found)
        same, record = found.difference is None, report.result_record(found)
    if as_json:
        print(json.dumps(finite(record)))
    if not same and composition.job_dir is None:
        raise SystemExit(DIFFERENT)
    return float(not same)


@dataclass
class AuditResult:
    """What running the same steps on two sides showed.

    Attributes:
        steps: optimizer steps that were compared.
        tensors: of each side that were compared.
        varied: keys that the sides differ in, with both values.
        notes: what readers should know.
        step: number of the step with the first difference, from 1; 0 is before the first one.
        difference: the first one; None if there is none.
        cause: of it.
        alike: for each phase of that step how many entries differ, and of how many.
    """

    steps: int = 0
    tensors: int = 0
    varied: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    step: int = 0
    difference: Difference | None = None
    cause: Cause | None = None
    alike: dict[str, tuple[int, int]] = field(default_factory=dict)


def settings_of(config: Audit) -> dict[str, tuple[Any, Any]]:
    """The keys of `vary`, however they are nested, with the values of both sides."""
    found, now = {}, keys.flatten(to_plain(config))
    for key, given in keys.flatten(config.vary).items() if config.vary else []:
        found[key] = (given[0], given[1]) if isinstance(given, list) else (now.get(key), given)
    return found


def _trained(composition: Composition, console: Console) -> AuditResult:
    config, start = config_and_checkpoint(composition, Audit)
    varied = settings_of(config)
    sides: list[Side] = []
    try:
        for number in range(2):
            own_config = _with(composition, config, {key: pair[number] for key, pair in varied.items()})
            sides.append(Side(own_config, start))
        training = sides[0].training
        title = f"audit of {config.name}  seed {config.seed}  {report.settings_text(varied)}"
        console.header(title, describe(sides[0].config, training))
        for warning in dict.fromkeys([*(start.warnings if start else []), *training.warnings]):
            console.warn(warning)
        return _compared(config, sides, varied)
    except torch.OutOfMemoryError as error:
        raise UserError(
            "data.batch_size",
            "two trainings side by side need more memory than the device has",
            "a smaller data.batch_size, a smaller model, or device=cpu",
        ) from error
    finally:
        for side in sides:
            side.close()


def _with(composition: Composition, config: Audit, settings: dict[str, Any]) -> Audit:
    """The validated config with some keys set."""
    found, problems = resolve_changes(config, settings, composition, "vary.")
    if problems or found is None:
        given = ", ".join(f"{key}={shown(value)}" for key, value in settings.items())
        raise UserError(f"vary: {given} cannot be run\n{ConfigError(problems)}") if settings else ConfigError(problems)
    return found


def _compared(config: Audit, sides: Sequence[Side], varied: dict[str, tuple[Any, Any]]) -> AuditResult:
    """Run both sides step by step until something differs."""
    found = AuditResult(varied=varied)
    left = min(side.steps_left for side in sides)
    if left <= 0:
        raise UserError("ckpt_path", "there is nothing left to train", "an earlier checkpoint, or more epochs")
    steps = min(config.steps, left)
    if steps < config.steps:
        found.notes.append(f"{steps} steps instead of {config.steps}: the run ends there")
    if any(side.compiled for side in sides):
        found.notes.append("activations are skipped: a compiled model cannot be observed")
    else:
        for side in sides:
            side.observe()
    for step in range(steps + 1):
        records = [side.step() if step else side.start() for side in sides]
        found.steps, found.tensors = step, found.tensors + len(records[0])
        differing = differences(*records)
        if differing:
            found.step, found.difference = step, differing[0]
            found.alike = report.counted(records[0], differing)
            found.cause = _cause(sides, records[0], differing[0], varied)
            break
    return found


def _cause(
    sides: Sequence[Side], entries: Sequence[Entry], first: Difference, varied: dict[str, tuple[Any, Any]]
) -> Cause:
    place = next((index for index, entry in enumerate(entries) if entry is first.a), len(entries))
    suspected = _suspected(sides, entries, first) if first.entry.phase == BATCH else None
    return cause_of(first, entries[:place], sides[0].training.model, varied, suspected)


def _suspected(sides: Sequence[Side], entries: Sequence[Entry], first: Difference) -> Nondeterminism | None:
    """What gives different images or targets for the same samples; looked for on samples that differ."""
    indices = next(entry for entry in entries if (entry.batch, entry.name) == (first.entry.batch, "indices")).tensor
    if first.entry.name == "indices" or indices is None or first.a is None or first.b is None:
        return None
    a, b = first.a.tensor, first.b.tensor
    chosen = indices.tolist()
    if a is not None and b is not None and a.shape == b.shape and a.ndim:
        chosen = [index for index, x, y in zip(chosen, a, b, strict=True) if not x.equal(y)] or chosen
    for side in sides:
        loader = side.training.data.train.loader
        if (who := find_nondeterminism(loader, side.config.seed, side.epoch, chosen[:_SUSPECTED])) is not None:
            return who
    return None
