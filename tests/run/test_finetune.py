"""Heads, initial weights and frozen parts of whole runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from extended import some
from tiny_runs import words_of

from runner.config.composition import Composition
from runner.config.load import resolve_config
from runner.config.schema import Train
from runner.run import finetune
from runner.run.run import training_flops
from runner.train import build_run

# 24 samples of three classes: six batches of 4 an epoch, less those of validation and test.
SMALL = (
    "data=synthetic", "data.dataset.samples=24", "data.image_size=8", "data.batch_size=4", "data.num_workers=0",
    "model=resnet18_cifar", "model.width=4", "evaluate.every_epochs=null", "evaluate.test=false", "scheduler=constant",
    "callbacks=none", "epochs=null", "max_steps=4", "threads=1", "logger=none", "log.progress=false", "log.curves=false",
)  # fmt: skip


@pytest.fixture
def call(accepted: Any) -> Callable[..., dict[str, Any]]:
    """Train with some keys set; gives the summary, what was shown, and the contents of the last checkpoint."""

    def train(**settings: Any) -> dict[str, Any]:
        result = accepted("train", *words_of(SMALL, settings))
        contents = result.last
        return {**result.summary, "shown": result.out, "folder": result.directory, "contents": contents}

    return train


@pytest.fixture
def built(compose: Callable[..., Composition]) -> Callable[..., Any]:
    """What a run with some keys set trains."""
    return lambda **settings: build_run(resolve_config(compose(*words_of(SMALL, settings)), Train))


def same(first: dict[str, Any], second: dict[str, Any], names: Callable[[str], bool]) -> set[bool]:
    """Whether tensors of two checkpoints are equal."""
    return {torch.equal(first["model"][name], second["model"][name]) for name in first["model"] if names(name)}


def test_all_but_head_is_what_its_name_says(call: Any) -> None:
    named, pattern = call(freeze="all-but-head"), call(freeze=["stem", "stages"])
    assert named["weights_sha256"] == pattern["weights_sha256"]
    assert re.search(r"model +ResNet18, [\d,]+ parameters +\((\d+) trainable\)", named["shown"])
    assert re.search(r"frozen +all-but-head, [\d,]+ parameters +\(permanently\)", named["shown"])


def test_a_deep_head_is_spared_as_a_whole(built: Any) -> None:
    training = built(**{"model.head": [6, 5]}, freeze="all-but-head")
    trained = [name for name, weight in training.model.named_parameters() if weight.requires_grad]
    assert trained == [f"head.{layer}.{kind}" for layer in (0, 2, 4) for kind in ("weight", "bias")]


def test_patterns_are_of_modules_and_of_parameters(built: Any) -> None:
    training = built(freeze=["stages.[01].*.bn?", "*.conv1.weight"])
    frozen = {name for name, weight in training.model.named_parameters() if not weight.requires_grad}
    expected = re.compile(r"stages\.[01]\.\d\.bn\d\..*|.*\.conv1\.weight")
    assert frozen == {name for name, _ in training.model.named_parameters() if expected.fullmatch(name)}
    training.state.train()
    quiet = {name for name, module in training.model.named_modules() if ".bn" in name and not module.training}
    assert quiet == {f"stages.{stage}.{block}.bn{norm}" for stage in (0, 1) for block in (0, 1) for norm in (1, 2)}


COMBINATIONS: dict[str, dict[str, Any]] = {
    "plain": {"freeze": ["stem", "stages@2"]},
    "accumulate-amp": {
        "freeze": "all-but-head", "unfreeze_at": 2, "optimizer.fused": False, "accumulate": 2, "amp": "bf16"
    },
    "recomputed": {
        "freeze": "all-but-head@2", "activation_checkpointing": True, "model.drop_path": 0.3, "grad_clip.norm": 0.1,
        "init": "orthogonal",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", some(COMBINATIONS, 1))
def test_stopped_before_at_or_after_the_moment_a_run_ends_with_the_same_bits(name: str, call: Any) -> None:
    whole = call(**COMBINATIONS[name])
    for stop in (1, 2, 3):
        part = call(**COMBINATIONS[name], max_steps=stop)
        rest = call(**COMBINATIONS[name], ckpt_path=str(part["folder"]))
        assert rest["weights_sha256"] == whole["weights_sha256"] != part["weights_sha256"]
        assert ("step 2: " in rest["shown"]) == (stop == 1)


def test_frozen_weights_and_statistics_do_not_move_and_train_from_their_step_on(call: Any) -> None:
    runs = {steps: call(freeze=["stem", "stages@2"], max_steps=steps)["contents"] for steps in (1, 2, 3)}
    assert same(runs[1], runs[2], lambda name: name.startswith("head")) == {False}
    assert same(runs[1], runs[2], lambda name: name.startswith("stages")) == {True}
    assert same(runs[2], runs[3], lambda name: name.startswith("stages")) == {False}
    assert same(runs[2], runs[3], lambda name: name.startswith("stem")) == {True}
    # The optimizer knows what trains later, and not what never does
    weights = [name for name in runs[1]["model"] if name.endswith(("weight", "bias")) and not name.startswith("stem")]
    assert [len(run["optimizer"]["param_groups"][0]["params"]) for run in runs.values()] == [len(weights)] * 3
    assert [len(run["optimizer"]["state"]) for run in runs.values()] == [2, 2, len(weights)]


def test_epochs_are_moments_too(call: Any) -> None:
    shown = call(freeze="all-but-head", unfreeze_at="1ep", epochs=2, max_steps=None)["shown"]
    steps = re.search(r"steps +\d+ +\((\d+) an epoch", shown)
    assert steps is not None
    assert f"step {steps[1]}: all-but-head is trained from now on" in shown
    assert re.search(r"frozen .*\(until after epoch 1\)", shown)


def test_operations_are_counted_as_of_when_what_is_frozen_for_a_while_is_trained(built: Any) -> None:
    free, late, never = built(), built(freeze="all-but-head@2"), built(freeze="all-but-head")
    assert training_flops(late) == training_flops(free)
    assert training_flops(never).backward < training_flops(free).backward
    assert training_flops(late, late.state.position) == training_flops(never)
    assert all(weight.requires_grad for weight in late.model.parameters())


def test_initial_weights_follow_the_seed_and_the_scheme(built: Any) -> None:
    def weight(**settings: Any) -> torch.Tensor:
        return built(**settings).model.stages[0][0].conv1.weight

    assert torch.equal(weight(init="orthogonal"), weight(init="orthogonal"))
    assert not torch.equal(weight(init="orthogonal"), weight(init="orthogonal", seed=1))
    rows = weight(init=["zero_gamma", "orthogonal"]).flatten(1)
    torch.testing.assert_close(rows @ rows.T, torch.eye(4), atol=1e-5, rtol=0)


def test_schemes_go_together(built: Any) -> None:
    training = built(init=["prior_bias", "zero_gamma", "kaiming"])
    assert not training.model.stages[3][1].bn2.weight.any()
    counts = training.data.class_counts
    torch.testing.assert_close(training.model.head.bias.exp(), counts / counts.sum())


def test_the_first_convolution_whitens_the_training_images(compose: Callable[..., Composition]) -> None:
    words = [word for word in SMALL if not word.startswith(("model", "data.image_size"))]
    composition = compose(*words, "model=airbench", "model.widths=[4,4,4]", "init=whiten", "data.image_size=20")
    training = build_run(resolve_config(composition, Train))
    batches = training.data.train_for_eval.loader.batches(0, 0, 1)
    with torch.no_grad():
        features = training.model.whiten(next(iter(batches)).images) - training.model.whiten.bias[:, None, None]
    positive, negative = features.chunk(2, 1)
    torch.testing.assert_close(positive, -negative)
    products = positive.transpose(0, 1).flatten(1)
    torch.testing.assert_close(products @ products.T / products.shape[1], torch.eye(len(products)), atol=0.15, rtol=0)


def test_memory_that_is_lacking_is_no_mistake_of_init(built: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(finetune, "zero_last_norms", fail)
    with pytest.raises(torch.OutOfMemoryError):
        built(init="zero_gamma")


def test_a_head_that_was_made_for_other_classes_may_be_replaced(built: Any) -> None:
    training = built(**{"model.num_classes": 1000, "model.head": "linear"})
    assert training.model.head.out_features == len(training.data.classes)


@pytest.mark.extended
def test_a_checkpoint_with_another_head_is_enough_for_an_evaluation(call: Any, accepted: Any) -> None:
    folder = call(**{"model.head": [6]}, max_steps=1, init=["normal", "prior_bias"])["folder"]
    accepted("eval", f"ckpt_path={folder}", "split=val", "threads=1")


@pytest.mark.extended
def test_an_audit_of_a_run_that_thaws_finds_no_difference(accepted: Any) -> None:
    words = [word for word in SMALL if not word.startswith(("log", "evaluate.test"))]
    accepted("audit", *words, "freeze=all-but-head@2", "steps=3")
