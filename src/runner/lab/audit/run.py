"""One call of `audit`, from the config to the last line."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from runner.base.errors import FAILED, ConfigError, UserError
from runner.config import keys
from runner.config.app import Composition
from runner.config.frozen import to_plain
from runner.config.resolve import resolve_changes, resolve_config
from runner.config.schema.verbs import Audit
from runner.config.validate import shown
from runner.lab.audit.hints import cause_of
from runner.lab.audit.nondeterminism import Nondeterminism, find_nondeterminism
from runner.lab.audit.record import Difference, Entry, Phase, difference_record, differences
from runner.lab.audit.report import show_stored, show_trained
from runner.lab.audit.side import Side
from runner.lab.audit.stored import compare
from runner.run.batch_size import memory_for_training
from runner.run.describe import describe
from runner.run.from_checkpoint import config_and_checkpoint
from runner.tracking.verb_report import Report

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
    report = Report(values.get("json") is True)
    # Two checkpoints are compared as they are, without training
    if a is not None or b is not None:
        config = resolve_config(composition, Audit)
        record, warnings = compare(str(config.a), str(config.b), Path(config.output_root) / config.name)
        report.warnings(warnings)
        show_stored(report, record)
    else:
        record = _trained(composition, report)
        show_trained(report, record)
    report.json(record)
    if not record["same"] and composition.job_dir is None:
        raise SystemExit(FAILED)
    return float(not record["same"])


def _trained(composition: Composition, report: Report) -> dict[str, Any]:
    config, start = config_and_checkpoint(composition, Audit)
    # The keys of `vary`, however they are nested, with the values of both sides.
    varied, now = {}, keys.flatten(to_plain(config))
    for key, given in keys.flatten(config.vary).items() if config.vary else ():
        varied[key] = given if isinstance(given, list) else [now.get(key), given]
    with contextlib.ExitStack() as stack, memory_for_training(config):
        sides = []
        # Both sides are built from the same config, except for what varies
        for number in range(2):
            own = _with(composition, config, {key: pair[number] for key, pair in varied.items()})
            sides.append(stack.enter_context(contextlib.closing(Side(own, start))))
        a, b = (" ".join(f"{key}={shown(pair[side])}" for key, pair in varied.items()) for side in (0, 1))
        title = f"audit of {config.name}  seed {config.seed}  {f'a: {a}  b: {b}' if varied else 'twice the same'}"
        report.header(title, describe(sides[0].config, sides[0].training))
        report.warnings(start.warnings if start else [], sides[0].training.warnings)
        return {"vary": varied, **_compared(config.steps, sides, varied, report)}


def _with(composition: Composition, config: Audit, settings: dict[str, Any]) -> Audit:
    """The validated config with some keys set."""
    found, problems = resolve_changes(config, settings, composition, "vary.")
    if problems or found is None:
        given = ", ".join(f"{key}={shown(value)}" for key, value in settings.items())
        raise UserError(f"vary: {given} cannot be run\n{ConfigError(problems)}") if settings else ConfigError(problems)
    return found


def _compared(most: int, sides: Sequence[Side], varied: Iterable[str], report: Report) -> dict[str, Any]:
    """Run both sides for at most so many steps, until something differs; returns the record."""
    notes: list[str] = []
    # A schedule ends with the run, so steps beyond it would mean nothing
    steps = min(most, *(side.steps_left for side in sides))
    if steps <= 0:
        raise UserError("ckpt_path", "there is nothing left to train", "an earlier checkpoint, or more epochs")
    if steps < most:
        notes.append(f"{steps} steps instead of {most}: the run ends there")
    if any(side.compiled for side in sides):
        notes.append("activations are skipped: a compiled model cannot be observed")
    else:
        for side in sides:
            side.observe()
    record: dict[str, Any] = {"same": True, "notes": notes, "values": 0}
    with report.counting("audit", steps + 1) as begin:
        for step in range(steps + 1):  # 0 is the state before the first step
            begin()
            entries, others = (side.step() if step else side.start() for side in sides)
            record |= {"steps": step, "values": record["values"] + len(entries)}
            # The first step that differs is enough, as everything after it follows from it
            if differing := differences(entries, others):
                return record | {"same": False} | _explained(sides, entries, differing, step, varied=varied)
    return record | {"difference": None, "cause": None, "differing": {}}


def _explained(
    sides: Sequence[Side],
    entries: Sequence[Entry],
    differing: Sequence[Difference],
    step: int,
    *,
    varied: Iterable[str],
) -> dict[str, Any]:
    """The first difference, its likely cause, and how many entries of each phase differ."""
    # Order matters: the first difference is nearest to the cause
    first = differing[0]
    place = next((index for index, entry in enumerate(entries) if entry is first.a), len(entries))
    suspected = _suspected(sides, entries, first) if first.entry.phase == Phase.BATCH else None
    cause = cause_of(first, entries[:place], sides[0].training.model, varied, suspected)
    all_of = Counter(entry.phase for entry in entries)
    unlike = Counter(difference.entry.phase for difference in differing)
    return {
        "difference": difference_record(first) | {"step": step},
        "cause": cause._asdict(),
        "differing": {
            phase: {"differ": unlike[phase], "of": max(all_of[phase], unlike[phase])}
            for phase in dict.fromkeys([*all_of, *unlike])
        },
    }


def _suspected(sides: Sequence[Side], entries: Sequence[Entry], first: Difference) -> Nondeterminism | None:
    """The part of the data that gives different images or targets for the same samples, tried on samples that differ."""
    indices = next(entry for entry in entries if (entry.batch, entry.name) == (first.entry.batch, "indices")).tensor
    a, b = (None if entry is None else entry.tensor for entry in first)
    if first.entry.name == "indices" or indices is None or a is None or b is None or a.shape != b.shape:
        return None
    chosen = indices.tolist()
    if a.shape[:1] == indices.shape:  # otherwise it belongs to one sample of the batch, or to all
        chosen = [index for index, x, y in zip(chosen, a, b, strict=True) if not x.equal(y)]
    for side in sides:
        loader = side.training.data.train.loader
        if (who := find_nondeterminism(loader, side.config.seed, side.epoch, chosen[:_SUSPECTED])) is not None:
            return who
    return None
