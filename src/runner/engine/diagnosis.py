"""Finds the first number that is not finite: `diagnose` looks for it after a step, `FiniteWatch` while training."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from runner.distributed.sharding import is_sharded, local
from runner.distributed.world import world
from runner.engine.errors import Diverged
from runner.engine.protocols import Batch
from runner.engine.state import TrainState
from runner.engine.step import StepConfig
from runner.instrument.nested import fields_of, first_tensor, tensors_in
from runner.instrument.no_trace import no_trace, uncompiled
from runner.instrument.nonfinite import is_finite, join_names, nonfinite_outputs, nonfinite_samples
from runner.instrument.observer import Observer, module_label, observe_gradients


@dataclass(frozen=True)
class Diagnosis:
    """The cause of a step that is not finite; step and epoch are counted from 1."""

    step: int
    epoch: int
    cause: str  # a clause for people, such as `first in the output of layers.0 (Linear)`
    batch: dict[str, Tensor]  # images, targets and indices that it came with, on the CPU; empty if none shows it again

    def __str__(self) -> str:
        return f"the gradients of step {self.step} (epoch {self.epoch}) are not finite: {self.cause}"


def diagnose(state: TrainState, parts: StepConfig, batches: Sequence[Batch], step: int, epoch: int) -> Diagnosis:
    """Train on the batches of a step again, without an update, and see where the first number that is not finite comes from.

    Weights, buffers, gradients and random generators are left as they are. Where the model is sharded, ranks that stop in
    the middle of a forward pass would leave the others waiting, so only batches and weights are searched.
    """
    # The failing step is computed again without compilation, as compiled code hides the modules
    with no_trace(state.model, state.loss), torch.enable_grad(), uncompiled():
        for batch in batches:
            # Images, targets and weights first: what goes in may explain everything that comes out
            cause = _cause_before(state, batch)
            # One rank alone cannot run forward on a sharded model, so only inputs and weights are searched
            if is_sharded(state.model):
                cause = next(filter(None, world().gather(cause)), "")
            elif not cause:
                cause = _cause_in_passes(state, parts, batch)
            if cause:
                content = {**fields_of(batch.data), "indices": batch.indices}
                return Diagnosis(step, epoch, cause, {name: tensor.detach().cpu() for name, tensor in content.items()})
    # Dropout draws other numbers now, so not every fault shows again
    cause = "the cause could not be reproduced, so it depends on random draws or on the weights at that step"
    if is_sharded(state.model):
        cause = "images, targets and weights are finite, and strategy=fsdp does not search further"
    return Diagnosis(step, epoch, cause, {})


def _cause_before(state: TrainState, batch: Batch) -> str:
    """Inputs and weights that are not finite before anything is computed."""
    for name, field in fields_of(batch.data).items():
        if samples := nonfinite_samples(field, batch.indices):
            return f"the {name} of {samples} have values that are not finite"
    wrong = [name for name, parameter in state.named_parameters() if not is_finite(local(parameter))]
    return f"weights are not finite: {join_names(wrong)}" if wrong else ""


def _cause_in_passes(state: TrainState, parts: StepConfig, batch: Batch) -> str:
    """The first output, loss or gradient that is not finite in forward and backward."""
    model, logits = state.model, batch.indices  # which are finite

    def keep(name: str, module: nn.Module, inputs: list[Any], output: Any) -> None:
        nonlocal logits
        if (found := first_tensor(output)) is not None:
            logits = found

    with nonfinite_outputs(model) as outputs, Observer(model, after=keep, names=[""]), parts.autocast():
        loss = parts.objective(batch.data)
    # From the inside out: the first module, then the loss, then gradients
    if outputs:
        samples = nonfinite_samples(logits, batch.indices)
        label = module_label(outputs[0], model.get_submodule(outputs[0]), "the model")
        return f"first in the output of {label}" + (f", with {samples}" if samples else "")
    value = float(loss.detach())
    if not math.isfinite(value):
        samples = nonfinite_samples(logits, batch.indices)
        return f"the loss is {value}" + (f", and the outputs for {samples}" if samples else "")
    loss.backward()  # type: ignore[no-untyped-call]
    wrong = [name for name, parameter in state.named_parameters() if not is_finite(parameter.grad)]
    return f"outputs and loss are finite ({value:.4g}), the gradients of {join_names(wrong)} are not" if wrong else ""


class FiniteWatch:
    """Ends training with `Diverged` at the first module output, or gradient that reaches it, that is not finite.

    Each check waits for the device. Where the loss is scaled, gradients overflow as part of scaling, so only outputs are
    checked.
    """

    def __init__(self, state: TrainState) -> None:
        self._state = state
        self._checks_gradients = state.scaler is None
        self._passed = "the loss"  # where the gradient was last seen to be finite
        Observer(state.model, before=self._check_inputs, names=[""])
        Observer(state.model, after=self._check_output)
        stepped = {parameter for group in state.optimizer.param_groups for parameter in group["params"]}
        for name, parameter in state.named_parameters():
            if self._checks_gradients and parameter in stepped:
                # A parameter that is frozen for a while accepts no hook
                needed = parameter.requires_grad
                parameter.requires_grad_(True)
                observe_gradients(parameter, functools.partial(self._check_gradient, f"of {name}"))
                parameter.requires_grad_(needed)

    def _check_inputs(self, name: str, module: nn.Module, inputs: list[Any]) -> None:
        self._passed = "the loss"
        if not is_finite(inputs):
            raise Diverged(f"{self._when()} the images of the batch have values that are not finite")

    def _check_output(self, name: str, module: nn.Module, inputs: list[Any], output: Any) -> None:
        what = f"the output of {module_label(name, module, 'the model')}"
        if not is_finite(output):
            raise Diverged(f"{self._when()} {what} is the first that is not finite")
        if self._checks_gradients:
            floats = [tensor for tensor in tensors_in(output) if tensor.is_floating_point()]
            observe_gradients(floats, functools.partial(self._check_gradient, f"at {what}"))

    def _check_gradient(self, place: str, gradient: Tensor) -> None:
        if not is_finite(gradient):
            raise Diverged(
                f"{self._when()} the gradient {place} is the first that is not finite; at {self._passed} it was finite"
            )
        if place.startswith("at "):
            self._passed = place.removeprefix("at ")

    def _when(self) -> str:
        done = self._state.position.global_step
        return f"in step {done + 1}" if self._state.model.training else f"in the evaluation after step {done}"
