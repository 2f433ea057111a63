"""Two checkpoints, or two runs, side by side: what they saved, their configs, and what they logged."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from runner.checkpoint import find
from runner.config import stored
from runner.config.errors import UserError
from runner.config.reading import read_regular
from runner.tracking.formats import HARDWARE_METRICS
from runner.verbs.audit.record import Difference, Entry, Recorder, difference_record, differences

# Parts of a checkpoint that have to be the same, in the order in which one follows from the other.
PARTS = ("position", "model", "optimizer", "scheduler", "scaler", "averaged", "rng", "metrics", "classes")
_METRICS_FILE = "metrics.jsonl"
_LARGEST_FILE = 2**30


def compare(a: str, b: str, runs: Path) -> tuple[dict[str, Any], list[str]]:
    """Compare two checkpoints, or the last ones of two runs and what these logged.

    Args:
        a, b: a file, a run directory, `last` or `best`.
        runs: folder with the runs of one name.

    Returns:
        The record, and warnings. `same` is whether what was saved and logged is the same; settings and versions may
        differ. `log` is the first logged loss that differs, or another value where no loss does.

    Raises:
        UserError: if one cannot be read.
    """
    both = [find.load(path, runs, prefer="last") for path in (a, b)]
    parts: dict[str, dict[str, int]] = {}
    found: list[Difference] = []
    for part in PARTS:
        records = [_record(part, each.contents[part]) for each in both]
        here = differences(*records)
        parts[part] = {"differ": len(here), "of": max(map(len, records))}
        found += here
    settings = stored.differences(*(stored.load(each.contents["config"], str(each.path)) for each in both))
    versions = stored.differences(*(each.contents["versions"] for each in both))
    logs = [_log_of(path, each.path) for path, each in zip((a, b), both, strict=True)]
    lines = [_lines(log) for log in logs if log is not None]
    common = [place for place in lines[0] if place in lines[1]] if len(lines) == 2 else []
    unlike = [value for place in common for value in _unlike(place, *(each[place] for each in lines))]
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
        "log_lines": len(common),
    }
    return record, [*both[0].warnings, *both[1].warnings]


def _record(part: str, value: Any) -> list[Entry]:
    """Every tensor and every other value of a part, by its dotted place."""
    if part == "metrics":  # without the loss summed up since the last log line, which follows from how often is logged
        value = {name: entry for name, entry in value.items() if name != "train"}
    recorder = Recorder(2**62)
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
        yield from _leaves(item, f"{place}.{key}" if place else str(key))


def _log_of(asked: str, checkpoint: Path) -> Path | None:
    """The log of a run, if a run was named rather than a file."""
    if Path(asked).is_file():
        return None
    folder = checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else checkpoint.parent
    path = folder / _METRICS_FILE
    return path if path.is_file() else None


def _lines(path: Path) -> dict[tuple[int, str], dict[str, Any]]:
    """What was logged, by step and split, without what the clock says."""
    try:
        text = read_regular(path, _LARGEST_FILE).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            values = json.loads(line)
            place = int(values.pop("global_step")), str(values.pop("split"))
            clock = [name for name in values if name in HARDWARE_METRICS or name.endswith("_per_s")]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{path}: line {number} is not one of a log: {error}") from error
        found[place] = {name: value for name, value in values.items() if name not in clock}
    return found


def _unlike(place: tuple[int, str], a: dict[str, Any], b: dict[str, Any]) -> list[dict[str, Any]]:
    """The values that two lines of the same step and split differ in; names that only one has are ignored."""
    return [
        {"global_step": place[0], "split": place[1], "name": name, "a": a[name], "b": b[name]}
        for name in a
        if name in b and a[name] != b[name]
    ]


def _cause_of(difference: Difference, keys: list[str]) -> str:
    """What is probably behind the first difference of two checkpoints, whose configs differ in some keys."""
    part = difference.entry.phase
    if part == "position":
        return "the two were saved at different steps; compare checkpoints of the same step"
    if difference.a is None or difference.b is None:
        return "the two hold different tensors: another model, optimizer or split"
    if keys:
        return f"the configs differ in {', '.join(keys[:5])}{', ...' if len(keys) > 5 else ''}"
    if part == "rng":
        return "weights and optimizer agree, and the generators do not: one side has drawn more often"
    return "the configs are the same; python -m runner audit on this config says which step is not deterministic"
