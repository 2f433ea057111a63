"""A model in numbers: what its modules are and cost, and the tensors of one pass forward and backward."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runner.data.loaders import Batch
from runner.instrument.nested import first_tensor
from runner.instrument.no_trace import evaluating, no_trace
from runner.instrument.observer import Observer, observe_gradients
from runner.models.features import listener
from runner.run.run import Run
from runner.runtime.determinism import refusal


def layers_of(model: nn.Module, images: Tensor, flops: Mapping[str, int], counted: int) -> list[dict[str, Any]]:
    """The modules of a model, the model itself first, with their outputs for images (B, C, H, W) in evaluation mode.

    Counts are for one sample and without modules inside, so that they add up. `flops` are those of a forward pass with
    `counted` samples, by dotted name of the module, its children included.
    """
    layers: dict[str, dict[str, Any]] = {}
    known: set[int] = set()  # shared weights count with the first module that has them
    for name, module in model.named_modules():
        weights = [weight for weight in module.parameters(recurse=False) if id(weight) not in known]
        known.update(map(id, weights))
        layers[name] = {
            "name": name,
            "kind": type(module).__name__,
            "inner": any(True for _ in module.children()),  # whether it has modules inside
            "parameters": sum(weight.numel() for weight in weights),
            "trainable": sum(weight.numel() for weight in weights if weight.requires_grad),
            "output": None,  # shape of its last output; None if it gives no tensor
            "calls": 0,  # how often it runs in a forward pass
            "output_bytes": 0,  # all calls together; none where the output is its input, changed or viewed
            "flops": flops.get(name, 0) // counted,
        }

    def add_call(name: str, module: nn.Module, inputs: Sequence[Any], output: Any) -> None:
        layer, tensor = layers[name], first_tensor(output)
        layer["calls"] += 1
        if tensor is not None:
            layer["output"] = tuple(tensor.shape[1:])
            given = {value.untyped_storage().data_ptr() for value in inputs if isinstance(value, Tensor)}
            if not layer["inner"] and tensor.untyped_storage().data_ptr() not in given:
                layer["output_bytes"] += tensor.nbytes // max(1, len(tensor) if tensor.ndim else 1)

    with evaluating(model), Observer(model, after=add_call):
        model(images)
    for name, count in flops.items():
        outer = name.rpartition(".")[0]
        while outer and outer not in flops:  # a list of modules does not run itself
            outer = outer.rpartition(".")[0]
        if name and outer in flops:
            layers[outer]["flops"] = max(0, layers[outer]["flops"] - count // counted)
    return list(layers.values())


class Numbers(NamedTuple):
    """A tensor in numbers; elements that are not finite are counted, and ignored in everything else."""

    shape: tuple[int, ...]
    mean: float  # NaN if no element is finite, and so below
    std: float
    minimum: float
    maximum: float
    norm: float  # 2-norm
    zeros: float  # share of elements that are exactly 0
    not_finite: int  # how many are NaN or infinite


def numbers_of(tensor: Tensor) -> Numbers:
    """The numbers of a tensor of any device and dtype."""
    values = tensor.detach().cpu().double().flatten()
    finite = values[values.isfinite()]
    some = finite if len(finite) else values.new_full((1,), math.nan)
    found = some.mean(), some.std(correction=0), some.min(), some.max(), some.norm(), (some == 0).double().mean()
    mean, std, minimum, maximum, norm, zeros = map(float, found)
    return Numbers(tuple(tensor.shape), mean, std, minimum, maximum, norm, zeros, len(values) - len(finite))


@dataclass
class Pass:
    """The tensors of a forward and a backward pass in numbers, by name."""

    loss: float = 0.0  # of the batch
    activations: dict[str, Numbers] = field(default_factory=dict)  # outputs, in the order in which they are computed
    flows: dict[str, Numbers] = field(default_factory=dict)  # gradients of the loss by these outputs, in the same order
    gradients: dict[str, Numbers] = field(default_factory=dict)  # gradients of the loss by the weights
    without: list[str] = field(default_factory=list)  # weights that are trained and that the loss does not depend on
    frozen: list[str] = field(default_factory=list)  # weights that are not trained


def pass_through(training: Run, batch: Batch, tensors: Sequence[str]) -> Pass:
    """Send a batch of training through model and loss and back, and take the numbers of each tensor as it is computed.

    Only the outputs and weights of the modules in `tensors` are looked at, if there are any. Weights, buffers, modes,
    gradients and random generators are left as they were.
    """
    model, found, calls = training.model, Pass(), Counter[str]()
    last: Tensor | None = None

    def take(name: str, tensor: Tensor) -> None:
        calls[name] += 1
        label = name if calls[name] == 1 else f"{name} (call {calls[name]})"
        found.activations[label] = numbers_of(tensor)
        observe_gradients(tensor, lambda gradient: found.flows.update({label: numbers_of(gradient)}))

    def take_output(name: str, module: nn.Module, inputs: list[Any], output: Any) -> None:
        nonlocal last
        tensor = first_tensor(output)
        # A module that only returns the output of the last one inside it would add the same row again
        if name and tensor is not None and not (tensor is last and any(True for _ in module.children())):
            last = tensor
            take(name, tensor)

    step = listener(model, tensors, take, "tensors", training.steps) if tensors else training.steps
    inside = tuple(f"{name}." for name in tensors) or ""
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    names = [name for name, _ in model.named_parameters() if name.startswith(inside)]
    found.frozen = [name for name in names if name not in trained]
    try:
        with no_trace(model, training.loss), torch.enable_grad():
            training.state.train()
            with Observer(model, after=take_output, names=[] if tensors else None), training.precision.autocast():
                loss = step(batch.data)
            found.loss = float(loss.detach())
            gradients: Sequence[Tensor | None] = [None] * len(trained)
            if trained and loss.requires_grad:
                gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
            reached = {name: each for name, each in zip(trained, gradients, strict=True) if each is not None}
            found.without = [name for name in names if name in trained and name not in reached]
            found.gradients = {name: numbers_of(reached[name]) for name in names if name in reached}
    except RuntimeError as error:
        raise refusal(error) or error from error
    # Gradients arrive from the last layer to the first
    found.flows = {name: found.flows[name] for name in found.activations if name in found.flows}
    return found
