"""The head of a classifier: found by what happens in a forward pass, and replaced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class HeadNotFound(ValueError):
    """A model has no last layer that could be told from the rest; the message says why, a clause."""


class MLPHead(nn.Sequential):
    """A head with hidden layers; a class of its own, so that it is known again."""


class NoHead(nn.Identity):
    """The place of a head that was taken away: the model gives its features."""


@dataclass(frozen=True)
class Head:
    """Where the head of a model is.

    Attributes:
        path: dotted name of the module that is the head.
        last: dotted name of the layer that gives the logits; None where the head was taken away.
    """

    path: str
    last: str | None

    def covers(self, name: str) -> bool:
        """Whether a dotted name of a tensor or module lies in the head."""
        return name == self.path or name.startswith(self.path + ".")


def find_head(model: nn.Module, forward: Callable[[], Any]) -> Head:
    """Find the layer that gives a model's logits: the last one with weights that a forward pass comes to.

    It has to be a Linear or a 1x1 convolution, used once, whose outputs alone decide the logits. That is tried: with its
    outputs set to zero, all logits have to be equal.

    Args:
        model: the model, in evaluation mode.
        forward: sends one image through the model, and gives the logits (1, C).

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
    width = _outputs(layer)
    if not path:
        raise HeadNotFound(f"{type(model).__name__} is a single layer")
    if width is None:
        raise HeadNotFound(
            f"its last layer with weights is {path} ({type(layer).__name__}), no Linear and no 1x1 convolution"
        )
    with _zeroed(layer):
        logits = forward()
    if not isinstance(logits, Tensor) or logits.ndim != 2 or logits.shape[1] != width:
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise HeadNotFound(f"its last layer {path} has {width} outputs, and the model gives {shape} for one image")
    if not bool((logits == logits[:, :1]).all()):
        raise HeadNotFound(f"its last layer {path} does not decide the outputs alone")
    return Head(path, path)


def _last_started(model: nn.Module, forward: Callable[[], Any]) -> str:
    """Dotted name of the module with weights of its own that starts last, and only once."""
    started: list[str] = []

    def note(path: str) -> Callable[..., None]:
        return lambda module, inputs: started.append(path)

    handles = [
        module.register_forward_pre_hook(note(path)) for path, module in model.named_modules() if module._parameters
    ]
    try:
        forward()
    finally:
        for handle in handles:
            handle.remove()
    if not started:
        raise HeadNotFound(f"no layer of {type(model).__name__} with weights is called")
    if started.count(started[-1]) > 1:
        raise HeadNotFound(f"its last layer {started[-1]} is used {started.count(started[-1])} times")
    return started[-1]


class _zeroed:
    """A layer whose outputs are zero meanwhile."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer

    def __enter__(self) -> None:
        self._handle = self._layer.register_forward_hook(lambda module, inputs, output: torch.zeros_like(output))

    def __exit__(self, *_: object) -> None:
        self._handle.remove()


def _outputs(layer: nn.Module) -> int | None:
    """Outputs of a Linear or a 1x1 convolution; None for anything else."""
    if isinstance(layer, nn.Linear):
        return layer.out_features
    if isinstance(layer, nn.Conv2d) and set(layer.kernel_size) == {1}:
        return layer.out_channels
    return None


def replace_head(model: nn.Module, head: Head, hidden: Sequence[int] | None, outputs: int) -> None:
    """Put a fresh head into the place of the last layer.

    The hidden layers start as He et al. (arXiv:1502.01852) have it, each followed by a ReLU. The last one starts small, so
    that all classes are about equally likely at first and the first loss is ln(outputs).

    Args:
        model: the model.
        head: where its head is, as `find_head` says.
        hidden: widths of the hidden layers, empty for a single layer; None takes the head away.
        outputs: outputs of the new head.
    """
    old = model.get_submodule(head.path)
    fresh = NoHead() if hidden is None else _fresh(old, [*hidden, outputs])
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if module is old:
            model.set_submodule(path, fresh)


def _fresh(old: nn.Module, widths: Sequence[int]) -> nn.Module:
    """Layers of the kind of `old`, on the same features."""
    assert isinstance(old, nn.Linear | nn.Conv2d), "what find_head gives"
    inputs = old.in_features if isinstance(old, nn.Linear) else old.in_channels
    place: dict[str, Any] = {"device": old.weight.device, "dtype": old.weight.dtype}
    layers: list[nn.Module] = []
    for index, width in enumerate(widths):
        is_last = index == len(widths) - 1
        bias = old.bias is not None if is_last else True
        layer: nn.Linear | nn.Conv2d
        if isinstance(old, nn.Linear):
            layer = nn.Linear(inputs, width, bias=bias, **place)
        else:
            layer = nn.Conv2d(inputs, width, kernel_size=1, bias=bias, **place)
        if is_last:
            nn.init.normal_(layer.weight, std=0.01)
        else:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
        layers += [layer] if is_last else [layer, nn.ReLU(inplace=True)]
        inputs = width
    return layers[0] if len(layers) == 1 else MLPHead(*layers)
