"""The interface of tasks, and helpers to write one.

A task gives meaning to batches, outputs and metrics, and may compute the training step itself. It is any object; what it lacks
of the methods of `Task` is as `Task` has it. Select a custom one with `task._target_`.
"""

from __future__ import annotations

import colorsys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from runner.engine.metrics import Additive
from runner.engine.protocols import Metric

_SHOWN = 8  # numbers of a target in a message


@dataclass(frozen=True)
class Progress:
    """How far training is, as plain numbers, which are the same on all ranks and in a resumed run."""

    step: int  # completed optimizer steps, so the number of the current one, from 0
    total_steps: int  # optimizer steps of the whole run
    epoch: int  # completed epochs


class Task:
    """Gives meaning to targets and outputs.

    By default, a batch is a pair of inputs and targets, and the loss is that of the config. A task with a step of its own
    defines `training_step(modules, batch)`, which returns the mean loss of the batch, or a dict with `loss` and further
    scalars to log, and `evaluation_step(modules, batch)`, which returns a dict of `outputs` and `targets` for the metrics,
    and of `loss` and further scalars that are means over the batch. An optional method `weight(batch)` says what the mean is
    over, such as the number of valid pixels; without it, it is over the samples. An optional `after_step(modules)` is called
    at the end of each step, without gradients, for example to move a teacher towards the student. `modules` are the modules
    by name: `model`, `loss`, and what an optional method `modules(model, loss)` adds; `batch` is what `data.collate`, or an
    optional static method `collate(samples)` of the task, has made of samples. Methods that `STEPS` lists with `[progress]` get
    a `Progress` if they have an argument of this name.

    An optional `predict_step(modules, batch)` gives tensors (B, ...) and lists of B items by name, for the rows of `predict`.
    Optional `formats` of labels are `coco` and `yolo` of its `boxes`, `labels`, `scores` and perhaps `masks`, bool (N, H, W) each,
    or `masks` of `mask`, uint8 (B, H, W); for these it gets `threshold`, if the user sets it.
    An optional `draw(sample, outputs)` gives a picture, uint8 (3, H, W), of a batch of one sample, whose images are uint8 RGB,
    and of what `predict_step` gave for it, without the axis of the batch. It may take `classes`, their names. An optional
    `shown(values)` makes what `draw` takes of the `outputs` or `targets` of `evaluation_step`, or the targets of a batch, for one
    sample; an optional `legend(classes)` gives colours (red, green, blue), 0 to 255, by name.

    An optional `sample(modules)` or `sample(modules, count)` generates, after each evaluation of the validation split and for
    `predict samples=64`, a dict by name of pictures, uint8 (3 or 1, H, W) or several, (N, 3 or 1, H, W), texts, and numbers.

    An optional `export_inputs(batch)` gives the inputs of the model, tensors (B, ...): one, a tuple, or a dict by the names of its
    arguments.

    A constructor argument `num_classes` is filled with the number of classes, and `classes` without a default with their names.

    Attributes that change while training are saved and restored by optional methods `state_dict()` and `load_state_dict(state)`.

    An optional method `wrong_target(targets, training)` checks targets (N, ...) of the data set, of the training split or
    another, before they are used. It returns the index of the first invalid one and a clause about it, or None. An optional
    attribute `expected` says in an error what targets are allowed. An optional `activation` (`softmax` or `sigmoid`) makes
    outputs probabilities. An optional method `for_metrics(outputs, targets)` converts both for metrics of the config.
    """

    monitor: Any = "val/loss"  # its name; None where no metric says which weights are best
    mode: Literal["min", "max"] = "min"

    def outputs(self, classes: Sequence[str]) -> int:
        """Number of outputs of a model: that of the classes, of which `classes` are the names; 0 if it is not known."""
        return len(classes)

    def targets(self, targets: Any) -> Any:
        """Convert targets of the data set to those of the loss and the metrics."""
        return targets

    def metric_names(self) -> list[str]:
        """Names of the metrics that `metrics` returns."""
        return []

    def metrics(self, device: torch.device) -> dict[str, Metric]:
        """Fresh metrics by name; each takes (outputs, targets) batch by batch."""
        return {}

    def tables(self, device: torch.device) -> dict[str, Metric]:
        """Fresh metrics with several values, for `eval`.

        `per_class` (C,), and `confusion` (C, C) of up to 2048 classes; `label_...` (L,) or `output_...` (K,) with a value of
        each; or nothing.
        """
        return {}


STEPS = {
    "training_step": ("modules", "batch", "[progress]"),
    "optimizer_steps": ("modules", "batch", "[progress]"),
    "optimizers": ("modules",),
    "evaluation_step": ("modules", "batch"),
    "after_step": ("modules", "[progress]"),
    "weight": ("batch",),
    "modules": ("model", "loss"),
}
"""Methods that a task may have to compute its steps, and what they are called with, see `runner.run.interfaces.Calls`."""

SHOWS = {
    "predict_step": ("modules", "batch"),
    "draw": ("sample", "outputs", "[classes]"),
    "shown": ("values",),
    "legend": ("classes",),
    "sample": ("modules", "[count]"),
    "export_inputs": ("batch",),
}
"""Those that it may have to show what the model makes of samples; `count` and `classes` only if they are taken."""


class Derived(Additive):
    """A value of what another metric keeps; `compute` gives it."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self.compute = compute
        super().__init__({})

    def update(self, outputs: Any, targets: Any) -> None:
        """Nothing: the other metric keeps all."""


def converting(metric: Any, task: Any) -> Any:
    """A metric of torchmetrics whose `update` gets outputs and targets as the task's `for_metrics`, if any, makes them."""
    convert = getattr(task, "for_metrics", None)
    if convert is not None:
        update = metric.update
        metric.update = lambda outputs, targets: update(*convert(outputs, targets))
    return metric


def colour(number: int) -> tuple[int, int, int]:
    """The colour of class `number` in pictures: red, green and blue, 0 to 255."""
    # The golden ratio: neighbours differ most
    red, green, blue = colorsys.hsv_to_rgb(number * 0.618034 % 1, 0.85, 0.95)
    return round(255 * red), round(255 * green), round(255 * blue)


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
