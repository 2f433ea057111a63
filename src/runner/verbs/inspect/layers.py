"""The modules of a model as rows: what they are, what they give, what they cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from runner.instrument.nested import first_tensor
from runner.instrument.no_trace import evaluating
from runner.instrument.observer import Observer

_MOST_DRAWN = 6
_ENOUGH_DRAWN = 3


@dataclass
class Layer:
    """One module.

    Attributes:
        name: dotted; empty for the model itself.
        kind: its class.
        inner: whether it has modules inside.
        parameters: direct ones, without those of modules inside.
        trainable: of these.
        output: shape of its (last) output for one sample; None if it gives no tensor or does not run.
        calls: how often it runs in a forward pass.
        output_bytes: of a sample, all calls together; none where the output is its input, changed in place or viewed.
        flops: of a forward pass with one sample, without those of modules inside.
    """

    name: str
    kind: str
    inner: bool
    parameters: int
    trainable: int
    output: tuple[int, ...] | None = None
    calls: int = 0
    output_bytes: int = 0
    flops: int = 0

    @property
    def listed(self) -> bool:
        """Whether it has parameters or operations besides those of modules inside."""
        return not self.inner or self.parameters > 0 or self.flops > 0

    def add_call(self, inputs: Sequence[Any], output: Any) -> None:
        """Note what the module was given and what it returned."""
        self.calls += 1
        tensor = first_tensor(output)
        if tensor is None:
            return
        self.output = tuple(tensor.shape[1:])
        given = {_storage(value) for value in inputs if isinstance(value, Tensor)}
        if not self.inner and _storage(tensor) not in given:
            self.output_bytes += tensor.nbytes // max(1, len(tensor) if tensor.ndim else 1)


@dataclass(frozen=True)
class Anatomy:
    """What a model is made of.

    Attributes:
        layers: every module, the model itself first.
        buffers_bytes: of running statistics and the like.
        weights_bytes: of parameters, those that several modules share counted once.
    """

    layers: list[Layer] = field(default_factory=list)
    weights_bytes: int = 0
    buffers_bytes: int = 0


def anatomy(model: nn.Module, images: Tensor, flops: Mapping[str, int], counted: int) -> Anatomy:
    """Send images through a model in evaluation mode and see what its modules give.

    Args:
        model: left as it is.
        images: (B, C, H, W).
        flops: forward, by dotted name of the module, its children included.
        counted: samples that `flops` are of.
    """
    modules = dict(model.named_modules())
    counted_weights: set[int] = set()
    layers = {name: _layer(name, module, counted_weights) for name, module in modules.items()}
    with evaluating(model), Observer(model, after=lambda name, module, *seen: layers[name].add_call(*seen)):
        model(images)
    for name, layer in layers.items():
        layer.flops = max(0, flops.get(name, 0) - _inside(name, flops)) // counted
    parameters, buffers = list(model.parameters()), list(model.buffers())
    return Anatomy(
        list(layers.values()),
        sum(parameter.nbytes for parameter in parameters),
        sum(buffer.nbytes for buffer in buffers),
    )


def _inside(name: str, flops: Mapping[str, int]) -> int:
    """Operations of the outermost modules inside one; a list of modules, which does not run itself, is passed over."""
    prefix = f"{name}." if name else ""
    inside = [other for other in flops if other.startswith(prefix) and other != name]
    return sum(flops[other] for other in inside if not _within(other, set(inside)))


def _within(name: str, others: set[str]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:count]) in others for count in range(1, len(parts)))


def _layer(name: str, module: nn.Module, counted: set[int]) -> Layer:
    """A row without what only running it shows; shared weights count with the first module that has them."""
    own = [weight for weight in module.parameters(recurse=False) if id(weight) not in counted]
    counted.update(id(weight) for weight in own)
    return Layer(
        name=name,
        kind=type(module).__name__,
        inner=any(True for _ in module.children()),
        parameters=sum(parameter.numel() for parameter in own),
        trainable=sum(parameter.numel() for parameter in own if parameter.requires_grad),
    )


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def is_picture(shape: Sequence[int] | None) -> bool:
    """Whether the output of one sample can be seen as maps: (C, H, W) of more than one pixel."""
    return shape is not None and len(shape) == 3 and shape[1] * shape[2] > 1


def outer_maps(layers: Sequence[Layer]) -> list[str]:
    """Layers whose outputs show best what a model makes of an image: the outer ones, or what is inside if they are few."""
    names = [layer.name for layer in layers if layer.name and is_picture(layer.output)]
    chosen = [name for name in names if not any(name.startswith(f"{other}.") for other in names)]
    while len(chosen) < _ENOUGH_DRAWN:
        inside = {name: _children(name, names) for name in chosen}
        opened = next((name for name in reversed(chosen) if inside[name]), None)
        if opened is None:
            break
        place = chosen.index(opened)
        chosen[place : place + 1] = inside[opened]
    return evenly(chosen, _MOST_DRAWN)


def _children(name: str, names: Sequence[str]) -> list[str]:
    """Of those inside a module the outer ones."""
    inside = [other for other in names if other.startswith(f"{name}.")]
    return [other for other in inside if not any(other.startswith(f"{third}.") for third in inside)]


def evenly(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many of a list, the first and the last among them, at even intervals."""
    if len(items) <= most:
        return list(items)
    if most == 1:
        return [items[0]]
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def shape_text(shape: Sequence[int] | None) -> str:
    """`32x8x8`; `scalar` for no axes; empty for None."""
    if shape is None:
        return ""
    return "x".join(str(size) for size in shape) if shape else "scalar"


def dtype_text(dtype: torch.dtype) -> str:
    """`float32`."""
    return str(dtype).removeprefix("torch.")
