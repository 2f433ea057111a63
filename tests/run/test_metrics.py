"""Which metric is watched, and whether a small or a large value of it is better."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from runner.base.errors import UserError
from runner.config.keys import with_changes
from runner.config.schema.sections import Checkpoint, Data
from runner.config.schema.train import Train
from runner.run.metrics import Monitor, build_callbacks, choose_monitor
from runner.tasks.classification import Classification
from runner.tasks.regression import Regression

OWN = "own_metrics"


@pytest.fixture(autouse=True)
def own(own_module: Any) -> None:
    own_module(
        OWN,
        """
import torch

class Silent:
    def to(self, device): return self
    def update(self, predictions, targets): pass
    def compute(self): return torch.zeros(())

class Error(Silent):
    higher_is_better = False

class Watcher:
    def __init__(self, monitor=None, mode=None): self.monitor, self.mode = monitor, mode
    def on_evaluation(self, loop, metrics): pass
""",
    )


def config_of(metrics: dict[str, str] | None = None, **keys: Any) -> Train:
    nothing = {"_target_": "x.y"}
    own = {name: keys.pop(name) for name in ("ema", "callbacks") if name in keys}
    return Train(
        data=Data(dataset=nothing), model=nothing, loss=nothing, task=nothing, optimizer=nothing, scheduler=nothing,
        metrics=metrics and {name: {"_target_": target} for name, target in metrics.items()},
        checkpoint=Checkpoint(**keys), **own,
    )  # fmt: skip


TORCHMETRICS = {
    "ece": "torchmetrics.classification.MulticlassCalibrationError",
    "f1": "torchmetrics.classification.MulticlassF1Score",
    "ppl": "torchmetrics.text.Perplexity",
    "spread": "torchmetrics.MeanMetric",
    "silent": f"{OWN}.Silent",
    "error": f"{OWN}.Error",
    "rmse": f"{OWN}.Silent",
    "accuracy": "torchmetrics.classification.MulticlassAccuracy",
}


@pytest.mark.parametrize(
    ("monitor", "mode"),
    [("ece", "min"), ("ppl", "min"), ("error", "min"), ("rmse", "min"), ("loss", "min"), ("f1", "max"), (None, "max")],
)
@pytest.mark.parametrize("ema", [None, 0.9])
def test_a_metric_says_itself_in_which_direction_it_is_better(
    monitor: str | None, mode: str, ema: float | None
) -> None:
    config = config_of(TORCHMETRICS, monitor=monitor and (f"ema_{monitor}" if ema else monitor), ema=ema)
    expected = f"val/{'ema_' if ema else ''}{monitor or 'accuracy'}"
    assert choose_monitor(config, Classification(3)) == (expected, mode)


@pytest.mark.parametrize("name", ["spread", "silent"])
def test_a_metric_that_does_not_say_so_has_to_be_given_a_mode(name: str) -> None:
    config = config_of(TORCHMETRICS, monitor=name)
    with pytest.raises(
        UserError, match=rf"^checkpoint.mode: .*'val/{name}' are better is not known\n    allowed: min or max"
    ):
        choose_monitor(config, Classification(3))
    config = with_changes(config, {"checkpoint.mode": "min"})
    assert choose_monitor(config, Classification(3)) == (f"val/{name}", "min")


def test_a_metric_of_the_task_says_itself_too() -> None:
    class Calibrated(Classification):
        def metric_names(self) -> list[str]:
            return ["accuracy", "ece"]

        def metrics(self, device: torch.device) -> dict[str, Any]:
            from torchmetrics.classification import MulticlassCalibrationError

            return super().metrics(device) | {"ece": MulticlassCalibrationError(self.num_classes)}

    assert choose_monitor(config_of(monitor="ece"), Calibrated(3)) == ("val/ece", "min")
    assert choose_monitor(config_of(), Regression()) == ("val/mae", "min")


@pytest.mark.parametrize("target", ["runner.engine.callbacks.EarlyStopping", f"{OWN}.Watcher"])
def test_a_callback_watches_its_metric_in_the_direction_of_that_metric(target: str) -> None:
    def built(**node: Any) -> Any:
        config = config_of(TORCHMETRICS, callbacks={"stop": {"_target_": target, **node}})
        return build_callbacks(config, Classification(3), Monitor("val/accuracy", "max"))["stop"]

    assert (built().monitor, built().mode) == ("val/accuracy", "max")
    assert built(monitor="ece").mode == "min"
    assert built(monitor="val/ece", mode="max").mode == "max"
    with pytest.raises(
        UserError, match=r"^callbacks.stop.mode: .*'val/silent' are better is not known\n    allowed: min or max"
    ):
        built(monitor="silent")
