"""Two checkpoints, or all that two runs have saved and logged, compared bit by bit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from runner.checkpoint import find
from runner.config import stored
from runner.tracking.formats import HARDWARE_METRICS
from runner.tracking.jsonl import read_records

# Parts of a checkpoint that have to be the same, in the order in which one follows from the other.
PARTS = ("position", "model", "optimizer", "scheduler", "scaler", "averaged", "rng", "metrics", "classes")
_MISSING = object()


class Difference(NamedTuple):
    """Two values of the same place that are not the same; a side that lacks the place has `_MISSING`."""

    part: str
    name: str
    a: Any
    b: Any


def compare(a: str, b: str, runs: Path) -> tuple[dict[str, Any], list[str]]:
    """Compare two checkpoints; of two runs the first step that both have saved and that differs, and the logs.

    Args:
        a, b: a file, a run directory, `last` or `best`.
        runs: folder with the runs of one name.

    Returns:
        The record, and warnings. `same` is whether what was saved and logged is the same; settings and versions may
        differ. `step` is that of the checkpoints compared last, and `log` the first logged loss that differs, or another
        value where no loss does.
    """
    both = [find.load(path, runs, prefer="last", key=key) for key, path in (("a", a), ("b", b))]
    warnings = [*both[0].warnings, *both[1].warnings]
    folders = [None if Path(given).is_file() else found.path.parent for given, found in zip((a, b), both, strict=True)]
    found, parts = differences(both[0].contents, both[1].contents)
    # Everything after the first step that differs follows from it, so earlier checkpoints tell more
    if found and folders[0] is not None and folders[1] is not None:
        others = {path.name: path for path in find.step_files(folders[1])}
        for path in reversed(find.step_files(folders[0])):
            if path.name not in others:
                continue
            pair = [find.load(str(each), runs, prefer="last") for each in (path, others[path.name])]
            earlier, counts = differences(pair[0].contents, pair[1].contents)
            if earlier:
                both, found, parts = pair, earlier, counts
                break
    contents = [each.contents for each in both]
    settings = stored.differences(*(stored.load(each.contents["config"], str(each.path)) for each in both))
    log, lines = _logs(*folders)
    record = {
        "same": not found and log is None,
        "a": str(both[0].path),
        "b": str(both[1].path),
        "step": contents[0]["position"]["global_step"],
        "parts": parts,
        "difference": difference_record(found[0]) if found else None,
        "config": [list(row) for row in settings],
        "versions": [list(row) for row in stored.differences(*(each["versions"] for each in contents))],
        "log": log,
        "log_lines": lines,
    }
    return record, warnings


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[list[Difference], dict[str, dict[str, int]]]:
    """Where the contents of two checkpoints differ, in order, and for each part how many of its values do."""
    found: list[Difference] = []
    counts = {}
    for part in PARTS:
        ours, theirs = (dict(_leaves(_whole(part, side[part]), "")) for side in (a, b))
        places = dict.fromkeys([*ours, *theirs])
        pairs = [Difference(part, at or part, ours.get(at, _MISSING), theirs.get(at, _MISSING)) for at in places]
        unlike = [pair for pair in pairs if not same(pair.a, pair.b)]
        counts[part] = {"differ": len(unlike), "of": len(places)}
        found += unlike
    return found, counts


def _whole(part: str, value: Any) -> Any:
    """A part without what depends on how often is logged: the loss summed up since the last line of the log."""
    return {name: entry for name, entry in value.items() if name != "train"} if part == "metrics" else value


def _leaves(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Every tensor and every other value, by its dotted place."""
    if isinstance(value, Mapping):
        items: Any = value.items()
    elif isinstance(value, list | tuple) and any(isinstance(item, Tensor | Mapping | list | tuple) for item in value):
        items = enumerate(value)
    else:
        yield place, value
        return
    for key, item in items:
        yield from _leaves(item, f"{place}.{key}".lstrip("."))


def same(a: Any, b: Any) -> bool:
    """True if two values agree in every bit; any NaN is the same as any other."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return type(a) is type(b) and repr(a) == repr(b)
    return kind_of(a) == kind_of(b) and not bool(_unequal(*map(_plain, (a, b))).any())


def _plain(tensor: Tensor) -> Tensor:
    """A dense tensor on the CPU, complex numbers as pairs."""
    dense = tensor.detach().to("cpu")
    dense = dense if dense.layout == torch.strided else dense.to_dense()
    return torch.view_as_real(dense) if dense.is_complex() else dense


def _unequal(a: Tensor, b: Tensor) -> Tensor:
    """Where the bits of two plain tensors differ; 0.0 equals -0.0, but not its bits."""
    signs = a.signbit() != b.signbit() if a.is_floating_point() else False
    return ((a != b) | signs) & ~(a.isnan() & b.isnan())


def kind_of(value: Any) -> str | None:
    """Shape and dtype of a tensor, an empty string for another value, None for a missing one."""
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return None if value is _MISSING else ""


def difference_record(difference: Difference) -> dict[str, Any]:
    """A difference for programs: where, `a` and `b` as shape and dtype, and the amount."""
    a, b = difference.a, difference.b
    where = {"phase": difference.part, "name": difference.name}
    return {**where, "a": kind_of(a), "b": kind_of(b), "amount": amount_of(a, b)}


def amount_of(a: Any, b: Any) -> dict[str, Any] | None:
    """By how much two tensors or numbers differ; None if they cannot be subtracted.

    Returns:
        `elements` of each; `differing`, how many are not the same; `largest` absolute difference, and `relative`, the
        largest share of the larger of the two, each None if one of them is not finite; `place`, index of the first element
        that differs; `values` of both there.
    """
    if all(isinstance(each, int | float) for each in (a, b)):
        a, b = (torch.tensor(float(each), dtype=torch.float64) for each in (a, b))
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or kind_of(a) != kind_of(b):
        return None
    a, b = map(_plain, (a, b))
    unequal = _unequal(a, b)
    if not bool(unequal.any()):
        return None
    x, y = a[unequal].double(), b[unequal].double()
    apart, scale = (x - y).abs(), torch.maximum(x.abs(), y.abs())
    finite = math.isfinite(float(apart.max()))
    return {
        "elements": unequal.numel(),
        "differing": int(unequal.sum()),
        "largest": float(apart.max()) if finite else None,
        "relative": float(torch.where(scale > 0, apart / scale, 0.0).max()) if finite else None,
        "place": unequal.nonzero()[0].tolist(),
        "values": [float(x[0]), float(y[0])],
    }


def _logs(a: Path | None, b: Path | None) -> tuple[dict[str, Any] | None, int]:
    """The first logged value that differs, and how many lines both runs have; nothing of files that stand for themselves."""
    if a is None or b is None:
        return None, 0
    ours, theirs = _logged(a), _logged(b)
    unlike = [
        {"global_step": step, "split": split, "name": name, "a": value, "b": theirs[step, split][name]}
        for (step, split), values in ours.items()
        for name, value in values.items()
        if value != theirs.get((step, split), {}).get(name, value)
    ]
    # The loss first: another metric can differ in a step at which no loss was logged
    first = next((value for value in unlike if value["name"] == "loss"), unlike[0] if unlike else None)
    return first, len(ours.keys() & theirs.keys())


def _logged(checkpoints: Path) -> dict[tuple[int, str], dict[str, Any]]:
    """The log of a run by step and split, without what the clock says."""
    folder = checkpoints.parent if checkpoints.name == "checkpoints" else checkpoints
    skipped = (*HARDWARE_METRICS, "global_step", "split")
    return {
        (line["global_step"], line.get("split", "")): {
            name: value for name, value in line.items() if name not in skipped and not name.endswith("_per_s")
        }
        for line in read_records(folder / "metrics.jsonl")
    }
