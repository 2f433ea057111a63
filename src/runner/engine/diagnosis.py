"""Finds the first number that is not finite: `diagnose` looks for it after a step, `watch_finite` while training."""

from __future__ import annotations

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
from runner.engine.step import Step
from runner.instrument.nested import fields_of, first_tensor, tensors_in
from runner.instrument.no_trace import no_trace, uncompiled
from runner.instrument.observer import Observer, module_label


@dataclass(frozen=True)
class Diagnosis:
    """The cause of a step that is not finite; step and epoch are counted from 1."""

    step: int
    epoch: int
    cause: str  # a clause for people, such as `first in the output of layers.0 (Linear)`
    batch: dict[str, Tensor]  # images, targets and indices that it came with, on the CPU; empty if none shows it again

    def __str__(self) -> str:
        return f"the gradients of step {self.step} (epoch {self.epoch}) are not finite: {self.cause}"


def diagnose(trains: Step, batches: Sequence[Batch], step: int, epoch: int) -> Diagnosis:
    """Train on the batches of a step again, without an update, and see where the first number that is not finite comes from.

    Weights, buffers, gradients and random generators are left as they are. Where the model is sharded, ranks that stop in
    the middle of a forward pass would leave the others waiting, so only batches and weights are searched.
    """
    state = trains.state
    # The failing step is computed again without compilation, as compiled code hides the modules
    with no_trace(state.model, state.loss), torch.enable_grad(), uncompiled():
        for batch in batches:
            # Images, targets and weights first: what goes in may explain everything that comes out
            cause = _cause_before(state, batch)
            # One rank alone cannot run forward on a sharded model, so only inputs and weights are searched
            if is_sharded(state.model):
                cause = next(filter(None, world().gather(cause)), "")
            elif not cause:
                cause = _cause_in_passes(trains, batch)
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
    return f"weights are not finite: {listed(wrong)}" if wrong else ""


def _cause_in_passes(trains: Step, batch: Batch) -> str:
    """The first output, loss or gradient that is not finite in forward and backward."""
    state, outputs, logits = trains.state, list[str](), batch.indices  # which are finite

    def look(name: str, module: nn.Module, inputs: list[Any], output: Any) -> None:
        nonlocal logits
        if not is_finite(output):
            outputs.append(module_label(name, module, "the model"))
        if not name and (found := first_tensor(output)) is not None:
            logits = found

    with Observer(state.model, after=look), trains.autocast():
        loss = trains.objective(batch.data)
    # From the inside out, as inner modules end first: a module, then the loss, then gradients
    samples, value = nonfinite_samples(logits, batch.indices), float(loss.detach())
    if outputs:
        return f"first in the output of {outputs[0]}" + (f", with {samples}" if samples else "")
    if not math.isfinite(value):
        return f"the loss is {value}" + (f", and the outputs for {samples}" if samples else "")
    loss.backward()  # type: ignore[no-untyped-call]
    wrong = [name for name, parameter in state.named_parameters() if not is_finite(parameter.grad)]
    return f"outputs and loss are finite ({value:.4g}), the gradients of {listed(wrong)} are not" if wrong else ""


def watch_finite(state: TrainState) -> None:
    """End training with `Diverged` at the first module whose output is not finite; each check waits for the device."""

    def when() -> str:
        done = state.position.global_step
        return f"in step {done + 1}" if state.model.training else f"in the evaluation after step {done}"

    def check_inputs(name: str, module: nn.Module, inputs: list[Any]) -> None:
        if not is_finite(inputs):
            raise Diverged(f"{when()} the images of the batch have values that are not finite")

    def check_output(name: str, module: nn.Module, inputs: list[Any], output: Any) -> None:
        if not is_finite(output):
            label = module_label(name, module, "the model")
            raise Diverged(f"{when()} the output of {label} is the first that is not finite")

    Observer(state.model, before=check_inputs, names=[""])
    Observer(state.model, after=check_output)


def is_finite(value: Any) -> bool:
    """True if every floating-point tensor in nested containers is finite; waits for the device."""
    tensors = (tensor.detach() for tensor in tensors_in(value) if tensor.is_floating_point())
    stored = (tensor if tensor.layout is torch.strided else tensor.coalesce().values() for tensor in tensors)
    return all(bool(tensor.isfinite().all()) for tensor in stored)


def nonfinite_samples(values: Tensor, indices: Tensor) -> str:
    """Which of the samples (B,) have an element of `values` (B, ...) that is not finite: `samples 7, 12`, or nothing."""
    values = values.detach()
    if not values.is_floating_point() or values.shape[:1] != indices.shape:
        return ""
    wrong = indices[~values.flatten(1).isfinite().all(1) if values.ndim > 1 else ~values.isfinite()].tolist()
    return f"sample{'s' * (len(wrong) > 1)} {listed(wrong)}" if wrong else ""


def listed(names: Sequence[object], most: int = 8) -> str:
    """The first names, and how many more there are."""
    more = len(names) - most
    return ", ".join(map(str, names[:most])) + (f" and {more} more" if more > 0 else "")
