"""Why the loss or the gradients of a step were not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from runner.engine.protocols import Batch
from runner.engine.state import TrainState
from runner.engine.step import StepConfig
from runner.instrument.no_trace import no_trace, uncompiled
from runner.instrument.nonfinite import is_finite, join_names, nonfinite_outputs, nonfinite_samples
from runner.instrument.observer import module_label


@dataclass(frozen=True)
class Diagnosis:
    """What was found about a step.

    Attributes:
        step: number of the optimizer step, from 1.
        epoch: number of the epoch, from 1.
        cause: a clause for people, such as `first in the output of layers.0 (Linear)`.
        batch: the images, targets and indices of the batch that it came with, on the CPU; empty if none shows it again.
    """

    step: int
    epoch: int
    cause: str
    batch: dict[str, Tensor]

    def __str__(self) -> str:
        return f"the gradients of step {self.step} (epoch {self.epoch}) are not finite: {self.cause}"


def diagnose(state: TrainState, parts: StepConfig, batches: Sequence[Batch], step: int, epoch: int) -> Diagnosis:
    """Train on the batches of a step again, without an update, and see where the first number that is not finite comes from.

    Weights, buffers, gradients and random generators are left as they are.
    """
    with no_trace(state.model, parts.loss), torch.enable_grad(), uncompiled():
        for batch in batches:
            if cause := _cause(state.model, parts, batch):
                content = {"images": batch.images, "targets": batch.targets, "indices": batch.indices}
                return Diagnosis(step, epoch, cause, {name: tensor.detach().cpu() for name, tensor in content.items()})
    cause = "what caused it does not show again, so it depends on random draws or on the weights of that moment"
    return Diagnosis(step, epoch, cause, {})


def _cause(model: nn.Module, parts: StepConfig, batch: Batch) -> str:
    """What is not finite first in the order of computing, with the samples concerned; empty if everything is finite."""
    if samples := nonfinite_samples(batch.images, batch.indices):
        return f"the images of {samples} have values that are not finite"
    targets = parts.targets(batch.targets)
    if samples := nonfinite_samples(targets, batch.indices):
        return f"the targets of {samples} are not finite"
    wrong = [name for name, parameter in model.named_parameters() if not is_finite(parameter)]
    if wrong:
        return f"weights are not finite: {join_names(wrong)}"
    with nonfinite_outputs(model) as outputs, parts.autocast():
        logits = model(batch.images)
        loss = parts.loss(logits, targets)
    if outputs:
        samples = nonfinite_samples(logits, batch.indices)
        label = module_label(outputs[0], model.get_submodule(outputs[0]), "the model")
        return f"first in the output of {label}" + (f", with {samples}" if samples else "")
    value = float(loss.detach())
    if not math.isfinite(value):
        samples = nonfinite_samples(logits, batch.indices)
        return f"the loss is {value}" + (f", and the outputs for {samples}" if samples else "")
    loss.backward()  # type: ignore[no-untyped-call]
    wrong = [name for name, parameter in model.named_parameters() if not is_finite(parameter.grad)]
    return f"outputs and loss are finite ({value:.4g}), the gradients of {join_names(wrong)} are not" if wrong else ""
