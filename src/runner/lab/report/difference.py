"""The difference of two runs: config, environment, metrics and weights."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.config.keys import flatten
from runner.lab.report.reading import MEASURED, Run

_NOT_COMPARED = ("command", "repeating", "variables.SLURM_JOB_ID")


@dataclass(frozen=True)
class TensorDifference:
    """A tensor of the weights that differs: the largest absolute difference, NaN if the shapes differ or one run lacks it."""

    name: str
    largest: float
    note: str


@dataclass(frozen=True)
class Difference:
    """The differences of two runs: for each part, (name, value of the first, value of the second)."""

    config: list[tuple[str, Any, Any]]
    environment: list[tuple[str, Any, Any]]
    metrics: list[tuple[str, Any, Any]]
    sha256: tuple[str | None, str | None]
    checkpoints: tuple[Path | None, Path | None]
    tensors: list[TensorDifference]
    tensors_equal: int
    note: str  # why the weights were not compared; empty if they were


def difference(first: Run, second: Run) -> Difference:
    """Compare two runs; the weights are those of their newest checkpoints."""
    metrics = [run.metrics | run.speed | {"time_s": run.value("time_s")} for run in (first, second)]
    ordered = dict.fromkeys([*metrics[0], *metrics[1]])
    numbers = [
        (name, metrics[0].get(name), metrics[1].get(name)) for name in sorted(ordered, key=MEASURED.__contains__)
    ]
    environment = differing(flatten(first.environment), flatten(second.environment))
    checkpoints = (_checkpoint(first.path), _checkpoint(second.path))
    tensors, equal, note = _compare(checkpoints[0], checkpoints[1])
    return Difference(
        config=differing(first.config, second.config),
        environment=[each for each in environment if not each[0].startswith(_NOT_COMPARED)],
        metrics=numbers,
        sha256=(first.summary.get("weights_sha256"), second.summary.get("weights_sha256")),
        checkpoints=checkpoints,
        tensors=tensors,
        tensors_equal=equal,
        note=note,
    )


def differing(first: dict[str, Any], second: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """The keys that have another value, with both values; None for one that is not there."""
    keys = dict.fromkeys([*first, *second])
    return [(key, first.get(key), second.get(key)) for key in keys if first.get(key) != second.get(key)]


def _checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint of a run, if it is one file."""
    path = folder / "checkpoints" / "last.safetensors"
    return path if path.is_file() else None


def _compare(first: Path | None, second: Path | None) -> tuple[list[TensorDifference], int, str]:
    """The tensors that differ, the largest first, and how many are equal."""
    # Weights are optional: the rest of the comparison is useful without them
    if first is None or second is None:
        which = "neither run" if first is second else "the first run" if first is None else "the second run"
        has = "has a last.safetensors" if first is second else "has no last.safetensors"
        return [], 0, f"{which} {has}, so no weights were compared"
    import numpy as np
    from safetensors import SafetensorError

    try:
        one, other = _weights_in(first), _weights_in(second)
        found: list[TensorDifference] = []
        equal = 0
        for name in dict.fromkeys([*one, *other]):
            # Tensors on one side only cannot be subtracted, and say that the models differ
            if name not in one or name not in other:
                which = "second" if name not in one else "first"
                found.append(TensorDifference(name, math.nan, f"only in the {which}"))
                continue
            before, after = one[name](), other[name]()
            if before.shape != after.shape:
                found.append(TensorDifference(name, math.nan, f"{list(before.shape)} and {list(after.shape)}"))
            elif np.array_equal(before, after, equal_nan=True):
                equal += 1
            else:
                largest = float(np.max(np.abs(before.astype(np.float64) - after.astype(np.float64))))
                relative = largest / max(float(np.max(np.abs(before))), 1e-30)
                found.append(TensorDifference(name, largest, f"{relative:.2g} of the largest weight"))
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        return [], 0, f"the weights cannot be compared: {error}"
    # Tensors that cannot be compared come first, then the largest differences.
    found.sort(key=lambda each: (not math.isnan(each.largest), -each.largest if each.largest == each.largest else 0))
    return found, equal, ""


def _weights_in(path: Path) -> dict[str, Callable[[], Any]]:
    """A function that reads each tensor of the model in a checkpoint as a NumPy array, by its name."""
    from safetensors import safe_open

    file: Any = safe_open(path, framework="numpy")
    model = json.loads((file.metadata() or {}).get("model", "{}"))
    names = {name: found["$tensor"] for name, found in model.items() if isinstance(found, dict) and "$tensor" in found}

    def read(name: str) -> Any:
        if not file.get_slice(name).get_dtype().startswith(("BF", "F8")):
            return file.get_tensor(name)
        in_torch: Any = safe_open(path, framework="pt")  # NumPy has no such numbers
        return in_torch.get_tensor(name).float().numpy()

    return {name: functools.partial(read, stored) for name, stored in names.items()}
