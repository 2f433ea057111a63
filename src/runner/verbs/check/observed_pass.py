"""One pass through a model, watched: who is called after whom, how large activations are, which units never fire."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from runner.verbs.check.context import CheckContext

_RECTIFIERS = ("relu", "relu_", "hardtanh", "hardtanh_", "clamp_min", "clamp_min_", "threshold", "threshold_")


@dataclass
class ObservedPass:
    """What was seen of a forward and a backward pass over a batch, in training mode but without dropout.

    Attributes:
        calls: how often each module was called.
        scales: (name, deviation of its outputs from sample to sample) of each module with weights of its own, as called.
        reaches: deviation, from sample to sample, of what the last of these modules is given.
        follows: (module, norm) where a norm takes what the module gives, and nothing comes in between.
        units: (name, units, of which never fired) of each rectifier.
        loss: of the batch.
        missing: trainable parameters that got no gradient.
        gradients: root mean square of the gradient and of the values of each weight with two dimensions or more.
    """

    calls: Counter[str] = field(default_factory=Counter)
    scales: list[tuple[str, float]] = field(default_factory=list)
    reaches: float = float("nan")
    follows: list[tuple[str, str]] = field(default_factory=list)
    units: list[tuple[str, int, int]] = field(default_factory=list)
    loss: float = float("nan")
    missing: list[str] = field(default_factory=list)
    gradients: dict[str, tuple[float, float]] = field(default_factory=dict)


class _Rectifiers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts units that no sample of the batch brings above 0, wherever a rectifier is called."""

    def __init__(self, found: list[tuple[str, int, int]], inside: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found, self._inside = found, inside

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if str(func.overloadpacket).rpartition(".")[2] in _RECTIFIERS and isinstance(made, Tensor) and made.ndim >= 2:
            values = made.detach()
            # Features come last in tokens (B, N, D), and second in images (B, C, H, W).
            if values.ndim != 3:
                values = values.transpose(1, -1)
            top = values.reshape(-1, values.shape[-1]).amax(0)
            self._found.append((self._inside[-1] if self._inside else "", len(top), int((top <= 0).sum())))
        return made


def observe_pass(context: CheckContext) -> ObservedPass:
    """Send a batch through model, loss and back."""
    found = ObservedPass()
    batch, parts = context.batch, context.training.parts
    model = context.model
    inside: list[str] = []
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.eval()  # its noise differs from sample to sample like a signal
    with _hooks(model, found, inside):
        with _Rectifiers(found.units, inside):
            logits = model(batch.images)
        loss = parts.loss(logits, context.targets(batch))
    found.loss = float(loss.detach())
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.grad is None:
            found.missing.append(name)
        elif parameter.grad is not None and parameter.ndim >= 2 and parameter.grad.layout is torch.strided:
            sizes = (tensor.detach().float().square().mean().sqrt() for tensor in (parameter.grad, parameter))
            gradient, value = (float(size) for size in sizes)
            found.gradients[name] = (gradient, value)
    return found


def _deviation(values: Tensor) -> float:
    """From sample to sample, on average."""
    return float(values.detach().float().std(0).mean())


@contextlib.contextmanager
def _hooks(model: nn.Module, found: ObservedPass, inside: list[str]) -> Iterator[None]:
    made: dict[
        int, tuple[str, int, Tensor]
    ] = {}  # by identity, with the version, and kept so that no other takes its place

    def before(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any) -> None:
            inside.append(name)
            given = inputs[0] if inputs and isinstance(inputs[0], Tensor) else None
            if given is not None and isinstance(
                module, nn.modules.batchnorm._BatchNorm | nn.modules.instancenorm._InstanceNorm
            ):
                source = made.get(id(given))
                if source is not None and source[1] == given._version:
                    found.follows.append((source[0], name))

        return hook

    def after(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            inside.pop()
            found.calls[name] += 1
            if isinstance(output, Tensor) and not any(True for _ in module.children()):
                made[id(output)] = (name, output._version, output)
                weight = getattr(module, "weight", None)
                if isinstance(weight, nn.Parameter) and weight.ndim >= 2:
                    found.scales.append((name, _deviation(output)))
                    found.reaches = _deviation(inputs[0]) if inputs and isinstance(inputs[0], Tensor) else found.reaches

        return hook

    handles = []
    for name, module in model.named_modules():
        handles += [module.register_forward_pre_hook(before(name)), module.register_forward_hook(after(name))]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
