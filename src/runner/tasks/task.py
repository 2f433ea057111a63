"""The interface of tasks, and helpers to write one.

A task gives meaning to targets, outputs and metrics. It is any object with the attributes and methods of `Task`; select a custom
one with `task._target_`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from runner.engine.protocols import Metric

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


def converting(metric: Any, task: Any) -> Any:
    """A metric of torchmetrics whose `update` gets outputs and targets as the task's `for_metrics`, if any, makes them."""
    convert = getattr(task, "for_metrics", None)
    if convert is not None:
        update = metric.update
        metric.update = lambda outputs, targets: update(*convert(outputs, targets))
    return metric


def at_least_float32(targets: Tensor) -> Tensor:
    """Targets as float32, or float64 if they have that type."""
    return targets.to(torch.promote_types(targets.dtype, torch.float32))


def value_count(targets: Tensor) -> str:
    """The number of values of a target, with its shape if it has several dimensions."""
    count, shape = targets[0].numel(), tuple(targets.shape[1:])
    return f"{count} value{'' if count == 1 else 's'}" + (f" in shape {shape}" if len(shape) > 1 else "")


def first_wrong(targets: Tensor, wrong: Tensor, reason: str) -> tuple[int, str] | None:
    """The index of the first target where `wrong` (N,) is True, and a clause about it; None if there is none."""
    if not bool(wrong.any()):
        return None
    place = int(wrong.nonzero()[0, 0])
    values = [f"{value:g}" if isinstance(value, float) else str(value) for value in targets[place].flatten().tolist()]
    shown = ", ".join(values[:_SHOWN]) + (", ..." if len(values) > _SHOWN else "")
    return place, f"is {f'[{shown}]' if targets.ndim > 1 else shown}, {reason}"
