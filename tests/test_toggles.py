"""Every toggle, and every pair of toggles, trains; a run that is stopped and resumed ends with the same bits.

The pairs are those of a covering array: each row turns on several toggles, and every pair is in some row.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from extended import some
from tiny_runs import words_of

from runner.checkpoint.file import read

# Of torch's compiler, looking through what it resumes with.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

MODEL = """
from torch import nn

from runner.data.sources.arrays import ImageArrays
from runner.data.sources.synthetic import synthetic

class Block(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Dropout(dropout), nn.Conv2d(width, width, 1),
        )

    def forward(self, features):
        return features + self.layers(features)

class Tiny(nn.Module):
    def __init__(self, in_channels, num_classes, dropout=0.0):
        super().__init__()
        self.stem = nn.Conv2d(in_channels, 4, 3, padding=1)
        self.blocks = nn.Sequential(Block(4, dropout), Block(4, dropout))
        self.head = nn.Linear(4, num_classes)

    def forward(self, images):
        return self.head(self.blocks(self.stem(images)).amax(dim=(2, 3)))

class Sharded(ImageArrays):
    block_ends = [5, 6, 15, 24]

def sharded(image_size, **arguments):
    made = synthetic(image_size=image_size, **arguments)
    images = made["train"]
    return {**made, "train": Sharded(images.images, images.targets, images.classes)}
"""
QUIET = ("threads=1", "logger=none", "log.progress=false", "log.curves=false")
# 22 training samples: five batches of 4 and one of 2 an epoch.
SMALL = (
    "data=synthetic", "data.dataset.samples=24", "data.image_size=8", "data.batch_size=4", "data.num_workers=0",
    "data.prefetch=1", "data.dataset._target_=tiny_model.sharded", "model._target_=tiny_model.Tiny", "~model.width",
    "model.dropout=0.0", "evaluate.every_epochs=null", "evaluate.test=false", "scheduler=constant", "callbacks=none",
    "epochs=null", "log.every_steps=50", *QUIET,
)  # fmt: skip
STEPS, STOP = 7, 2
# Each factor with its levels, the first of which is the default.
FACTORS: list[list[dict[str, Any]]] = [
    [{}, {"amp": "bf16"}, {"amp": "fp16"}],
    [{}, {"optimizer.fused": True}, {"optimizer.foreach": True}],
    [{}, {"channels_last": True}],
    [{}, {"activation_checkpointing": True}],
    [{}, {"accumulate": 2}],
    [{}, {"grad_clip.norm": 0.1}],
    [{}, {"deterministic": True}],
    [{}, {"model.dropout": 0.3}],
    [{}, {"data.placement": "disk"}],
    [{}, {"freeze": "blocks.0@3"}],  # trained from a step on that comes after the stop
    [{}, {"data.shuffle": "blocks", "data.shuffle_window": 2}],
]
# Toggles that change where and how values are kept and computed, but no result.
EXACT = {"activation_checkpointing", "optimizer.fused", "deterministic", "data.placement"}


def covering_array() -> list[tuple[int, ...]]:
    """Rows of levels such that every two levels of every two factors occur together in a row, found greedily."""
    places = range(len(FACTORS))
    pairs = {
        ((i, a), (j, b))
        for i, j in itertools.combinations(places, 2)
        for a in range(len(FACTORS[i]))
        for b in range(len(FACTORS[j]))
    }
    rows = []
    while pairs:
        row = dict(min(pairs))
        for place in sorted(set(places) - row.keys()):
            gain = [
                sum(tuple(sorted([(place, level), other])) in pairs for other in row.items())
                for level in range(len(FACTORS[place]))
            ]
            row[place] = gain.index(max(gain))
        pairs -= set(itertools.combinations(sorted(row.items()), 2))
        rows.append(tuple(row[place] for place in places))
    return rows


def name_of(row: tuple[int, ...]) -> str:
    return " ".join(f"{key}={value}" for key, value in settings(row).items()) or "defaults"


def settings(row: tuple[int, ...]) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    for levels, level in zip(FACTORS, row, strict=True):
        chosen |= levels[level]
    return chosen


def alone(place: int, level: int) -> tuple[int, ...]:
    """The row with one toggle."""
    return tuple(level if place == other else 0 for other in range(len(FACTORS)))


SINGLES = [alone(place, level) for place, levels in enumerate(FACTORS) for level in range(1, len(levels))]


def test_the_covering_array_has_every_pair_of_toggles() -> None:
    rows = covering_array()
    assert len(rows) <= 16
    for first, second in itertools.combinations(range(len(FACTORS)), 2):
        together = {(row[first], row[second]) for row in rows}
        assert together == set(itertools.product(range(len(FACTORS[first])), range(len(FACTORS[second]))))


@pytest.fixture
def call(accepted: Any, own_module: Any) -> Callable[..., dict[str, Any]]:
    """Train with some keys set, or resume with them; gives the summary, what was shown, and the directory."""
    own_module("tiny_model", MODEL)

    def train(**settings: Any) -> dict[str, Any]:
        result = accepted("train", *words_of(QUIET if "ckpt_path" in settings else SMALL, settings))
        return {**result.summary, "shown": result.out, "folder": result.directory}

    return train


def digest(chosen: dict[str, Any], train_once: Any) -> str:
    """Weights after all steps without a stop."""
    return str(train_once(*words_of(SMALL, {"max_steps": STEPS, **chosen})).summary["weights_sha256"])


ROWS = list(dict.fromkeys([*covering_array(), *SINGLES]))


@pytest.mark.parametrize("row", some(ROWS, *range(len(covering_array()))), ids=name_of)
def test_stopped_and_resumed_it_ends_with_the_bits_of_a_run_that_was_not(
    row: tuple[int, ...], call: Any, train_once: Any
) -> None:
    chosen = settings(row)
    whole = digest(chosen, train_once)
    part = call(max_steps=STOP, **chosen)
    assert part["global_step"] == STOP
    assert part["weights_sha256"] != whole
    rest = call(max_steps=STEPS, ckpt_path=str(part["folder"]))
    assert rest["resumed_from"] is not None
    assert rest["global_step"] == STEPS
    assert rest["weights_sha256"] == whole
    inexact = {key: value for key, value in chosen.items() if key not in EXACT}
    if inexact != chosen:
        assert digest(inexact, train_once) == whole, f"{chosen.keys() - inexact.keys()} change the weights"


@pytest.mark.parametrize("row", [row for row in SINGLES if not EXACT & settings(row).keys()], ids=name_of)
def test_what_changes_the_computation_has_an_effect(row: tuple[int, ...], call: Any, train_once: Any) -> None:
    assert digest(settings(row), train_once) != digest({}, train_once)


def test_the_header_says_what_was_chosen_and_why(call: Any) -> None:
    shown = call(max_steps=1, activation_checkpointing=True)["shown"]
    rows = {line.split()[0]: line for line in shown.splitlines() if line.startswith("  ")}
    assert "recomputed in 2 blocks, Block" in rows["activations"]
    assert "(activation_checkpointing=true)" in rows["activations"]
    assert "fused" in rows["update"]
    assert "(auto: AdamW has one kernel for the whole update on cpu)" in rows["update"]
    shown = call(max_steps=1, **{"optimizer.foreach": True, "compiler.mode": "max-autotune"})["shown"]
    rows = {line.split()[0]: line for line in shown.splitlines() if line.startswith("  ")}
    assert "activations" not in rows
    assert "foreach" in rows["update"]
    assert "(optimizer.foreach=true)" in rows["update"]
    assert "warning: compiler has no effect: nothing is compiled, as compile=false" in shown


@pytest.mark.extended
def test_a_compiled_model_is_timed_apart_and_loads_and_gives_plain_checkpoints(call: Any) -> None:
    small = {"model": "mlp", "model.hidden": [8], "data.drop_last": True, "activation_checkpointing": "layers"}
    plain = call(max_steps=STOP, **small)
    compiled = call(max_steps=STOP + 2, ckpt_path=str(plain["folder"]), compile=True)
    assert "  compiled" in compiled["shown"]
    assert re.search(r"compiled in [\d.]+ s by the end of step 3: 1 graph, 0 graph breaks\n", compiled["shown"])
    assert 0 < compiled["compile_s"] < compiled["wall_s"]
    assert compiled["graph_breaks"] == 0
    again = call(max_steps=STOP + 3, ckpt_path=str(compiled["folder"]), compile=False)
    assert again["global_step"] == STOP + 3
    assert "compile_s" not in again
    weights = [read(run["folder"] / "checkpoints" / "last.safetensors")["model"] for run in (plain, compiled, again)]
    assert weights[0].keys() == weights[1].keys() == weights[2].keys()
    reference = read(call(max_steps=STOP + 2, **small)["folder"] / "checkpoints" / "last.safetensors")["model"]
    assert all(torch.allclose(weights[1][name], reference[name], atol=1e-3) for name in reference)


@pytest.mark.extended
def test_a_compiled_step_resumes_with_the_same_bits(call: Any) -> None:
    keys: dict[str, Any] = {"data.drop_last": True, "amp": "bf16", "grad_clip.norm": 1.0, "accumulate": 2}
    keys["activation_checkpointing"] = True
    plain = read(call(max_steps=4, **keys)["folder"] / "checkpoints" / "last.safetensors")["model"]
    keys["compile"] = "step"
    whole = call(max_steps=4, **keys)
    rest = call(max_steps=4, ckpt_path=str(call(max_steps=2, **keys)["folder"]))
    # The gradient of Tiny's largest values is NaN unless compiled code rounds where autocast does.
    assert "forward and loss together" in rest["shown"]
    assert rest["weights_sha256"] == whole["weights_sha256"]
    assert whole["compile_s"] > 0
    compiled = read(rest["folder"] / "checkpoints" / "last.safetensors")["model"]
    norm = "blocks.0.layers.1."
    assert int(compiled[norm + "num_batches_tracked"]) == 5 + 2, "an epoch of 5 batches, and 2 of the next"
    assert torch.allclose(compiled[norm + "running_mean"], plain[norm + "running_mean"], atol=0.05)
    assert torch.allclose(compiled[norm + "running_var"], plain[norm + "running_var"], rtol=0.1)


def test_what_an_evaluation_has_no_use_for_is_said(call: Any, accepted: Any) -> None:
    folder = call(max_steps=1)["folder"]
    words = ("eval", f"ckpt_path={folder}", "split=val", "threads=1", "amp=bf16", "tf32=true")
    result = accepted(*words, "activation_checkpointing=true", "compile=true")
    said = [line.split()[1].split("=")[0] for line in result.out.splitlines() if line.startswith("warning: ")]
    said = [key for key in said if key != "amp"]  # reported on CPUs that emulate bf16
    assert said == ["tf32", "activation_checkpointing", "compile"]
