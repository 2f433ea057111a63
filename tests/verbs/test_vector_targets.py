"""Whole runs whose targets are vectors: several labels a sample, several numbers a sample; through every verb."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from extended import some
from sklearn.metrics import average_precision_score, f1_score

SETS = """
import torch
from torch.utils.data import Dataset


class Vectors(Dataset):
    '''Images with a light in some of four corners; the targets are the corners, or a number for each.'''

    def __init__(self, numbers=False, whole=False, named=True, shown=True, count=90):
        source = torch.Generator().manual_seed(0)
        lights = torch.rand(count, 4, generator=source) < torch.tensor([0.5, 0.3, 0.2, 0.6])
        self.images = torch.randint(0, 60, (count, 1, 8, 8), generator=source, dtype=torch.uint8)
        for corner in range(4):
            row, column = 4 * (corner // 2), 4 * (corner % 2)
            self.images[lights[:, corner], :, row + 1 : row + 3, column + 1 : column + 3] += 150
        self.labels = lights.long() if whole else lights.float()
        if numbers:
            self.labels = lights.float()[:, :3] * torch.tensor([1.0, 2.0, 3.0]) - 0.5
        elif named:
            self.classes = ["sky", "sea", "dog", "cat"]
        if shown:
            self.targets = self.labels

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]
"""
WORDS = (
    "device=cpu", "model=mlp", "model.hidden=[16]", "data=digits", "data.normalize.mean=[0.2]", "data.normalize.std=[0.2]",
    "data.num_workers=0", "data.batch_size=16", "epochs=3", "transform=none", "trust=[vector_sets]", "optimizer.lr=0.02",
    "data.dataset._target_=vector_sets.Vectors",
)  # fmt: skip
LABELS = (*WORDS, "task=multilabel", "loss=bce")
NUMBERS = (*WORDS, "+data.dataset.numbers=true", "task=regression", "loss=mse")
TRUST = ("trust=[vector_sets]", "threads=1")


@pytest.fixture(autouse=True)
def sets(own_module: Any) -> None:
    own_module("vector_sets", SETS)


@pytest.fixture
def good(accepted: Callable[..., Any]) -> Callable[..., Any]:
    """A verb that must succeed."""
    return lambda verb, *words: accepted(verb, *words, *TRUST)


@pytest.mark.extended
def test_labels_are_learned_and_every_verb_knows_them(train_once: Any, good: Any, workdir: Path) -> None:
    result = train_once(*LABELS)
    assert set(result.summary["test"]) == {"loss", "f1", "map"}
    assert result.summary["best"]["metric"] == "val/map"
    assert result.summary["best"]["mode"] == "max"
    assert result.summary["best"]["value"] > 0.9
    ckpt = f"ckpt_path={result.directory}"

    good("predict", ckpt, "input=test", "output=rows.jsonl")
    rows = [json.loads(line) for line in (workdir / "rows.jsonl").read_text().splitlines()]
    names = ["sky", "sea", "dog", "cat"]
    shares = torch.tensor([row["probabilities"] for row in rows])
    true = torch.tensor([[name in row["target"].split("; ") for name in names] for row in rows]).long()
    for row in rows:
        above = [name for name, share in zip(names, row["probabilities"], strict=True) if share > 0.5]
        assert row["labels"] == "; ".join(above)
    assert 0 < int(true.sum()) < true.numel()

    good("eval", ckpt)
    record = json.loads((result.directory / "eval_test.json").read_text())
    assert record["metrics"] == result.summary["test"]
    assert record["metrics"]["f1"] == pytest.approx(f1_score(true, shares > 0.5, average="macro", zero_division=0))
    expected = average_precision_score(true, shares, average=None)
    assert [record["per_label"][name]["average_precision"] for name in names] == pytest.approx(list(expected), rel=1e-4)
    assert [record["per_label"][name]["positives"] for name in names] == true.sum(0).tolist()

    good("predict", ckpt, "input=test", "output=some.csv", "task.threshold=0.999")
    some = list(csv.DictReader((workdir / "some.csv").read_text().splitlines()))
    assert float(some[0]["probabilities:dog"]) == pytest.approx(rows[0]["probabilities"][2])
    assert sum(len(row["labels"]) for row in some) < sum(len(row["labels"]) for row in rows)

    averaged = json.loads(good("eval", ckpt, "tta=flip", "tta_mean=probabilities", "json=true").out)["tta"]["metrics"]
    assert set(averaged) == {"loss", "f1", "map"}, "this loss takes the logits of a sigmoid"
    exported = json.loads(good("export", ckpt, "json=true").out)
    assert exported["classes"] == names
    assert exported["activation"] == "sigmoid"
    assert exported["threshold"] == 0.5
    good("inspect", ckpt, "what=[inputs,gradients]")


@pytest.mark.extended
def test_several_numbers_are_learned_and_every_verb_knows_them(train_once: Any, good: Any, workdir: Path) -> None:
    result = train_once(*NUMBERS)
    assert set(result.summary["test"]) == {"loss", "mae", "rmse"}
    errors = [record["mae"] for record in result.metrics if record["split"] == "val"]
    assert errors[-1] < 0.8 * errors[0], "nothing was learned"
    ckpt = f"ckpt_path={result.directory}"
    good("predict", ckpt, "input=test", "output=rows.jsonl")
    rows = [json.loads(line) for line in (workdir / "rows.jsonl").read_text().splitlines()]
    guessed, true = (
        torch.tensor([[row[f"{name}_{at}"] for at in range(3)] for row in rows]) for name in ("prediction", "target")
    )
    good("eval", ckpt)
    record = json.loads((result.directory / "eval_test.json").read_text())
    assert record["metrics"] == result.summary["test"]
    assert record["metrics"]["mae"] == pytest.approx(float((guessed - true).abs().mean()))
    each = [record["per_output"][str(at)] for at in range(3)]
    assert [one["mae"] for one in each] == pytest.approx((guessed - true).abs().mean(0).tolist())
    assert [one["rmse"] for one in each] == pytest.approx((guessed - true).square().mean(0).sqrt().tolist())
    exported = json.loads(good("export", ckpt, "json=true").out)
    assert exported["output"]["shape"] == ["batch", 3]
    good("inspect", ckpt, "what=[inputs]")


@pytest.mark.parametrize("words", [LABELS, (*LABELS, "+data.dataset.whole=true"), NUMBERS])
def test_check_finds_nothing_wrong(words: tuple[str, ...], accepted: Any) -> None:
    found = accepted("check", *words, "threads=1", "only=[labels,loss,outputs,step]")
    assert " fail " not in found.out, found.out
    assert "target-range             pass" in found.out


EXTRAS = (
    "accumulate=2", "ema=0.9", "loss.pos_weight=auto", "+data.dataset.whole=true",
    "transform.mix._target_=runner.data.transforms.mixing.Mixup",
)  # fmt: skip


@pytest.mark.parametrize(
    "words", [(*LABELS, *EXTRAS), (*NUMBERS, "accumulate=2", "ema=0.9")], ids=["labels", "numbers"]
)
def test_a_resumed_run_ends_with_the_same_bits(words: tuple[str, ...], train: Any) -> None:
    part = train(*words, "hydra.run.dir=part", "scheduler=constant", "max_steps=3")
    whole = train(*words, "hydra.run.dir=whole", "scheduler=constant", "max_steps=8")
    again = train(f"ckpt_path={part.directory}", "max_steps=8", *TRUST[:1])
    assert again.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert again.summary["test"] == whole.summary["test"]
    assert again.summary["best"] == whole.summary["best"]


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize("words", some([LABELS, NUMBERS], 0), ids=["labels", "numbers"])
def test_two_processes_evaluate_as_one(words: tuple[str, ...], train: Any) -> None:
    two = train(*words, "devices=2", "max_steps=2", "hydra.run.dir=two")
    ckpt = f"ckpt_path={two.directory}"
    one = train(ckpt, "devices=1", "max_steps=2", "hydra.run.dir=one", *TRUST[:1])
    assert one.summary["test"] == two.summary["test"]


def test_metrics_of_torchmetrics_get_probabilities_and_labels(train: Any) -> None:
    words = ("+metrics.f1._target_=torchmetrics.classification.MultilabelF1Score", "+metrics.f1.average=macro")
    found = train(*LABELS, "epochs=1", *words, "checkpoint.monitor=f1").summary["test"]
    own = train(*LABELS, "epochs=1", "checkpoint.monitor=f1").summary["test"]
    assert found["f1"] == pytest.approx(own["f1"])


def test_positive_weights_need_targets_that_can_be_counted(rejected: Any) -> None:
    result = rejected("train", *LABELS, "loss.pos_weight=auto", "+data.dataset.shown=false", *TRUST[1:])
    assert "needs a data set with an attribute targets" in result.err


def test_the_test_says_which_weights_it_tested(train: Any) -> None:
    result = train(*LABELS, "evaluate.every_steps=1", "checkpoint.monitor=loss", "checkpoint.mode=max")
    best = result.summary["best"]["global_step"]
    assert best < result.summary["global_step"], "the last weights are the best"
    assert result.summary["test_step"] == best
    assert f"[test]  weights of step {best}  loss" in result.out
    record = next(record for record in result.metrics if record["split"] == "test")
    assert (record["global_step"], record["weights_step"]) == (result.summary["global_step"], best)
