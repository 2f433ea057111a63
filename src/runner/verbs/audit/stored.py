"""Two checkpoints, or two runs, side by side: what they saved, their configs, and what they logged."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from runner.checkpoint import find
from runner.config import stored
from runner.config.errors import UserError
from runner.tracking.formats import HARDWARE_METRICS
from runner.verbs.audit.record import Difference, Entry, Recorder, differences

# Parts of a checkpoint that have to be the same, in the order in which one follows from the other.
PARTS = ("position", "model", "optimizer", "scheduler", "scaler", "averaged", "rng", "metrics", "classes")
_METRICS_FILE = "metrics.jsonl"
_LARGEST_FILE = 2**30


@dataclass
class Compared:
    """What two checkpoints have in common and what not.

    Attributes:
        paths: of the two.
        counts: for each part, how many of its values differ, and of how many.
        found: the differences, in the order of `PARTS`.
        settings: (key, a, b) of what the configs differ in.
        versions: (package, a, b) likewise.
        logged: the first loss in the logs that differs, or another value where no loss does; None if all are the same.
        lines: of the logs that were compared.
        warnings: of reading.
    """

    paths: tuple[str, str]
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)
    found: list[Difference] = field(default_factory=list)
    settings: list[tuple[str, str, str]] = field(default_factory=list)
    versions: list[tuple[str, str, str]] = field(default_factory=list)
    logged: dict[str, Any] | None = None
    lines: int = 0
    warnings: list[str] = field(default_factory=list)

    @property
    def same(self) -> bool:
        """Whether what was saved and logged is the same; settings and versions may differ."""
        return not self.found and self.logged is None


def compare(a: str, b: str, runs: Path) -> Compared:
    """Compare two checkpoints, or the last ones of two runs and what these logged.

    Args:
        a, b: a file, a run directory, `last` or `best`.
        runs: folder with the runs of one name.

    Raises:
        UserError: if one cannot be read.
    """
    first, second = (find.load(path, runs, prefer="last") for path in (a, b))
    result = Compared((str(first.path), str(second.path)), warnings=[*first.warnings, *second.warnings])
    for part in PARTS:
        records = [_record(part, _of_training(part, found.contents[part])) for found in (first, second)]
        here = differences(*records)
        result.counts[part] = len(here), max(map(len, records))
        result.found += here
    configs = [stored.load(found.contents["config"], str(found.path)) for found in (first, second)]
    result.settings = stored.differences(*configs)
    result.versions = stored.differences(*(found.contents["versions"] for found in (first, second)))
    logs = [_log_of(path, found.path) for path, found in ((a, first), (b, second))]
    if logs[0] is not None and logs[1] is not None:
        lines = [_lines(log) for log in logs if log is not None]
        common = [place for place in lines[0] if place in lines[1]]
        result.lines = len(common)
        unlike = [found for place in common for found in _unlike(place, *(each[place] for each in lines))]
        result.logged = next((found for found in unlike if found["name"] == "loss"), unlike[0] if unlike else None)
    return result


def _of_training(part: str, value: Any) -> Any:
    """A part without the loss summed up since the last log line, which follows from how often is logged."""
    return {name: entry for name, entry in value.items() if name != "train"} if part == "metrics" else value


def _record(part: str, value: Any) -> list[Entry]:
    """Every tensor and every other value of a part, by its dotted place."""
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
        if path.stat().st_size > _LARGEST_FILE:
            raise UserError(f"{path}: is larger than {_LARGEST_FILE >> 20} MiB, which is more than a log")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    found: dict[tuple[int, str], dict[str, Any]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            values = json.loads(line)
            place = int(values.pop("global_step")), str(values.pop("split"))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{path}: line {number} is not one of a log: {error}") from error
        found[place] = {name: value for name, value in values.items() if not _of_the_clock(name)}
    return found


def _of_the_clock(name: str) -> bool:
    return name in HARDWARE_METRICS or name.endswith("_per_s")


def _unlike(place: tuple[int, str], a: dict[str, Any], b: dict[str, Any]) -> list[dict[str, Any]]:
    """The values that two lines of the same step and split differ in; names that only one has are ignored."""
    return [
        {"global_step": place[0], "split": place[1], "name": name, "a": a[name], "b": b[name]}
        for name in a
        if name in b and a[name] != b[name]
    ]


def cause_of(difference: Difference, settings: list[tuple[str, str, str]]) -> str:
    """What is probably behind the first difference of two checkpoints."""
    part = difference.entry.phase
    if part == "position":
        return "the two were saved at different steps; compare checkpoints of the same step"
    if difference.a is None or difference.b is None:
        return "the two hold different tensors: another model, optimizer or split"
    keys = [key for key, _, _ in settings]
    if keys:
        return f"the configs differ in {', '.join(keys[:5])}{', ...' if len(keys) > 5 else ''}"
    if part == "rng":
        return "weights and optimizer agree, and the generators do not: one side has drawn more often"
    return "the configs are the same; python -m runner audit on this config says which step does not repeat"
