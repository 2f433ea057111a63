"""The modules of a model as rows: what they are, what they give, what they cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from runner.instrument.nested import first_tensor
from runner.instrument.no_trace import evaluating
from runner.instrument.observer import Observer

_MOST_DRAWN = 6
_ENOUGH_DRAWN = 3


@dataclass
class Layer:
    """One module."""

    name: str  # dotted; empty for the model itself
    kind: str  # its class
    inner: bool  # whether it has modules inside
    parameters: int  # direct ones, without those of modules inside
    trainable: int  # of these
    output: tuple[int, ...] | None = None  # shape of its last output for one sample; None if it gives no tensor
    calls: int = 0  # how often it runs in a forward pass
    output_bytes: int = 0  # of a sample, all calls together; none where the output is its input, changed or viewed
    flops: int = 0  # of a forward pass with one sample, without those of modules inside

    def add_call(self, inputs: Sequence[Any], output: Any) -> None:
        """Add a call with these inputs and this output."""
        self.calls += 1
        tensor = first_tensor(output)
        if tensor is None:
            return
        self.output = tuple(tensor.shape[1:])
        given = {value.untyped_storage().data_ptr() for value in inputs if isinstance(value, Tensor)}
        if not self.inner and tensor.untyped_storage().data_ptr() not in given:
            self.output_bytes += tensor.nbytes // max(1, len(tensor) if tensor.ndim else 1)


def layers_of(model: nn.Module, images: Tensor, flops: Mapping[str, int], counted: int) -> list[Layer]:
    """The modules of a model, with their outputs for images in evaluation mode; the model itself comes first.

    Args:
        model: left as it is.
        images: (B, C, H, W).
        flops: forward, by dotted name of the module, its children included.
        counted: samples that `flops` are of.
    """
    layers: dict[str, Layer] = {}
    known: set[int] = set()  # shared weights count with the first module that has them
    for name, module in model.named_modules():
        weights = [weight for weight in module.parameters(recurse=False) if id(weight) not in known]
        known.update(map(id, weights))
        trainable = sum(weight.numel() for weight in weights if weight.requires_grad)
        inner = any(True for _ in module.children())
        layers[name] = Layer(name, type(module).__name__, inner, sum(map(Tensor.numel, weights)), trainable)
    with evaluating(model), Observer(model, after=lambda name, module, *seen: layers[name].add_call(*seen)):
        model(images)
    # Counts include the modules inside, and rows of a table have to add up.
    own = dict(flops)
    for name, count in flops.items():
        parts = name.split(".")
        around = (".".join(parts[:length]) for length in reversed(range(len(parts))))
        # A list of modules does not run itself and has no operations.
        outer = next((other for other in around if name and other in flops), None)
        if outer is not None:
            own[outer] -= count
    for name, layer in layers.items():
        layer.flops = max(0, own.get(name, 0)) // counted
    return list(layers.values())


def is_picture(shape: Sequence[int] | None) -> bool:
    """True if the output of one sample can be drawn as maps: (C, H, W) of more than one pixel."""
    return shape is not None and len(shape) == 3 and shape[1] * shape[2] > 1


def outer_maps(layers: Sequence[Layer]) -> list[str]:
    """Layers whose outputs show best what a model makes of an image: the outer ones, or what is inside if they are few."""
    names = [layer.name for layer in layers if layer.name and is_picture(layer.output)]
    chosen = _outer(names)
    while len(chosen) < _ENOUGH_DRAWN:
        inside = [_outer([name for name in names if name.startswith(f"{each}.")]) for each in chosen]
        place = next((place for place in reversed(range(len(chosen))) if inside[place]), None)
        if place is None:
            break
        chosen[place : place + 1] = inside[place]
    if len(chosen) <= _MOST_DRAWN:
        return chosen
    return [chosen[place] for place in np.linspace(0, len(chosen) - 1, _MOST_DRAWN).round().astype(int)]


def _outer(names: Sequence[str]) -> list[str]:
    """Those that are inside none of the others."""
    return [name for name in names if not any(name.startswith(f"{other}.") for other in names)]


def shape_text(shape: Sequence[int] | None) -> str:
    """`32x8x8`; `scalar` for no axes; empty for None."""
    if shape is None:
        return ""
    return "x".join(str(size) for size in shape) if shape else "scalar"
