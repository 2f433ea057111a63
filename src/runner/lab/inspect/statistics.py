"""Tensors in a few numbers and a histogram: any, and those of one batch forward and backward."""

from __future__ import annotations

import math
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
from runner.models.features import listener
from runner.run.run import Run
from runner.runtime.determinism import refusal

BINS = 40


@dataclass(frozen=True)
class Summary:
    """The distribution of a tensor; elements that are not finite are counted, and ignored in everything else."""

    name: str
    shape: tuple[int, ...]
    mean: float  # NaN if no element is finite, and so below
    std: float
    minimum: float
    maximum: float
    norm: float  # 2-norm
    zeros: float  # share of elements that are exactly 0
    not_finite: int  # how many are NaN or infinite
    low: float  # of the histogram
    high: float
    counts: list[int]  # elements in each of its bins, which are equally wide


def summarize(name: str, tensor: Tensor) -> Summary:
    """The summary of a tensor of any device and dtype."""
    # On the CPU, where a histogram is made of whole numbers that are the same each time.
    values = tensor.detach().float().cpu().flatten()
    finite = values.isfinite()
    not_finite = int((~finite).sum())
    values = values[finite] if not_finite else values
    shape, count = tuple(tensor.shape), values.numel()
    if count == 0:
        unknown = dict.fromkeys(("mean", "std", "minimum", "maximum", "norm"), math.nan)
        return Summary(name, shape, zeros=0.0, not_finite=not_finite, low=0.0, high=0.0, counts=[], **unknown)
    low, high = float(values.min()), float(values.max())
    mean = float(values.sum(dtype=torch.float64)) / count
    squares = float(values.double().square().sum())
    left, right = (low, high) if high > low else (low - 0.5, high + 0.5)
    return Summary(
        name=name,
        shape=shape,
        mean=mean,
        std=math.sqrt(max(0.0, squares / count - mean * mean)),
        minimum=low,
        maximum=high,
        norm=math.sqrt(squares),
        zeros=float((values == 0).sum()) / count,
        not_finite=not_finite,
        low=left,
        high=right,
        counts=[int(number) for number in torch.histc(values, BINS, left, right).tolist()],
    )


def dead_units(outputs: Tensor) -> tuple[int, int] | None:
    """Units of rectified outputs that are 0 for every sample and at every place, and how many units there are.

    A unit is a channel of (B, C, H, W), and a feature of (B, F) and of tokens (B, N, F).

    Returns:
        None if the outputs are not rectified: of another number of axes, with a negative value, or without a zero.
    """
    if outputs.ndim not in (2, 3, 4) or not outputs.is_floating_point() or outputs.numel() == 0:
        return None
    if bool((outputs < 0).any()) or not bool((outputs == 0).any()):
        return None
    units = 1 if outputs.ndim == 4 else outputs.ndim - 1
    silent = (outputs == 0).movedim(units, 0).flatten(1).all(dim=1)
    return int(silent.sum()), silent.numel()


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
