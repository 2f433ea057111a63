"""What is in a checkpoint has the types that everybody relies on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.checkpoint.checks import wrong_type
from runner.checkpoint.file import DamagedCheckpoint, read, write

Make = Callable[..., dict[str, Any]]


def test_contents_of_a_run_are_what_they_should_be(contents: Make) -> None:
    best = {"metric": "val/accuracy", "mode": "max", "value": 1, "loss": 0.5, "global_step": 3, "epoch": 1}
    made = contents(scaler={"scale": 65536.0, "growth_interval": 2000})
    made["metrics"] |= {"best": best}
    made["model"]["head._extra_state"] = {"anything": 1}
    assert wrong_type(made) == ""


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        (("position", "epoch"), 2**60, "position.epoch"),
        (("position", "batch"), True, "position.batch"),
        (("position", "evaluation_due"), 1, "position.evaluation_due"),
        (("position", "turns"), [[5, 1], [5, 2]], "position.turns is not a list of steps and epochs, in order"),
        (("position", "turns"), [[5, "1"]], "position.turns is not a list of steps and epochs, in order"),
        (("position", "turns"), 5, "position.turns is not a list of steps and epochs, in order"),
        (("metrics", "best"), {"metric": "x"}, "metrics.best.mode"),
        (("metrics", "best"), [], "metrics.best is not a mapping"),
        (("metrics", "last"), {"loss": "low"}, "metrics.last is not numbers by name"),
        (("metrics", "images"), [3, 8], "metrics.images is not channels, height and width"),
        (("metrics", "images"), [3, 8, 8.0], "metrics.images is not channels, height and width"),
        (("metrics", "images"), [3, 2**20, 2**20], "metrics.images is not channels, height and width"),
        (("scaler",), {"scale": None}, "scaler is not numbers by name"),
        (("model", "layer.weight"), [1.0], "model is not tensors by name"),
        (("versions",), {1: "2"}, "versions is not a mapping by name"),
    ],
)
def test_values_of_another_type_are_named(
    place: tuple[str, ...], value: Any, words: str, tmp_path: Path, contents: Make
) -> None:
    made = contents()
    inner = made
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    write(tmp_path / "odd.safetensors", made)
    with pytest.raises(DamagedCheckpoint, match=words):
        read(tmp_path / "odd.safetensors")
