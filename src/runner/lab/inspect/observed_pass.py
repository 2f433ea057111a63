"""One batch forward and backward, with every activation and gradient summed up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from runner.data.loaders import Batch
from runner.instrument.nested import first_tensor
from runner.instrument.no_trace import no_trace
from runner.instrument.observer import Observer, observe_gradients
from runner.lab.inspect.statistics import Summary, dead_units, summarize
from runner.models.features import listener
from runner.run.run import Run
from runner.runtime.determinism import refusal


@dataclass
class ObservedPass:
    """The tensors of a forward and a backward pass, summarised."""

    loss: float = 0.0  # of the batch
    activations: list[Summary] = field(default_factory=list)  # outputs, in the order in which they are computed
    dead: dict[str, tuple[int, int]] = field(default_factory=dict)  # dead units of rectified outputs, and all units
    flows: list[Summary] = field(default_factory=list)  # gradients of the loss by these outputs, in the same order
    gradients: list[Summary] = field(default_factory=list)  # gradients of the loss by the weights
    without: list[str] = field(default_factory=list)  # weights that are trained and that the loss does not depend on
    frozen: list[str] = field(default_factory=list)  # weights that are not trained


def pass_through(training: Run, batch: Batch, tensors: Sequence[str]) -> ObservedPass:
    """Send a batch of training through model and loss and back, and sum up every tensor as it is computed.

    Weights, buffers, modes, gradients and random generators are left as they were.
    """
    model, found = training.model, ObservedPass()
    calls: Counter[str] = Counter()
    last: Tensor | None = None

    def take(name: str, tensor: Tensor) -> None:
        nonlocal last
        last = tensor
        calls[name] += 1
        label = name if calls[name] == 1 else f"{name} (call {calls[name]})"
        found.activations.append(summarize(label, tensor))
        if (dead := dead_units(tensor.detach())) is not None:
            found.dead[label] = dead
        observe_gradients(tensor, lambda gradient: found.flows.append(summarize(label, gradient)))

    def take_output(name: str, module: nn.Module, inputs: list[Any], output: Any) -> None:
        tensor = first_tensor(output)
        # A module that only returns the output of the last one inside it would add the same row again.
        if name and tensor is not None and not (tensor is last and any(True for _ in module.children())):
            take(name, tensor)

    try:
        with no_trace(model, training.loss), torch.enable_grad():
            training.state.train()
            if tensors:
                step = listener(model, tensors, take, "tensors", training.steps)
                _compute_gradients(training, batch, step, found)
            else:
                with Observer(model, after=take_output):
                    _compute_gradients(training, batch, training.steps, found)
    except RuntimeError as error:
        raise refusal(error) or error from error
    # Gradients arrive from the last layer to the first.
    order = {each.name: place for place, each in enumerate(found.activations)}
    found.flows.sort(key=lambda flow: order[flow.name])
    return found


def _compute_gradients(training: Run, batch: Batch, step: Callable[[Any], Tensor], found: ObservedPass) -> None:
    weights = dict(training.model.named_parameters())
    trained = {name: weight for name, weight in weights.items() if weight.requires_grad}
    found.frozen = [name for name in weights if name not in trained]
    with training.precision.autocast():
        loss = step(batch.data)
    found.loss = float(loss.detach())
    if not trained or not loss.requires_grad:
        found.without = list(trained)
        return
    gradients: tuple[Tensor | None, ...] = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    for name, gradient in zip(trained, gradients, strict=True):
        if gradient is None:
            found.without.append(name)
        else:
            found.gradients.append(summarize(name, gradient))
