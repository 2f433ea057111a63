"""Tasks: what data, outputs and metrics mean; shipped and custom ones, through the program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from runner.tasks.classification import Classification
from runner.tasks.regression import Regression

SMALL = (
    "data=synthetic", "data.dataset.samples=48", "data.image_size=8", "data.batch_size=8", "epochs=2",
    "model=small_cnn", "model.width=4", "transform=none",
)  # fmt: skip


def test_classification_needs_two_classes() -> None:
    with pytest.raises(ValueError, match="task=regression"):
        Classification(1)


def test_thousands_of_classes_have_no_confusion_matrix() -> None:
    names = [list(Classification(number).tables(torch.device("cpu"))) for number in (2048, 100_000)]
    assert names == [["per_class", "confusion"], ["per_class"]]


def test_targets_come_in_the_form_of_the_loss() -> None:
    assert Classification(3).targets(torch.tensor([1, 2], dtype=torch.int32)).dtype == torch.int64
    soft = torch.tensor([[0.25, 0.75, 0.0]])
    assert Classification(3).targets(soft) is soft
    assert Classification(3).targets(torch.tensor([1.0, 2.0])).dtype == torch.int64
    out = Regression().targets(torch.tensor([1.0, 2.0], dtype=torch.float64))
    assert (out.dtype, out.shape) == (torch.float64, (2, 1)), "as dtype=float64 mixes them"
    assert Regression().targets(torch.tensor([1, 2])).dtype == torch.float32


def test_a_regression_trains_and_is_judged_by_its_error(train: Any) -> None:
    words = ("data.dataset.kind=regression", "task=regression", "loss=mse", "optimizer.lr=0.01", "epochs=10")
    result = train(*SMALL, *words)
    assert set(result.summary["last"]) == {"loss", "mae", "rmse"}
    assert set(result.summary["test"]) == {"loss", "mae", "rmse"}
    assert result.summary["best"]["metric"] == "val/mae"
    assert result.summary["best"]["mode"] == "min"
    errors = [record["mae"] for record in result.logged("val")]
    assert result.summary["best"]["value"] == min(errors)
    assert errors[-1] < 0.8 * errors[0], "nothing was learned"
    for record in result.metrics:
        if record["split"] == "val":
            assert record["rmse"] ** 2 == pytest.approx(record["loss"], rel=1e-4)


def test_a_task_of_ones_own_needs_no_change_here(train: Any, workdir: Path, own_module: Any) -> None:
    own_module(
        "my_task",
        """
import torch

class WrongShare:
    def __init__(self): self.wrong = self.count = 0
    def update(self, logits, targets):
        self.wrong += (logits.squeeze(1).sign() != targets.squeeze(1) * 2 - 1).sum()
        self.count += len(targets)
    def compute(self): return self.wrong / self.count

class EvenOrOdd:
    monitor, mode = "val/wrong", "min"
    def outputs(self, classes): return 1
    def targets(self, targets): return (targets % 2).float().view(-1, 1)
    def metric_names(self): return ["wrong"]
    def metrics(self, device): return {"wrong": WrongShare()}
    def tables(self, device): return {}
""",
    )
    (workdir / "mine" / "task").mkdir(parents=True)
    (workdir / "mine" / "task" / "parity.yaml").write_text("_target_: my_task.EvenOrOdd\n", encoding="utf-8")
    result = train("--config-dir", "mine", *SMALL, "task=parity", "loss=mse")
    assert set(result.summary["last"]) == {"loss", "wrong"}
    assert result.summary["best"]["metric"] == "val/wrong"
    assert 0 <= result.summary["test"]["wrong"] <= 1
    config = (result.directory / "config.yaml").read_text()
    assert "my_task.EvenOrOdd" in config


def test_metrics_of_the_config_replace_those_of_the_task_or_are_in_addition_to_them(train: Any) -> None:
    kind = "_target_: torchmetrics.classification.Multiclass"
    more = (f"+metrics.top2={{{kind}Accuracy, top_k: 2, average: micro}}", "checkpoint.monitor=top2")
    chosen = train(*SMALL, "data.dataset.classes=4", f"+metrics.accuracy={{{kind}Accuracy, average: micro}}", *more)
    assert set(chosen.summary["last"]) == {"loss", "accuracy", "top2"}
    assert chosen.summary["last"]["top2"] >= chosen.summary["last"]["accuracy"]
    assert chosen.summary["best"]["metric"] == "val/top2"
    added = train(*SMALL, "data.dataset.classes=4", f"+metrics.f1={{{kind}F1Score}}")
    assert set(added.summary["last"]) == {"loss", "accuracy", "f1"}
    assert added.summary["best"]["metric"] == "val/accuracy"


@pytest.mark.parametrize(("words", "warned"), [(("loss=mse",), True), ((), False)])
def test_a_loss_for_numbers_on_classes_is_said(train: Any, words: tuple[str, ...], warned: bool) -> None:
    result = train(*SMALL, *words)
    assert ("warning: loss: is one for numbers" in result.out + result.err) == warned
