"""One call of `audit`, from the config to the last line."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from runner.base.errors import FAILED, ConfigError, UserError
from runner.checkpoint import find
from runner.config import keys, stored
from runner.config.app import Composition
from runner.config.frozen import to_plain
from runner.config.resolve import resolve_changes, resolve_config
from runner.config.schema.verbs import Audit
from runner.config.validate import shown
from runner.lab.audit.causes import Nondeterminism, cause_of, find_nondeterminism
from runner.lab.audit.record import Difference, Entry, Phase, Recorder, difference_record, differences
from runner.lab.audit.side import Side
from runner.run.batch_size import memory_for_training
from runner.run.describe import describe
from runner.run.from_checkpoint import config_and_checkpoint
from runner.tracking.formats import HARDWARE_METRICS, amount, number
from runner.tracking.jsonl import read_records
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
        "cause": cause,
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


_MOST_ROWS = 40


def show_trained(report: Report, record: Mapping[str, Any]) -> None:
    """Show what running two sides showed."""
    report.lines(*(f"note: {note}" for note in record["notes"]))
    difference = record["difference"]
    if difference is None:
        values = f"{record['values']:,} values of each side are the same bits"
        report.line(f"no difference in {amount(record['steps'], 'step')}: {values}")
        return
    step, batch = difference["step"], difference["batch"]
    of_step = f", batch {batch + 1} of the step" if batch else ""
    _show_difference(report, difference, f"step {step}{of_step}, " if step else "before the first step, ")
    _show_counts(report, f"of step {step}" if step else "before the first step", record["differing"])
    report.line(f"likely cause: {record['cause']['text']}")
    if remedy := record["cause"]["remedy"]:
        report.line(f"what helps: {remedy}")


def show_stored(report: Report, record: Mapping[str, Any]) -> None:
    """Show what comparing two checkpoints showed."""
    report.lines(f"a: {record['a']}", f"b: {record['b']}")
    for title in ("config", "versions"):
        if rows := record[title]:
            report.table(title, ["key", "a", "b"], rows[:_MOST_ROWS])
    _show_counts(report, "checkpoint", {part: counts for part, counts in record["parts"].items() if counts["of"]})
    if record["difference"]:
        _show_difference(report, record["difference"])
        report.line(f"likely cause: {record['cause']}")
    if at := record["log"]:
        values = f"a {at['a']!r}, b {at['b']!r}"
        report.line(f"logs differ first at step {at['global_step']}: {at['split']} {at['name']} {values}")
    if record["same"]:
        logs = f", and so are {record['log_lines']} lines of the logs" if record["log_lines"] else ""
        report.line(f"no difference: both checkpoints are the same bits{logs}")


def _show_counts(report: Report, title: str, counts: Mapping[str, Mapping[str, int]]) -> None:
    rows = [[part, str(count["differ"]), str(count["of"])] for part, count in counts.items()]
    report.table(title, ["part", "differ", "of"], rows)


def _show_difference(report: Report, difference: Mapping[str, Any], where: str = "") -> None:
    report.line(f"first difference: {where}{difference['phase']} {difference['name']}")
    a, b = ("not there" if difference[side] is None else difference[side] for side in ("a", "b"))
    rows = [["shape", a if a == b else f"a {a}, b {b}"]] if a or b else []
    if apart := difference["amount"]:
        largest, relative = (
            "not finite" if apart[name] is None else number(apart[name]) for name in ("largest", "relative")
        )
        rows += [
            ["elements that differ", f"{apart['differing']:,} of {apart['elements']:,}"],
            ["largest difference", largest],
            ["largest, relative", relative],
            [f"first, at {apart['place']}", f"a {apart['values'][0]!r}, b {apart['values'][1]!r}"],
        ]
    report.table("", ["what", "value"], rows or [["state", "is not the same"]])


# Parts of a checkpoint that have to be the same, in the order in which one follows from the other.
PARTS = ("position", "model", "optimizer", "scheduler", "scaler", "averaged", "rng", "metrics", "classes")


def compare(a: str, b: str, runs: Path) -> tuple[dict[str, Any], list[str]]:
    """Compare two checkpoints, or the last ones of two runs and what these logged.

    Args:
        a, b: a file, a run directory, `last` or `best`.
        runs: folder with the runs of one name.

    Returns:
        The record, and warnings. `same` is whether what was saved and logged is the same; settings and versions may
        differ. `log` is the first logged loss that differs, or another value where no loss does.
    """
    both = [find.load(path, runs, prefer="last") for path in (a, b)]
    # Each part of the state is compared by itself, so that the report says which one differs
    parts: dict[str, dict[str, int]] = {}
    found: list[Difference] = []
    for part in PARTS:
        records = [_record(part, each.contents[part]) for each in both]
        differing = differences(*records)
        parts[part] = {"differ": len(differing), "of": max(map(len, records))}
        found += differing
    settings = stored.differences(*(stored.load(each.contents["config"], str(each.path)) for each in both))
    versions = stored.differences(*(each.contents["versions"] for each in both))
    # Logs of two runs may differ although their last weights agree
    ours, theirs = (_logged(path, each.path) for path, each in zip((a, b), both, strict=True))
    unlike = [
        {"global_step": step, "split": split, "name": name, "a": value, "b": theirs[step, split][name]}
        for (step, split), values in ours.items()
        for name, value in values.items()
        if value != theirs.get((step, split), {}).get(name, value)
    ]
    # The loss first: another metric can differ in a step at which no loss was logged.
    log = next((value for value in unlike if value["name"] == "loss"), unlike[0] if unlike else None)
    record = {
        "same": not found and log is None,
        "a": str(both[0].path),
        "b": str(both[1].path),
        "parts": parts,
        "difference": difference_record(found[0]) if found else None,
        "cause": _cause_of(found[0], [key for key, _, _ in settings]) if found else None,
        "config": [list(row) for row in settings],
        "versions": [list(row) for row in versions],
        "log": log,
        "log_lines": len(ours.keys() & theirs.keys()),
    }
    return record, [*both[0].warnings, *both[1].warnings]


def _record(part: str, value: Any) -> list[Entry]:
    """Every tensor and every other value of a part, by its dotted place."""
    if part == "metrics":  # without the loss summed up since the last log line, which follows from how often is logged
        value = {name: entry for name, entry in value.items() if name != "train"}
    recorder = Recorder()
    for name, leaf in _leaves(value, ""):
        recorder.add(part, name or part, leaf)
    return recorder.entries


def _leaves(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        items: Any = value.items()
    elif isinstance(value, list | tuple) and any(isinstance(item, Tensor | Mapping | list | tuple) for item in value):
        items = enumerate(value)
    else:
        yield place, value
        return
    for key, item in items:
        yield from _leaves(item, f"{place}.{key}".lstrip("."))


def _logged(given: str, checkpoint: Path) -> dict[tuple[int, str], dict[str, Any]]:
    """The log of a run by step and split, without what the clock says; empty if a file was given rather than a run."""
    if Path(given).is_file():
        return {}
    folder = checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else checkpoint.parent
    return {
        (line["global_step"], line.get("split", "")): {
            name: value
            for name, value in line.items()
            if name not in (*HARDWARE_METRICS, "global_step", "split") and not name.endswith("_per_s")
        }
        for line in read_records(folder / "metrics.jsonl")
    }


def _cause_of(difference: Difference, keys: list[str]) -> str:
    """The probable cause of the first difference of two checkpoints, whose configs differ in some keys."""
    if difference.entry.phase == "position":
        return "the two were saved at different steps; compare checkpoints of the same step"
    if difference.a is None or difference.b is None:
        return "the two hold different tensors: another model, optimizer or split"
    if keys:
        return f"the configs differ in {', '.join(keys[:5])}{', ...' if len(keys) > 5 else ''}"
    if difference.entry.phase == "rng":
        return "weights and optimizer agree, and the generators do not: one side has drawn more often"
    return "the configs are the same; python -m runner audit on this config says which step is not deterministic"
