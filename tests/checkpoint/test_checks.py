"""What is in a checkpoint has the types that everybody relies on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.checkpoint.file import DamagedCheckpoint, read, write, wrong_type

Make = Callable[..., dict[str, Any]]
AVERAGE = {"kind": "swa", "updates": 1, "weights": None, "calibrated": True}
AVERAGES = [
    [], {"kind": "ema"}, {"kind": "ema", "updates": 1, "weights": None}, AVERAGE | {"kind": "other"}, AVERAGE | {"updates": -1},
    AVERAGE | {"updates": 1.5}, AVERAGE | {"calibrated": 1}, AVERAGE | {"weights": {"layer.weight": "text"}},
    AVERAGE | {"weights": [torch.zeros(1)]},
]  # fmt: skip
FINGERPRINTS = [
    3, {"train": 3}, {"train": {"samples": "9", "content": "a"}}, {1: {"samples": 9, "content": "a"}},
    {"train": {"samples": 9, "content": None}},
]  # fmt: skip


def test_contents_of_a_run_are_what_they_should_be(contents: Make) -> None:
    best = {"metric": "val/accuracy", "mode": "max", "value": 1, "loss": 0.5, "global_step": 3, "epoch": 1}
    made = contents(scaler={"scale": 65536.0, "growth_interval": 2000})
    made["metrics"] |= {"best": best}
    made["averaged"] = AVERAGE | {"weights": made["model"]}
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
        (("position",), 5, "position is not a mapping"),
        (("position",), {"epoch": 0, "batch": -1, "global_step": 0}, "position.batch"),
        (("classes",), None, "classes is not a list of names"),
        (("model",), None, "model is not tensors by name"),
        (("optimizer",), None, "optimizer is not a mapping"),
        (("scheduler",), 4, "scheduler is not a mapping"),
        (("rng",), [], "rng is not a mapping"),
        (("metrics",), {}, "metrics.callbacks is not a mapping"),
        *((("metrics", "data"), value, "metrics.data is not samples and content of splits") for value in FINGERPRINTS),
        *((("averaged",), value, "averaged is not a kind, a number of updates and tensors") for value in AVERAGES),
    ],
    ids=str,
)
def test_values_of_another_type_are_named(place: tuple[str, ...], value: Any, words: str, contents: Make) -> None:
    made = contents()
    inner = made
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    assert words in wrong_type(made)


def test_a_file_with_such_a_value_is_refused(tmp_path: Path, contents: Make) -> None:
    write(tmp_path / "odd.safetensors", contents(position={}))
    with pytest.raises(DamagedCheckpoint, match=r"odd.safetensors: is not a checkpoint of runner's: position.epoch"):
        read(tmp_path / "odd.safetensors")
