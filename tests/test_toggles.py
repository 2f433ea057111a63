"""Every toggle, and every two of them together, train; stopped in the middle and resumed, they end with the same bits.

The runs are those of the program from where the command line has been composed: composing takes longer than they do.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import runner.train
from runner.checkpoint.file import read
from runner.config.app import Composition
from runner.config.overrides import canonical

# Of torch's compiler, looking through what it resumes with.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

MODEL = """
from torch import nn

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
"""
# 22 training samples: five batches of 4 and one of 2 an epoch.
SMALL = (
    "data=synthetic", "data.dataset.samples=24", "data.image_size=8", "data.batch_size=4", "data.num_workers=0",
    "data.prefetch=1", "evaluate.every_epochs=null", "evaluate.test=false", "scheduler=constant", "callbacks=none",
    "epochs=null", "threads=1", "logger=none", "log.progress=false", "log.curves=false", "log.every_steps=50", "trust=[tiny_model]",
)  # fmt: skip
STEPS, STOP = 7, 2
TOGGLES: dict[str, dict[str, Any]] = {
    "amp=bf16": {"amp": "bf16"},
    "amp=fp16": {"amp": "fp16"},
    "channels_last=true": {"channels_last": True},
    "activation_checkpointing=true": {"activation_checkpointing": True},
    "accumulate=2": {"accumulate": 2},
    "grad_clip.norm=0.1": {"grad_clip.norm": 0.1},
    "optimizer.fused=true": {"optimizer.fused": True},
    "optimizer.foreach=true": {"optimizer.foreach": True},
    "deterministic=true": {"deterministic": True},
    "model.dropout=0.3": {"model.dropout": 0.3},
    "data.placement=disk": {"data.placement": "disk"},
    "freeze=blocks.0@3": {"freeze": "blocks.0@3"},  # trained from a step on that comes after the stop
}
EXCLUSIVE = [{"amp=bf16", "amp=fp16"}, {"optimizer.fused=true", "optimizer.foreach=true"}]
# What changes where and how things are kept and computed, but nothing about what is computed.
WITHOUT_A_TRACE = {
    "activation_checkpointing=true", "optimizer.fused=true", "deterministic=true", "data.placement=disk",
}  # fmt: skip
SINGLES = [(name,) for name in TOGGLES]
PAIRS = [pair for pair in itertools.combinations(TOGGLES, 2) if set(pair) not in EXCLUSIVE]


@pytest.fixture(scope="module")
def composed() -> list[Composition]:
    """The composition of `SMALL`, once it is made."""
    return []


@pytest.fixture(scope="module")
def digests() -> dict[tuple[str, ...], str]:
    """Weights of the runs that were not stopped, by their toggles."""
    return {}


@pytest.fixture
def call(
    run: Callable[..., Any], composed: list[Composition], workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., dict[str, Any]]]:
    """Train with some keys set, and give the summary."""
    (workdir / "tiny_model.py").write_text(MODEL, encoding="utf-8")
    monkeypatch.syspath_prepend(str(workdir))
    if not composed:
        found = runner.train.current
        monkeypatch.setattr(runner.train, "current", lambda cfg: composed.append(found(cfg)) or composed[0])
        own = ("model._target_=tiny_model.Tiny", "~model.width", "model.dropout=0.0", "max_steps=1")
        result = run("train", *SMALL, *own)
        assert result.status == 0, result.err + result.out
    numbers = itertools.count()

    def train(**settings: Any) -> dict[str, Any]:
        values = copy.deepcopy(composed[0].values)
        for key, value in settings.items():
            *parents, last = key.split(".")
            section = values
            for parent in parents:
                section = section[parent]
            section[last] = value
        words = canonical(f"{key}={json.dumps(value)}" for key, value in settings.items())
        folder = workdir / f"run_{next(numbers)}"
        composition = dataclasses.replace(composed[0], values=values, words=words, run_dir=folder)
        monkeypatch.setattr(runner.train, "current", lambda cfg: composition)
        shown = io.StringIO()
        with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
            try:
                runner.train.run(None)  # type: ignore[arg-type]
            except SystemExit:
                pytest.fail(shown.getvalue())
        return {**json.loads((folder / "summary.json").read_text()), "shown": shown.getvalue(), "folder": folder}

    yield train
    sys.modules.pop("tiny_model", None)


def settings(names: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for name in names for key, value in TOGGLES[name].items()}


def digest(names: tuple[str, ...], call: Callable[..., Any], digests: dict[tuple[str, ...], str]) -> str:
    """Weights after all steps without a stop."""
    if names not in digests:
        digests[names] = call(max_steps=STEPS, **settings(names))["weights_sha256"]
    return digests[names]


@pytest.mark.parametrize("names", [*SINGLES, *PAIRS], ids=" ".join)
def test_stopped_and_resumed_it_ends_with_the_bits_of_a_run_that_was_not(
    names: tuple[str, ...], call: Callable[..., Any], digests: dict[tuple[str, ...], str]
) -> None:
    whole = digest(names, call, digests)
    part = call(max_steps=STOP, **settings(names))
    assert part["global_step"] == STOP
    assert part["weights_sha256"] != whole
    rest = call(max_steps=STEPS, ckpt_path=str(part["folder"]))
    assert rest["resumed_from"] is not None
    assert rest["global_step"] == STEPS
    assert rest["weights_sha256"] == whole
    for name in WITHOUT_A_TRACE.intersection(names):
        others = tuple(other for other in names if other != name)
        if not (name == "optimizer.fused=true" and "optimizer.foreach=true" in others):
            assert digest(others, call, digests) == whole, f"{name} changes a bit"


@pytest.mark.parametrize("name", sorted(TOGGLES.keys() - WITHOUT_A_TRACE))
def test_what_changes_the_computation_has_an_effect(
    name: str, call: Callable[..., Any], digests: dict[tuple[str, ...], str]
) -> None:
    assert digest((name,), call, digests) != digest((), call, digests)


def test_the_header_says_what_was_chosen_and_why(call: Callable[..., Any]) -> None:
    shown = call(max_steps=1, activation_checkpointing=True)["shown"]
    rows = {line.split()[0]: line for line in shown.splitlines() if line.startswith("  ")}
    assert "recomputed in 2 of 2 blocks, Block" in rows["activations"]
    assert "(activation_checkpointing=true: " in rows["activations"]
    assert "fused" in rows["update"]
    assert "(auto: AdamW has one kernel for the whole update on cpu)" in rows["update"]
    shown = call(max_steps=1, **{"optimizer.foreach": True, "compiler.mode": "max-autotune"})["shown"]
    rows = {line.split()[0]: line for line in shown.splitlines() if line.startswith("  ")}
    assert "activations" not in rows
    assert "foreach" in rows["update"]
    assert "(optimizer.foreach=true)" in rows["update"]
    assert "warning: compiler has no effect: nothing is compiled, as compile=false" in shown


def test_a_compiled_model_is_timed_apart_and_loads_and_gives_plain_checkpoints(call: Callable[..., Any]) -> None:
    node = {"_target_": "runner.models.mlp.MLP", "hidden": [8]}
    small: dict[str, Any] = {"model": node, "data.drop_last": True, "activation_checkpointing": "layers"}
    plain = call(max_steps=STOP, **small)
    compiled = call(max_steps=STOP + 2, ckpt_path=str(plain["folder"]), compile=True)
    assert "  compiled" in compiled["shown"]
    assert re.search(r"compiled in [\d.]+ s by the end of step 3: 1 graph\n", compiled["shown"])
    assert 0 < compiled["compile_s"] < compiled["wall_s"]
    assert compiled["graph_breaks"] == 0
    again = call(max_steps=STOP + 3, ckpt_path=str(compiled["folder"]), compile=False)
    assert again["global_step"] == STOP + 3
    assert "compile_s" not in again
    weights = [read(run["folder"] / "checkpoints" / "last.pt")["model"] for run in (plain, compiled, again)]
    assert weights[0].keys() == weights[1].keys() == weights[2].keys()
    reference = read(call(max_steps=STOP + 2, **small)["folder"] / "checkpoints" / "last.pt")["model"]
    assert all(torch.allclose(weights[1][name], reference[name], atol=1e-3) for name in reference)


def test_a_compiled_step_resumes_with_the_same_bits(call: Callable[..., Any]) -> None:
    keys = {
        "data.drop_last": True,
        "amp": "bf16",
        "grad_clip.norm": 1.0,
        "accumulate": 2,
        "activation_checkpointing": True,
    }
    plain = read(call(max_steps=4, **keys)["folder"] / "checkpoints" / "last.pt")["model"]
    keys["compile"] = "step"
    whole = call(max_steps=4, **keys)
    rest = call(max_steps=4, ckpt_path=str(call(max_steps=2, **keys)["folder"]))
    # The gradient of Tiny's largest values is NaN unless compiled code rounds where autocast does.
    assert "forward and loss together" in rest["shown"]
    assert rest["weights_sha256"] == whole["weights_sha256"]
    assert whole["compile_s"] > 0
    compiled = read(rest["folder"] / "checkpoints" / "last.pt")["model"]
    norm = "blocks.0.layers.1."
    assert int(compiled[norm + "num_batches_tracked"]) == 5 + 2, "an epoch of 5 batches, and 2 of the next"
    assert torch.allclose(compiled[norm + "running_mean"], plain[norm + "running_mean"], atol=0.05)
    assert torch.allclose(compiled[norm + "running_var"], plain[norm + "running_var"], rtol=0.1)


def test_what_an_evaluation_has_no_use_for_is_said(call: Callable[..., Any], run: Callable[..., Any]) -> None:
    folder = call(max_steps=1)["folder"]
    words = ("eval", f"ckpt_path={folder}", "split=val", "threads=1", "trust=[tiny_model]", "amp=bf16", "tf32=true")
    result = run(*words, "activation_checkpointing=true", "compile=true")
    assert result.status == 0, result.err
    said = [line for line in result.out.splitlines() if line.startswith("warning: ")]
    assert [line.split()[1].split("=")[0] for line in said] == ["tf32", "activation_checkpointing", "compile"]
