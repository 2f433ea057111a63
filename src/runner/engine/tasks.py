"""Tasks: how targets, outputs and metrics relate.

A task is any object with the attributes and methods of `Task`; select a custom one with `task._target_`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from runner.engine.metrics import Accuracy, AveragePrecision, Errors, LabelCounts, LabelScore, class_numbers
from runner.engine.protocols import Metric

_ROUNDING = 1e-3  # of the sum of probabilities
_MULTILABEL = "task=multilabel loss=bce"
_CONFUSED = 2048  # most classes of a confusion matrix, which has their square of numbers
_SHOWN = 8  # numbers of a target in a message


class Task(Protocol):
    """Gives meaning to targets and outputs.

    An optional method `wrong_target(targets, training)` checks targets (N, ...) of the data set, of the training split or
    another, before they are used. It returns the index of the first invalid one and a clause about it, or None. An optional
    attribute `expected` says in an error what targets are allowed. An optional `activation` (`softmax` or `sigmoid`) makes
    outputs probabilities. An optional method `for_metrics(outputs, targets)` converts both for metrics of the config.
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
        """Fresh metrics with several values, for `eval`.

        `per_class` (C,), and `confusion` (C, C) of up to 2048 classes; `label_...` (L,) or `output_...` (K,) with a value of
        each; or nothing.
        """


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
        return _at_least_float32(targets) if targets.ndim == 2 else targets.long()

    def wrong_target(self, targets: Tensor, training: bool) -> tuple[int, str] | None:
        """The first target that is neither a class number nor class probabilities; None if all are valid."""
        if targets.ndim == 2 and targets.shape[1] == self.num_classes:
            values = targets.double()
            fine = (values >= 0).all(1) & ((values.sum(1) - 1).abs() < _ROUNDING)
            return _first_wrong(targets, ~fine, "which are not probabilities of the classes")
        if targets.ndim != 1:
            classes = f"or a probability of each of {self.num_classes} classes"
            return 0, f"has {_values(targets)}, and a class number is expected, {classes}"
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


class MultiLabel:
    """Any number of labels per sample; logits (B, L), targets float (B, L), 0 or 1, or between for blended samples.

    Args:
        num_classes: L, the number of labels.
        threshold: probability above which a label is predicted.
    """

    monitor = "val/map"
    mode: Literal["min", "max"] = "max"
    activation = "sigmoid"
    expected = "a vector with 0 or 1 for each label; task=classification for one class number per sample"

    def __init__(self, num_classes: int, threshold: float = 0.5) -> None:
        if num_classes < 1:
            raise ValueError(f"num_classes, the number of labels, must be at least 1, got {num_classes}")
        if not 0 < threshold < 1:
            raise ValueError(f"threshold must be a probability between 0 and 1, got {threshold}")
        self.num_classes, self.threshold = num_classes, threshold

    def outputs(self, classes: Sequence[str]) -> int:
        """One logit per label."""
        return self.num_classes

    def targets(self, targets: Tensor) -> Tensor:
        """Zeros and ones as at least float32."""
        return _at_least_float32(targets)

    def wrong_target(self, targets: Tensor, training: bool) -> tuple[int, str] | None:
        """The first target that is not a vector of 0 and 1, in training of numbers from 0 to 1; None if all are valid."""
        if targets.ndim != 2 or targets.shape[1] != self.num_classes:
            return 0, f"has {_values(targets)}, and a vector for {self.num_classes} labels is expected"
        if training and targets.is_floating_point():
            return _first_wrong(targets, ~((targets >= 0) & (targets <= 1)).all(1), "which are not all from 0 to 1")
        return _first_wrong(targets, ~((targets == 0) | (targets == 1)).all(1), "which are not all 0 or 1")

    def metric_names(self) -> list[str]:
        """Mean over the labels of F1 and of the average precision."""
        return ["f1", "map"]

    def metrics(self, device: torch.device) -> dict[str, Metric]:
        """Macro F1 at the threshold, and the mean average precision, which needs none."""
        return {"f1": LabelCounts(self.num_classes, device, self.threshold), "map": AveragePrecision()}

    def tables(self, device: torch.device) -> dict[str, Metric]:
        """F1, precision, recall, average precision and the number of samples of each label."""
        scores: tuple[LabelScore, ...] = ("f1", "precision", "recall", "positives")
        counts: dict[str, Metric] = {
            f"label_{score}": LabelCounts(self.num_classes, device, self.threshold, score, each=True)
            for score in scores
        }
        return counts | {"label_average_precision": AveragePrecision(each=True)}

    def for_metrics(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities float (B, L), and labels int64 (B, L)."""
        return outputs.sigmoid(), (targets > 0.5).long()


class Regression:
    """K numbers per sample; outputs and targets (B, K), float32, or float64 for blended samples of that type.

    Args:
        num_outputs: K; None for 1.
    """

    monitor = "val/mae"
    mode: Literal["min", "max"] = "min"
    expected = "finite numbers, equally many for each sample"

    def __init__(self, num_outputs: int | None = None) -> None:
        self.num_outputs = 1 if num_outputs is None else num_outputs
        if self.num_outputs < 1:
            raise ValueError(f"num_outputs must be at least 1, got {num_outputs}")

    def outputs(self, classes: Sequence[str]) -> int:
        """One output per number."""
        return self.num_outputs

    def targets(self, targets: Tensor) -> Tensor:
        """Numbers as at least float32 of shape (B, K)."""
        return _at_least_float32(targets).view(len(targets), -1)

    def wrong_target(self, targets: Tensor, training: bool) -> tuple[int, str] | None:
        """The first target that is not that many finite numbers; None if all are valid."""
        if targets[0].numel() != self.num_outputs:
            numbers = "one number is" if self.num_outputs == 1 else f"{self.num_outputs} numbers are"
            return 0, f"has {_values(targets)}, and {numbers} expected"
        flat = targets.flatten(1).squeeze(1) if targets.ndim > 1 else targets
        finite = flat.isfinite()
        return _first_wrong(flat, ~(finite if flat.ndim == 1 else finite.all(1)), "which is not finite")

    def metric_names(self) -> list[str]:
        """Mean absolute error and root of the mean squared error."""
        return ["mae", "rmse"]

    def metrics(self, device: torch.device) -> dict[str, Metric]:
        """Mean absolute error and root of the mean squared error over all outputs, in the unit of the targets."""
        return {name: Errors(self.num_outputs, device, name == "rmse") for name in self.metric_names()}

    def tables(self, device: torch.device) -> dict[str, Metric]:
        """Both errors of each output, if there are several."""
        if self.num_outputs == 1:
            return {}
        return {
            f"output_{name}": Errors(self.num_outputs, device, name == "rmse", each=True)
            for name in self.metric_names()
        }


def converting(metric: Any, task: Any) -> Any:
    """A metric of torchmetrics whose `update` gets outputs and targets as the task's `for_metrics`, if any, makes them."""
    convert = getattr(task, "for_metrics", None)
    if convert is not None:
        update = metric.update
        metric.update = lambda outputs, targets: update(*convert(outputs, targets))
    return metric


def _at_least_float32(targets: Tensor) -> Tensor:
    return targets.to(torch.promote_types(targets.dtype, torch.float32))


def _values(targets: Tensor) -> str:
    """The number of values of a target, with its shape if it has several dimensions."""
    count, shape = targets[0].numel(), tuple(targets.shape[1:])
    return f"{count} value{'' if count == 1 else 's'}" + (f" in shape {shape}" if len(shape) > 1 else "")


def _first_wrong(targets: Tensor, wrong: Tensor, reason: str) -> tuple[int, str] | None:
    """The index of the first target where `wrong` (N,) is True, and a clause about it; None if there is none."""
    if not bool(wrong.any()):
        return None
    place = int(wrong.nonzero()[0, 0])
    values = [f"{value:g}" if isinstance(value, float) else str(value) for value in targets[place].flatten().tolist()]
    shown = ", ".join(values[:_SHOWN]) + (", ..." if len(values) > _SHOWN else "")
    return place, f"is {f'[{shown}]' if targets.ndim > 1 else shown}, {reason}"
