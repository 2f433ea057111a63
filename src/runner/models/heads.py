"""Finds the head of a classifier by its name, and replaces it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from runner.models.initial import draw_small_head

# Where classifiers have their head, torchvision's and timm's among them; the first that has weights counts
_ATTRIBUTES = ("fc", "classifier", "classif", "last_linear", "head", "heads")
_SECOND = ("head_dist", "aux_head")  # further heads, whose outputs timm's models add


class HeadNotFound(ValueError):
    """A model has no identifiable last layer; the message is a clause that says why."""


class MLPHead(nn.Sequential):
    """A head with hidden layers; a separate class, so that `find_head` recognises it."""


class NoHead(nn.Identity):
    """Replaces a removed head: the model returns its features."""


@dataclass(frozen=True)
class Head:
    """The head of a model."""

    path: str  # dotted name of the head's module
    last: str | None  # dotted name of the layer that returns the logits; None if the head was removed

    def covers(self, name: str) -> bool:
        """True if a dotted name of a tensor or module belongs to the head."""
        return name == self.path or name.startswith(self.path + ".")


def find_head(model: nn.Module, logits: Callable[[], Any]) -> Head:
    """Find the layer that returns a model's logits: the last one with weights, in the constructor's order, of a known attribute.

    The attributes are those of `_ATTRIBUTES`, and the whole model where it has none of them. The layer must be a Linear or a
    1x1 convolution with one output for each logit.

    `logits` sends one image through the model, in evaluation mode, and returns the logits (1, C).

    Raises:
        HeadNotFound: if there is no such layer.
    """
    for path, module in model.named_modules():
        if isinstance(module, MLPHead):
            return Head(path, f"{path}.{len(module) - 1}")
        if isinstance(module, NoHead):
            return Head(path, None)
    weighted = [path for path, module in model.named_modules() if path and module._parameters]
    inside = ([path for path in weighted if f"{path}.".startswith(f"{name}.")] for name in _ATTRIBUTES)
    path = next(filter(None, [*inside, weighted]), [""])[-1]
    if not path:
        raise HeadNotFound(f"{type(model).__name__} has no layers")
    layer = model.get_submodule(path)
    if not (isinstance(layer, nn.Linear) or (isinstance(layer, nn.Conv2d) and set(layer.kernel_size) == {1})):
        raise HeadNotFound(f"its last layer is {path} ({type(layer).__name__}), neither Linear nor 1x1 convolution")
    if second := next((name for name in weighted if {*name.split(".")} & {*_SECOND}), ""):
        raise HeadNotFound(f"{path} and {second} give the outputs together")
    name = path.partition(".")[0]
    if name in _ATTRIBUTES and isinstance(model.get_submodule(name), nn.ModuleList):
        raise HeadNotFound(f"{name} is a list of layers, which may give the outputs together")
    outputs = logits()
    shape = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
    if shape != (1, width := len(layer.weight)):
        raise HeadNotFound(f"its last layer {path} has {width} outputs, and the model returns {shape} for one image")
    return Head(path, path)


def replace_head(model: nn.Module, head: Head, hidden: Sequence[int] | None, outputs: int) -> None:
    """Replace the head.

    Hidden layers are initialised after He et al. (arXiv:1502.01852), each followed by a ReLU; the last one starts small, see
    `draw_small_head`.

    `hidden` are the widths of the hidden layers, empty for a single layer; None removes the head.
    """
    old = model.get_submodule(head.path)
    fresh = NoHead() if hidden is None else new_layers(old, [*hidden, outputs])
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if module is old:
            model.set_submodule(path, fresh)


def new_layers(old: nn.Module, widths: Sequence[int]) -> nn.Module:
    """New layers of the kind of `old`, a Linear or a 1x1 convolution, for the same features."""
    assert isinstance(old, nn.Linear | nn.Conv2d), "find_head returns these"
    kind: Any = nn.Linear if isinstance(old, nn.Linear) else functools.partial(nn.Conv2d, kernel_size=1)
    place = {"device": old.weight.device, "dtype": old.weight.dtype}
    inputs = old.in_features if isinstance(old, nn.Linear) else old.in_channels
    layers: list[nn.Module] = []
    for width in widths[:-1]:
        layer = kind(inputs, width, **place)
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        nn.init.zeros_(layer.bias)
        layers += [layer, nn.ReLU(inplace=True)]
        inputs = width
    last = kind(inputs, widths[-1], bias=old.bias is not None, **place)
    draw_small_head(last)
    return MLPHead(*layers, last) if layers else last
