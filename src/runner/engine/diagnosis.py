"""Why the loss or the gradients of a step were not finite."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from runner.engine.buffers import untouched_buffers
from runner.engine.generators import untouched_generators
from runner.engine.protocols import Batch
from runner.engine.state import TrainState
from runner.engine.step import StepConfig

_NAMED = 8  # samples or tensors that a sentence lists


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

    Args:
        state: what training changes, with the weights that the step began with.
        parts: what a step is made of.
        batches: the batches of the step.
        step: its number, from 1.
        epoch: number of its epoch, from 1.
    """
    with _as_it_was(state.model, parts.loss):
        for batch in batches:
            if cause := _cause(state.model, parts, batch):
                content = {"images": batch.images, "targets": batch.targets, "indices": batch.indices}
                return Diagnosis(step, epoch, cause, {name: tensor.detach().cpu() for name, tensor in content.items()})
    cause = "what caused it does not show again, so it depends on random draws or on the weights of that moment"
    return Diagnosis(step, epoch, cause, {})


def _cause(model: nn.Module, parts: StepConfig, batch: Batch) -> str:
    """What is not finite first in the order of computing, with the samples concerned; empty if everything is finite."""
    if samples := _samples_with(batch.images, batch.indices):
        return f"the images of {samples} have values that are not finite"
    targets = parts.targets(batch.targets)
    if samples := _samples_with(targets, batch.indices):
        return f"the targets of {samples} are not finite"
    wrong = [name for name, parameter in model.named_parameters() if not bool(parameter.detach().isfinite().all())]
    if wrong:
        return f"weights are not finite: {_listed(wrong)}"
    with _watched(model) as outputs, parts.autocast():
        logits = model(batch.images)
        loss = parts.loss(logits, targets)
    if outputs:
        samples = _samples_with(logits.detach(), batch.indices)
        kind = type(model.get_submodule(outputs[0])).__name__
        return f"first in the output of {outputs[0] or 'the model'} ({kind})" + (f", with {samples}" if samples else "")
    value = float(loss.detach())
    if not math.isfinite(value):
        samples = _samples_with(logits.detach(), batch.indices)
        return f"the loss is {value}" + (f", and the outputs for {samples}" if samples else "")
    loss.backward()  # type: ignore[no-untyped-call]
    wrong = [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and not bool(_values(parameter.grad).isfinite().all())
    ]
    return f"outputs and loss are finite ({value:.4g}), the gradients of {_listed(wrong)} are not" if wrong else ""


@contextlib.contextmanager
def _watched(model: nn.Module) -> Iterator[list[str]]:
    """Collect the names of modules whose output is not finite, in the order in which they end: inner ones first."""
    found: list[str] = []

    def watch(name: str) -> Any:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            if any(not bool(tensor.detach().isfinite().all()) for tensor in _tensors(output)):
                found.append(name)

        return look

    handles = [module.register_forward_hook(watch(name)) for name, module in model.named_modules()]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _as_it_was(model: nn.Module, loss: object) -> Iterator[None]:
    """Put back gradients, buffers and random generators; compiled code is not used, as it runs no hooks inside."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    compiled = "torch._dynamo" in sys.modules
    eager = torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with untouched_generators(model), untouched_buffers(model, loss), torch.enable_grad(), eager:
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, list | tuple) else []


def _values(gradient: Tensor) -> Tensor:
    return gradient if gradient.layout is torch.strided else gradient.coalesce().values()


def _samples_with(values: Tensor, indices: Tensor) -> str:
    """The samples of which an element is not finite, such as `sample 7` or `samples 7, 12 and 30 more`, or nothing."""
    if not values.is_floating_point() or values.shape[:1] != indices.shape:
        return ""
    wrong = indices[~values.flatten(1).isfinite().all(1) if values.ndim > 1 else ~values.isfinite()].tolist()
    if not wrong:
        return ""
    return f"sample{'s' * (len(wrong) > 1)} {_listed([str(index) for index in wrong])}"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
