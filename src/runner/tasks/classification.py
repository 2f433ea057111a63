"""One class per sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from runner.engine.metrics import Accuracy, class_numbers
from runner.engine.protocols import Metric
from runner.tasks.task import at_least_float32, converting, first_wrong, value_count

_ROUNDING = 1e-3  # of the sum of probabilities
_MULTILABEL = "task=multilabel loss=bce"
_CONFUSED = 2048  # most classes of a confusion matrix, which has their square of numbers


class Classification:
    """One class per sample; logits (B, C), targets int64 (B,), or float (B, C) for probabilities, one-hot ones included.

    Args:
        num_classes: number of classes.
    """

    monitor = "val/accuracy"
    mode: Literal["min", "max"] = "max"
    activation = "softmax"
    expected = f"class numbers from 0 on, or a probability of each class; {_MULTILABEL} for several labels per sample"

    def __init__(self, num_classes: int) -> None:
        if num_classes < 2:
            raise ValueError(f"num_classes must be at least 2, got {num_classes}; use task=regression for numbers")
        self.num_classes = num_classes

    def outputs(self, classes: Sequence[str]) -> int:
        """One logit per class."""
        return self.num_classes

    def targets(self, targets: Tensor) -> Tensor:
        """Class numbers as int64; probabilities (B, C) as at least float32."""
        return at_least_float32(targets) if targets.ndim == 2 else targets.long()

    def wrong_target(self, targets: Tensor, training: bool) -> tuple[int, str] | None:
        """The first target that is neither a class number nor class probabilities; None if all are valid."""
        if targets.ndim == 2 and targets.shape[1] == self.num_classes:
            values = targets.double()
            fine = (values >= 0).all(1) & ((values.sum(1) - 1).abs() < _ROUNDING)
            return first_wrong(targets, ~fine, "which are not probabilities of the classes")
        if targets.ndim != 1:
            classes = f"or a probability of each of {self.num_classes} classes"
            return 0, f"has {value_count(targets)}, and a class number is expected, {classes}"
        if targets.is_floating_point() and (
            found := first_wrong(targets, targets != targets.floor(), "which is not a whole number")
        ):
            return found
        last = self.num_classes - 1
        outside = (targets < 0) | (targets > last)
        return first_wrong(targets, outside, f"and there are {self.num_classes} classes, 0 to {last}")

    def metric_names(self) -> list[str]:
        """Share of samples whose largest logit is that of the target."""
        return ["accuracy"]

    def metrics(self, device: torch.device) -> dict[str, Metric]:
        """Accuracy over all samples."""
        return {"accuracy": Accuracy(device)}

    def tables(self, device: torch.device) -> dict[str, Metric]:
        """Accuracy of each class, and how often class i was predicted as class j, unless there are very many."""
        # Importing torchmetrics takes a second, so only `eval` does it. validate_args would wait for the device; the loss
        # already refuses classes out of range.
        from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

        tables: dict[str, Any] = {
            "per_class": MulticlassAccuracy(self.num_classes, average="none", validate_args=False).to(device),
        }
        if self.num_classes <= _CONFUSED:
            tables["confusion"] = MulticlassConfusionMatrix(self.num_classes, validate_args=False).to(device)
        return {name: converting(metric, self) for name, metric in tables.items()}

    def for_metrics(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and class numbers int64 (B,)."""
        return outputs, class_numbers(targets)
