"""Finds the head of a classifier in a forward pass, and replaces it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from runner.instrument.observer import Observer
from runner.models.initial import draw_small_head


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


def find_head(model: nn.Module, forward: Callable[[], Any]) -> Head:
    """Find the layer that returns a model's logits: the last one with weights that a forward pass reaches.

    It must be a Linear or a 1x1 convolution that is used once, and its outputs alone must decide the logits: with its outputs
    set to zero, all logits are equal.

    `forward` sends one image through the model, in evaluation mode, and returns the logits (1, C).

    Raises:
        HeadNotFound: if there is no such layer.
    """
    for path, module in model.named_modules():
        if isinstance(module, MLPHead):
            return Head(path, f"{path}.{len(module) - 1}")
        if isinstance(module, NoHead):
            return Head(path, None)
    path = _last_started(model, forward)
    layer = model.get_submodule(path)
    if not path:
        raise HeadNotFound(f"{type(model).__name__} is a single layer")
    if not (isinstance(layer, nn.Linear) or (isinstance(layer, nn.Conv2d) and set(layer.kernel_size) == {1})):
        raise HeadNotFound(
            f"its last layer with weights is {path} ({type(layer).__name__}), neither Linear nor 1x1 convolution"
        )
    with layer.register_forward_hook(lambda module, inputs, output: torch.zeros_like(output)):
        logits = forward()
    shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
    if shape != (1, width := len(layer.weight)):
        raise HeadNotFound(f"its last layer {path} has {width} outputs, and the model returns {shape} for one image")
    if not bool((logits == logits[:, :1]).all()):
        raise HeadNotFound(f"its last layer {path} does not decide the outputs alone")
    return Head(path, path)


def _last_started(model: nn.Module, forward: Callable[[], Any]) -> str:
    """Dotted name of the module with its own weights that starts last; it must start only once."""
    started: list[str] = []
    names = [path for path, module in model.named_modules() if module._parameters]
    with Observer(model, before=lambda path, module, inputs: started.append(path), names=names):
        forward()
    if not started:
        raise HeadNotFound(f"no layer of {type(model).__name__} with weights is called")
    if started.count(started[-1]) > 1:
        raise HeadNotFound(f"its last layer {started[-1]} is used {started.count(started[-1])} times")
    return started[-1]


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
