"""Averaged weights in runs: evaluated beside the weights, kept as the best, resumed exactly, and taken by `eval`."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from extended import some

from runner.base.errors import UserError
from runner.checkpoint.file import read
from runner.checkpoint.weights import weights_of, weights_sha256
from runner.config.load import resolve_config
from runner.config.schema import Train
from runner.engine.errors import Interrupted
from runner.run.evaluation import evaluate_both
from runner.train import build_run

# 43 training samples: five batches of 8 and one of 3 an epoch, 12 steps in all.
SMALL = (
    "data=synthetic", "data.dataset.samples=48", "data.image_size=8", "data.batch_size=8", "epochs=2",
    "evaluate.test=false", "checkpoint.min_seconds=0",
)  # fmt: skip
MLP = (*SMALL, "model=mlp", "model.hidden=[16]", "model.dropout=0.3")
CNN = (*SMALL, "model=small_cnn", "model.width=4", "model.dropout=0.3")
HITS = "metrics={swa_hits: {_target_: my_parts.Hits}}"
PARTS = """
import torch
from torch import nn

class Normed(nn.Sequential):
    # BatchNorm that refuses a single sample in training.
    def __init__(self, in_channels: int, image_size: tuple[int, int], num_classes: int):
        inputs = in_channels * image_size[0] * image_size[1]
        super().__init__(nn.Flatten(), nn.Linear(inputs, 4), nn.BatchNorm1d(4), nn.Linear(4, num_classes))

class Hits:
    # A metric that is always one.
    def to(self, device): return self
    def reset(self): pass
    def update(self, predictions, targets): pass
    def compute(self): return torch.ones(())

class Broken(nn.Module):
    # A loss whose gradients are NaN in some steps.
    def __init__(self, bad: list[int], label_smoothing: float = 0.0, class_weights: str | None = None):
        super().__init__()
        self.bad, self.calls = bad, 0
    def forward(self, logits, targets):
        loss = nn.functional.cross_entropy(logits, targets)
        if not torch.is_grad_enabled(): return loss
        self.calls += 1
        return loss * float("nan") if self.calls in self.bad else loss
"""


@pytest.fixture(autouse=True)
def parts(own_module: Any) -> None:
    own_module("my_parts", PARTS)


@pytest.mark.parametrize(
    ("step", "model", "words"),
    [
        (3, CNN, "ema=0.8 accumulate=2 amp=bf16 grad_clip.norm=0.5 on_nonfinite=skip"),
        (7, MLP, "ema=0.8 optimizer=muon grad_clip.agc=0.1 optimizer.no_decay=auto optimizer.layer_decay=0.7"),
        (10, CNN, "swa=0.25 averaging.lr_factor=0.5 optimizer=sgd optimizer.lr_mult={head:3}"),
    ],
    ids=["ema accumulate bf16 clip skip", "ema muon agc groups", "swa groups"],
)
def test_a_run_that_was_stopped_and_resumed_ends_with_the_same_average(
    step: int, model: tuple[str, ...], words: str, train: Any, stopped: Any
) -> None:
    command = (*model, *words.split())
    whole = train(*command)
    rest = train(f"ckpt_path={stopped(step, *command).directory}")
    for key in ("weights_sha256", "best", "last", "global_step"):
        assert rest.summary[key] == whole.summary[key], key
    averages = [result.last["averaged"] for result in (whole, rest)]
    assert averages[0]["updates"] == averages[1]["updates"] > 0
    assert weights_sha256(averages[0]["weights"]) == weights_sha256(averages[1]["weights"])
    assert weights_sha256(averages[0]["weights"]) != whole.summary["weights_sha256"]


def test_averaging_changes_no_bit_of_the_weights(train: Any) -> None:
    assert len({train(*CNN, *words).summary["weights_sha256"] for words in ((), ("ema=0.9",), ("swa=0.5",))}) == 1


def test_both_are_evaluated_and_the_average_says_what_is_best_unless_told_otherwise(train: Any, run: Any) -> None:
    words = (*MLP, "ema=0.8", "evaluate.test=true")
    first, second = train(*words), train(*words, "checkpoint.monitor=accuracy")
    for result in (first, second):
        for record in result.logged("val"):
            assert {"loss", "accuracy", "ema_loss", "ema_accuracy"} <= set(record)
            assert record["ema_loss"] != record["loss"]
    assert first.summary["best"]["metric"] == "val/ema_accuracy"
    assert second.summary["best"]["metric"] == "val/accuracy"
    assert "best by" not in first.out
    assert "best by" in second.out
    assert "val/accuracy, max" in second.out
    assert (first.summary["test_weights"], second.summary["test_weights"]) == ("ema", "raw")
    # What eval finds on the same split is what the run found with the same weights.
    for result, which, words in ((first, "ema", ()), (second, "raw", ()), (second, "ema", ("weights=averaged",))):
        best = read(result.directory / "checkpoints" / "best.safetensors")
        record = json.loads(run("eval", f"ckpt_path={result.directory}", "threads=1", "json=true", *words).out)
        assert record["weights"] == which
        assert words or record["metrics"]["accuracy"] == result.summary["test"]["accuracy"]
        weights = best["averaged"]["weights"] if which == "ema" else best["model"]
        assert record["weights_sha256"] == weights_sha256(weights)


def test_before_swa_begins_the_weights_stand_for_their_average(train: Any) -> None:
    result = train(*CNN, "epochs=3", "swa=1", "checkpoint.keep=9")
    before, begun, then = result.logged("val")
    assert (before["swa_loss"], before["swa_accuracy"]) == (before["loss"], before["accuracy"])
    # The mean of one is itself; BatchNorm's statistics are new, so the outputs are not the same.
    assert begun["swa_loss"] != begun["loss"]
    assert then["swa_loss"] != then["loss"]
    files = [read(result.directory / "checkpoints" / f"step_{step:010d}.safetensors") for step in (6, 12, 18)]
    assert [file["averaged"]["updates"] for file in files] == [0, 1, 2]
    assert files[0]["averaged"]["weights"] is None
    mean = (files[1]["model"]["head.weight"] + files[2]["model"]["head.weight"]) / 2
    assert (files[2]["averaged"]["weights"]["head.weight"] - mean).abs().max() < 1e-6


def test_a_skipped_step_does_not_update_the_average(train: Any) -> None:
    words = (*MLP, "epochs=1", "ema=0.8", "on_nonfinite=skip", "optimizer=sgd")
    updates = []
    for bad in ("[]", "[2,5]"):
        result = train(*words, "loss._target_=my_parts.Broken", f"+loss.bad={bad}")
        found = result.last["averaged"]
        updates.append(found["updates"])
        assert all(math.isfinite(float(value.sum())) for value in found["weights"].values())
    assert updates == [6, 4]


def test_swa_without_batchnorm_needs_no_evaluation(train: Any, rejected: Any) -> None:
    result = train(*MLP, "swa=0.5", "data.split.val=0")
    averaged = result.last["averaged"]
    assert (averaged["updates"], averaged["calibrated"]) == (1, True)
    plain = train(*MLP, "epochs=1")
    found = rejected("eval", f"ckpt_path={plain.directory}", "threads=1", "weights=averaged")
    assert "weights: is averaged, but the checkpoint holds no average" in found.err


def test_a_checkpoint_says_whether_statistics_are_those_of_its_average(train: Any, rejected: Any) -> None:
    words = ("epochs=4", "swa=1", "evaluate.every_epochs=2", "checkpoint.every_epochs=1", "checkpoint.keep=9")
    result = train(*CNN, *words)
    paths = [result.directory / "checkpoints" / f"step_{step:010d}.safetensors" for step in (6, 12, 18, 24)]
    files = [read(path) for path in paths]
    assert [file["averaged"]["calibrated"] for file in files] == [True, True, False, True]
    assert weights_of(files[2], "auto")[1] == "raw"
    assert [weights_of(files[place], "auto")[1] for place in (1, 3)] == ["swa", "swa"]
    found = rejected("eval", f"ckpt_path={paths[2]}", "threads=1", "weights=averaged")
    assert "the checkpoint was saved after swa took weights and before an evaluation" in found.err
    # A run that goes on from there ends with the same average.
    rest = train(f"ckpt_path={paths[2]}").last["averaged"]
    assert rest["calibrated"]
    assert weights_sha256(rest["weights"]) == weights_sha256(files[3]["averaged"]["weights"])


@pytest.fixture
def begun(compose: Callable[..., Any]) -> Any:
    """A run whose average has begun."""
    composition = compose(*SMALL, "model=mlp", "~model.hidden", "~model.dropout", "model._target_=my_parts.Normed", "swa=0.5",
                          "data.batch_size=42", "data.drop_last=true", "evaluate.batch_size=7", "threads=1")  # fmt: skip
    training = build_run(resolve_config(composition, Train))
    assert training.data.train.samples == 43
    training.state.train()
    training.state.averaged.update(12)
    return training


def test_statistics_are_not_computed_from_a_single_sample_at_the_end(begun: Any) -> None:
    sizes: list[int] = []
    begun.model.register_forward_hook(lambda module, args, output: sizes.append(len(output)))
    assert not begun.state.averaged.state_dict()["calibrated"]
    assert evaluate_both(begun, lambda: {"val/loss": 1.0}) == {"val/loss": 1.0, "val/swa_loss": 1.0}
    assert sizes == [42]
    assert begun.state.averaged.state_dict()["calibrated"]


def test_computing_statistics_is_broken_off_and_names_its_own_key(begun: Any) -> None:
    before = weights_sha256(begun.model.state_dict())
    with pytest.raises(Interrupted):
        evaluate_both(begun, lambda: {"val/loss": 1.0}, lambda: True)

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    begun.model.register_forward_hook(fail)
    with pytest.raises(UserError, match=r"data\.batch_size: .*batches of 42"):
        evaluate_both(begun, lambda: {"val/loss": 1.0})
    assert weights_sha256(begun.model.state_dict()) == before
    assert all(module.training for module in begun.model.modules())
    assert not begun.state.averaged.state_dict()["calibrated"]


def test_a_metric_of_ones_own_may_be_called_as_that_of_an_average_that_is_not_kept(train: Any) -> None:
    best = train(*MLP, "epochs=1", HITS, "checkpoint.monitor=swa_hits", "checkpoint.mode=max").summary["best"]
    assert (best["metric"], best["value"]) == ("val/swa_hits", 1.0)


def test_the_rate_goes_over_to_that_of_swa(train: Any) -> None:
    words = (*MLP, "swa=1", "averaging.lr_factor=0.5", "scheduler=constant", "optimizer.lr=0.01", "log.every_steps=1")
    rates = [record["lr"] for record in train(*words).logged("train")]
    assert rates[:6] == [0.01] * 6
    assert rates[11] == pytest.approx(0.005)
    assert all(a > b for a, b in itertools.pairwise(rates[5:]))


@pytest.mark.parametrize(
    ("before", "after", "metrics"),
    some(
        [
            ((), ("checkpoint.monitor=loss",), ("val/accuracy", "val/loss")),
            ((), ("ema=0.5",), ("val/accuracy", "val/ema_accuracy")),
            (("ema=0.5",), ("ema=null",), ("val/ema_accuracy", "val/accuracy")),
        ],
        0,
        2,
        several=True,
    ),
    ids=["monitor", "ema", "raw"],
)
def test_evaluations_are_not_compared_by_different_metrics(
    before: tuple[str, ...], after: tuple[str, ...], metrics: tuple[str, str], train: Any
) -> None:
    words = [*MLP, "evaluate.test=true", *before]
    first = train(*words, "hydra.run.dir=mine")
    assert first.summary["best"]["metric"] == metrics[0]
    ended = train("ckpt_path=mine", *after, "hydra.run.dir=mine")
    assert f"the best evaluation was by {metrics[0]} (max); from now on it is determined by {metrics[1]} (" in ended.out
    assert ended.summary["best"] is None
    assert "test_weights" not in ended.summary  # the last weights are tested
    longer = train("ckpt_path=mine", *after, "hydra.run.dir=mine", "epochs=3")
    best = longer.summary["best"]
    assert (best["metric"], best["epoch"]) == (metrics[1], 3)
    assert read(longer.directory / "checkpoints" / "best.safetensors")["metrics"]["best"] == best


def test_a_run_starts_from_the_average_where_that_was_best(train: Any) -> None:
    source = train(*MLP, "ema=0.5")
    best = read(source.directory / "checkpoints" / "best.safetensors")
    started = train(*MLP, f"init_from={source.directory}", "max_steps=1", "optimizer.lr=0", "optimizer.weight_decay=0")
    record = started.summary["init_from"]
    assert (record["kind"], record["weights_sha256"]) == ("ema", weights_sha256(best["averaged"]["weights"]))
    assert started.last["model"].keys() == best["averaged"]["weights"].keys()
    assert weights_sha256(started.last["model"]) == record["weights_sha256"] != weights_sha256(best["model"])
    assert "tensors of the average (ema)" in started.out


@pytest.mark.parametrize(
    ("sizes", "more"),
    some(
        [((1, 11, 500), ()), ((1, 11), ("averaging.recalibrate_batches=3",)), ((1, 11), ("channels_last=true",))],
        0,
        several=True,
    ),
    ids=str,
)
def test_the_statistics_of_swa_are_those_of_batches_of_the_training_whatever_the_size_of_evaluations(
    train: Any, sizes: tuple[int, ...], more: tuple[str, ...]
) -> None:
    def digest(*words: str) -> str:
        weights = train(*CNN, "swa=0.5", "averaging.lr_factor=1", *more, *words).last["averaged"]["weights"]
        return weights_sha256(weights)

    found = {digest(f"evaluate.batch_size={size}") for size in sizes}
    assert len(found) == 1
    # 43 samples in batches of 8 are more than 2, and other batches give other statistics.
    assert digest("averaging.recalibrate_batches=2") not in found
