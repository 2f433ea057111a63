"""Runs that train low-rank adapters instead of the weights of their model."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from extended import some
from extras import needs
from safetensors.torch import load_file
from tiny_runs import words_of

from runner.api import load
from runner.config.composition import Composition
from runner.config.load import resolve_config
from runner.config.schema import Train
from runner.runtime.blocks import repeated_blocks
from runner.train import build_run

pytestmark = needs("lora")

# 26 samples of ten classes to train on: four batches an epoch.
SMALL = (
    "data=synthetic", "data.dataset.samples=32", "data.image_size=8", "data.batch_size=8", "data.num_workers=0", "model=vit_tiny",
    "model.dim=12", "model.depth=2", "epochs=2", "threads=1", "logger=none", "log.progress=false", "log.curves=false",
    "callbacks=none", "device=cpu",
)  # fmt: skip
NORMS: dict[str, Any] = {"model": "resnet18_cifar", "model.width": 4, "adapters.modules": ["*.conv1"]}


@pytest.fixture
def call(accepted: Any) -> Callable[..., Any]:
    """Train with adapters and some keys set."""
    return lambda **settings: accepted("train", *words_of(words(settings), settings))


@pytest.fixture
def built(compose: Callable[..., Composition]) -> Callable[..., Any]:
    """What a run with adapters and some keys set trains."""
    return lambda **settings: build_run(resolve_config(compose(*words_of(words(settings), settings)), Train))


def words(settings: dict[str, Any]) -> tuple[str, ...]:
    """The words of a small run, without those of the transformer for another model."""
    own = tuple(word for word in SMALL if "model" not in settings or not word.startswith("model."))
    return own if "adapters" in settings else (*own, "adapters=lora")


def unlike(run: Any, other: Any) -> set[str]:
    """Names of the tensors of the model that differ between the last checkpoints of two runs."""
    model = run.last["model"]
    return {name for name, tensor in other.last["model"].items() if not torch.equal(model[name], tensor)}


def test_the_header_says_how_many_weights_are_trained(accepted: Any) -> None:
    shown = accepted("train", "model=vit_tiny", "adapters=lora", "dry_run=true", "threads=1").out
    assert "LoRA, rank 4, alpha 8" in shown
    assert "0.76% of 2,693,962 weights" in shown


@pytest.mark.parametrize("model", ["vit_tiny", "resnet18_cifar"])
def test_adapters_and_head_are_trained_and_nothing_else_changes(call: Any, model: str) -> None:
    settings = {"adapters.dropout": 0.1, **(NORMS if model == "resnet18_cifar" else {})}
    short, long = call(max_steps=1, epochs=None, **settings), call(**settings)
    changed = unlike(short, long)
    assert {"head.weight", "head.bias"} < changed
    assert {name for name in changed if ".lora_" not in name} == {"head.weight", "head.bias"}
    assert {name for name in long.last["model"] if ".lora_" in name} <= changed  # and none of BatchNorm's statistics
    groups = long.last["optimizer"]["param_groups"]
    assert sum(len(group["params"]) for group in groups) == len(changed)


@pytest.mark.parametrize(
    "settings",
    some([{"ema": 0.9, "adapters.dropout": 0.2}, {**NORMS, "amp": "bf16", "swa": 1, "epochs": 3}], 0),
    ids=len,
)
def test_a_killed_run_ends_with_the_same_bits(call: Any, killed: Any, accepted: Any, settings: dict[str, Any]) -> None:
    settings = {**settings, "checkpoint.every_steps": 1, "checkpoint.min_seconds": 0}
    whole = call(**settings)
    own = [word for word in words_of(words(settings), settings) if word != "callbacks=none"]
    directory = killed(5, *own)
    resumed = accepted("train", f"ckpt_path={directory}", "callbacks=none", "logger=none", "log.progress=false")
    assert "resumed from" in resumed.out
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]
    average, other = (run.last["averaged"]["weights"] for run in (whole, resumed))
    assert average.keys() == whole.last["model"].keys()
    assert all(torch.equal(average[name], other[name]) for name in average)
    assert any(not torch.equal(average[name], whole.last["model"][name]) for name in average if ".lora_" in name)


def test_a_run_starts_from_the_weights_of_a_base_run(call: Any, rejected: Any) -> None:
    base = call(adapters="none")
    tuned = call(init_from=str(base.directory), seed=1)
    assert "0 skipped" not in tuned.out
    kept = load_file(base.directory / "checkpoints" / "best.safetensors")
    model = tuned.last["model"]
    for name in ("blocks.0.attention.qkv.weight", "blocks.1.mlp.0.weight", "positions"):
        layer = name.replace("qkv.", "qkv.base_layer.")
        assert torch.equal(model[layer], next(value for key, value in kept.items() if key.endswith(name)))
    for words in ((), ("adapters=lora",)):
        refused = rejected("train", *SMALL, *words, f"init_from={tuned.directory}")
        assert f"export format=safetensors ckpt_path={tuned.directory}/checkpoints/best.safetensors" in refused.err


def test_eval_predict_load_and_export_use_the_adapters(call: Any, json_of: Any, accepted: Any, tmp_path: Path) -> None:
    run = call(**{"optimizer.lr": 0.05})
    path = f"ckpt_path={run.directory}"
    val = json_of("eval", path, "split=val", "device=cpu")["metrics"]
    assert val["loss"] == pytest.approx(run.summary["best"]["loss"])
    trained, images = load(run.directory, device="cpu"), torch.randn(5, 3, 8, 8)
    weights = trained.model.state_dict()
    accepted("predict", path, "input=val", "logits=true", "output=adapted.jsonl", "device=cpu")
    exported = json_of("export", path, "format=safetensors", f"output={tmp_path}", "tolerance=1e-5")
    assert {each["format"] for each in exported["comparison"]} == {"safetensors"}
    # The file has the names of a model without adapters, and starts one that gives the same outputs
    merged = load_file(tmp_path / "model.safetensors")
    name = "blocks.0.attention.qkv"
    difference = weights[f"{name}.lora_B.default.weight"] @ weights[f"{name}.lora_A.default.weight"] * 8 / 4
    assert difference.abs().max() > 1e-3
    torch.testing.assert_close(merged[f"{name}.weight"], weights[f"{name}.base_layer.weight"] + difference)
    plain = call(adapters="none", init_from=str(tmp_path / "model.safetensors"), max_steps=1, epochs=None, lr=1e-12)
    with torch.inference_mode():
        outputs = load(plain.directory, device="cpu").model(images)
        torch.testing.assert_close(outputs, trained.model(images), rtol=1e-4, atol=1e-5)
    accepted("predict", f"ckpt_path={plain.directory}", "input=val", "logits=true", "output=plain.jsonl", "device=cpu")
    first, second = (
        torch.tensor([json.loads(line)["logits"] for line in Path(f"{each}.jsonl").read_text().splitlines()])
        for each in ("adapted", "plain")
    )
    torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-4)


def test_freeze_and_groups_apply_to_adapters(built: Any) -> None:
    settings = {"freeze": ["blocks.0.*", "*.lora_A.*"], "adapters.trained": ["head", "*norm1"]}
    training = built(**settings, **{"optimizer.no_decay": ["*.lora_B.*"]})
    trained = [name for name, weight in training.model.named_parameters() if weight.requires_grad]
    norm = [f"blocks.1.norm1.{kind}" for kind in ("weight", "bias")]
    assert trained == [*norm, "blocks.1.attention.qkv.lora_B.default.weight", "head.weight", "head.bias"]
    sizes = {group["weight_decay"]: len(group["params"]) for group in training.state.optimizer.param_groups}
    assert sizes == {0.05: 4, 0.0: 1}


def test_all_layers_but_those_that_are_trained_whole_can_be_adapted(built: Any) -> None:
    adapted = built(**{"adapters.modules": ["*"], "adapters.rank": 2})
    names = {name.partition(".lora_A")[0] for name, _ in adapted.model.named_parameters() if ".lora_A" in name}
    blocks = {
        f"blocks.{block}.{layer}"
        for block in (0, 1)
        for layer in ("attention.qkv", "attention.project", "mlp.0", "mlp.3")
    }
    assert names == {"embed", *blocks}
    assert [name for name, _ in repeated_blocks(adapted.model)] == ["blocks.0", "blocks.1"]


def test_another_rank_is_refused_when_resuming(call: Any, rejected: Any) -> None:
    run = call(max_steps=1, epochs=None)
    for key in ("adapters.rank=2", "adapters.modules=[*.project]"):
        refused = rejected("train", f"ckpt_path={run.directory}", key, "max_steps=2")
        assert key.partition("=")[0] in refused.err
        assert "cannot change when resuming" in refused.err


@pytest.mark.parametrize(
    ("given", "key", "reason"),
    [
        (["adapters.modules=[*.kqv]"], "adapters.modules", "blocks.0.attention.qkv"),
        (["adapters.modules=[*.norm1]"], "adapters.modules", "Linear or Conv2d"),
        (["adapters.modules=[]"], "adapters.modules", "names no layer"),
        (["adapters.rank=0"], "adapters.rank", "0"),
        (["adapters.trained=[haed]"], "adapters.trained", "head"),
        (["adapters=none", "adapters.alpha=2"], "adapters", "adapters.rank"),
        (["model=resnet18_cifar"], "adapters.modules", "stem"),
    ],
    ids=str,
)
def test_what_cannot_be_adapted_is_a_sentence(rejected: Any, given: list[str], key: str, reason: str) -> None:
    own = [word for word in SMALL if not word.startswith("model") or not given[0].startswith("model")]
    refused = (
        rejected("train", *own, "adapters=lora", *given)
        if "adapters=none" not in given
        else rejected("train", *own, *given)
    )
    assert f"{key}:" in refused.err
    assert reason in refused.err


LAYERS = """
import torch
from torch import nn

class Layers(nn.Sequential):
    def __init__(self):
        super().__init__()
        self.grouped, self.dilated = nn.Conv2d(3, 3, 1, groups=3), nn.Conv2d(3, 6, 4, dilation=2)
        self.flat, self.plain = nn.Flatten(), nn.Linear(24, 8)
        self.fused, self.head = nn.TransformerEncoderLayer(8, 2, 8), nn.Linear(8, 10)

class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.norm, self.plain = nn.Parameter(torch.ones(())), nn.BatchNorm2d(3), nn.BatchNorm1d(8, affine=False)
        self.qkv, self.read = nn.Linear(192, 8), nn.Linear(8, 8)
        self.head = nn.Sequential(nn.BatchNorm1d(8, affine=False), nn.Linear(8, 10))

    def forward(self, images):
        x = self.plain(self.qkv(self.norm(images * self.scale).flatten(1)))
        return self.head(nn.functional.linear(x, self.read.weight))
"""
NORMED = {"model": None, "+model._target_": "layers_of_kinds.Normed"}


@pytest.mark.parametrize("layer", some(["grouped", "dilated", "fused.linear1", "fused.self_attn.out_proj"], 1, 2))
def test_layers_whose_adapter_would_compute_something_else_are_refused(
    rejected: Any, own_module: Any, layer: str
) -> None:
    own_module("layers_of_kinds", LAYERS)
    given = ("model=null", "+model._target_=layers_of_kinds.Layers", "adapters=lora", f"adapters.modules=[{layer}]")
    refused = rejected("train", *(word for word in SMALL if not word.startswith("model")), *given)
    assert "adapters.modules:" in refused.err
    assert "plain, or names" in refused.err


def test_a_layer_whose_weights_are_read_without_a_call_is_refused(rejected: Any, own_module: Any) -> None:
    own_module("layers_of_kinds", LAYERS)
    settings = {**NORMED, "adapters.modules": ["qkv", "read"]}
    refused = rejected("train", *words_of(words(settings), settings))
    assert "adapters.modules: adapters of read have no effect" in refused.err


def test_statistics_of_frozen_norms_stay_in_a_model_with_weights_of_its_own(built: Any, own_module: Any) -> None:
    own_module("layers_of_kinds", LAYERS)
    training = built(**NORMED, **{"adapters.trained": ["head"]})
    training.state.train()
    norms = {name: each.training for name, each in training.model.named_modules() if hasattr(each, "running_mean")}
    assert norms == {"norm": False, "plain": False, "head.0": True}
    assert training.model.training


def test_without_peft_the_extra_is_named(rejected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *args: None if name == "peft" else found(name, *args))
    refused = rejected("train", *SMALL, "adapters=lora")
    assert "runner[lora]" in refused.err
