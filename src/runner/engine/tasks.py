"""Tasks: how targets, outputs and metrics relate.

A task is any object with the attributes and methods of `Task`; select a custom one with `task._target_`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from runner.engine.protocols import Metric

_ROUNDING = 1e-3  # of the sum of probabilities
_SHOWN = 8  # numbers of a target in a message


class Task(Protocol):
    """Gives meaning to targets and outputs.

    An optional method `wrong_target(targets, training)` checks targets (N, ...) of the data set, of the training split or
    another, before they are used. It returns the index of the first invalid one and a clause about it, or None.
    """

    monitor: str
    mode: Literal["min", "max"]

    def outputs(self, classes: Sequence[str]) -> int:
        """Number of outputs of a model."""

    def targets(self, targets: Tensor) -> Tensor:
        """Convert targets of the data set to those of the loss and the metrics."""

    def metric_names(self) -> list[str]:
        """Names of the metrics that `metrics` returns."""

    def metrics(self, device: torch.device) -> dict[str, Metric]:
        """Fresh metrics by name; each takes (logits, targets) batch by batch."""

    def tables(self, device: torch.device) -> dict[str, Metric]:
        """Fresh metrics with several values, for `eval`: `per_class` (C,) and `confusion` (C, C), or nothing."""


class Classification:
    """One class per sample; logits (B, C), targets int64 (B,), or float (B, C) for blended samples.

    Args:
        num_classes: number of classes.
    """

    monitor = "val/accuracy"
    mode: Literal["min", "max"] = "max"

    def __init__(self, num_classes: int) -> None:
        if num_classes < 2:
            raise ValueError(f"num_classes must be at least 2, got {num_classes}; use task=regression for numbers")
        self.num_classes = num_classes

    def outputs(self, classes: Sequence[str]) -> int:
        """One logit per class."""
        return self.num_classes

    def targets(self, targets: Tensor) -> Tensor:
        """Class numbers as int64; float probabilities (B, C) unchanged."""
        return targets if targets.is_floating_point() and targets.ndim == 2 else targets.long()

    def wrong_target(self, targets: Tensor, training: bool) -> tuple[int, str] | None:
        """The first target that is not a class number, nor, in training, class probabilities; None if all are valid."""
        if targets.ndim == 2 and training and targets.is_floating_point() and targets.shape[1] == self.num_classes:
            fine = (targets >= 0).all(1) & ((targets.sum(1) - 1).abs() < _ROUNDING)
            return _first_wrong(targets, ~fine, "which are not probabilities of the classes")
        if targets.ndim != 1:
            return 0, f"has {targets[0].numel()} values, and a class number is expected"
        if targets.is_floating_point() and (
            found := _first_wrong(targets, targets != targets.floor(), "which is not a whole number")
        ):
            return found
        last = self.num_classes - 1
        outside = (targets < 0) | (targets > last)
        return _first_wrong(targets, outside, f"and there are {self.num_classes} classes, 0 to {last}")

    def metric_names(self) -> list[str]:
        """Share of samples whose largest logit is that of the target."""
        return ["accuracy"]

    def metrics(self, device: torch.device) -> dict[str, Metric]:
        """Accuracy over all samples."""
        # Importing torchmetrics takes a second, so the first evaluation does it. validate_args would wait for the device;
        # the loss already refuses classes out of range.
        from torchmetrics.classification import MulticlassAccuracy

        return {"accuracy": MulticlassAccuracy(self.num_classes, average="micro", validate_args=False).to(device)}

    def tables(self, device: torch.device) -> dict[str, Metric]:
        """Accuracy of each class, and how often class i was predicted as class j."""
        from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

        return {
            "per_class": MulticlassAccuracy(self.num_classes, average="none", validate_args=False).to(device),
            "confusion": MulticlassConfusionMatrix(self.num_classes, validate_args=False).to(device),
        }


class Regression:
    """One number per sample; outputs and targets (B, 1), float32, or float64 for blended samples of that type."""

    monitor = "val/mae"
    mode: Literal["min", "max"] = "min"

    def outputs(self, classes: Sequence[str]) -> int:
        """One output."""
        return 1

    def targets(self, targets: Tensor) -> Tensor:
        """Numbers as at least float32 of shape (B, 1)."""
        return targets.to(torch.promote_types(targets.dtype, torch.float32)).view(-1, 1)

    def wrong_target(self, targets: Tensor, training: bool) -> tuple[int, str] | None:
        """The first target that is not one finite number; None if all are valid."""
        if targets[0].numel() != 1:
            return 0, f"has {targets[0].numel()} values, and one number is expected"
        flat = targets.flatten()
        return _first_wrong(flat, ~flat.isfinite(), "which is not finite")

    def metric_names(self) -> list[str]:
        """Mean absolute error and root of the mean squared error."""
        return ["mae", "rmse"]

    def metrics(self, device: torch.device) -> dict[str, Metric]:
        """Mean absolute error and root of the mean squared error, in the unit of the targets."""
        from torchmetrics.regression import MeanAbsoluteError, MeanSquaredError

        metrics: dict[str, Any] = {"mae": MeanAbsoluteError(), "rmse": MeanSquaredError(squared=False)}
        return {name: metric.to(device) for name, metric in metrics.items()}

    def tables(self, device: torch.device) -> dict[str, Metric]:
        """None."""
        return {}


def _first_wrong(targets: Tensor, wrong: Tensor, reason: str) -> tuple[int, str] | None:
    """The index of the first target where `wrong` (N,) is True, and a clause about it; None if there is none."""
    if not bool(wrong.any()):
        return None
    place = int(wrong.nonzero()[0, 0])
    values = [f"{value:g}" if isinstance(value, float) else str(value) for value in targets[place].flatten().tolist()]
    shown = ", ".join(values[:_SHOWN]) + (", ..." if len(values) > _SHOWN else "")
    return place, f"is {f'[{shown}]' if targets.ndim > 1 else shown}, {reason}"
