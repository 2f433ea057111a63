"""Two checkpoints, or two runs, side by side: what they saved, their configs, and what they logged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from runner.checkpoint import find
from runner.config import stored
from runner.lab.audit.record import Difference, Entry, Recorder, difference_record, differences
from runner.tracking.formats import HARDWARE_METRICS
from runner.tracking.jsonl import read_records

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
