"""One observed pass through the model: the size of activations and gradients, and which units never fire."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from runner.instrument.observer import Observer
from runner.verbs.check.context import BATCH_NORM, CheckContext

_RECTIFIERS = ("relu", "relu_", "hardtanh", "hardtanh_", "clamp_min", "clamp_min_", "threshold", "threshold_")
_NORMS = (BATCH_NORM, nn.modules.instancenorm._InstanceNorm)


@dataclass
class ObservedPass:
    """A forward and a backward pass over a batch, in training mode but without dropout.

    Attributes:
        scales: (name, deviation of its outputs between samples) of each module with weights, in the order of the calls.
        input_scale: deviation between samples of the input of the last of these modules.
        before_norm: (module, norm) if a norm takes the output of a module, and nothing comes between.
        units: (name, units, units that never fired) of each rectifier.
        missing: trainable parameters without a gradient.
        gradients: root mean square of the gradient of each weight with two dimensions or more.
    """

    scales: list[tuple[str, float]] = field(default_factory=list)
    input_scale: float = float("nan")
    before_norm: list[tuple[str, str]] = field(default_factory=list)
    units: list[tuple[str, int, int]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    gradients: dict[str, float] = field(default_factory=dict)


class _Rectifiers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts units that no sample of the batch brings above 0, wherever a rectifier is called."""

    def __init__(self, found: list[tuple[str, int, int]], inside: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found, self._inside = found, inside

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if (
            str(func.overloadpacket).rpartition(".")[2] in _RECTIFIERS
            and isinstance(output, Tensor)
            and output.ndim >= 2
        ):
            values = output.detach()
            # Features come last in tokens (B, N, D), and second in images (B, C, H, W).
            if values.ndim != 3:
                values = values.transpose(1, -1)
            top = values.reshape(-1, values.shape[-1]).amax(0)
            self._found.append((self._inside[-1] if self._inside else "", len(top), int((top <= 0).sum())))
        return output


def observe_pass(context: CheckContext) -> ObservedPass:
    """Send a batch through model, loss and back."""
    found, batch, model = ObservedPass(), context.batch, context.model
    inside: list[str] = []
    outputs: dict[int, tuple[str, int, Tensor]] = {}  # by identity, with the version; kept, so that no identity recurs

    def before(name: str, module: nn.Module, inputs: list[Any]) -> None:
        inside.append(name)
        if inputs and isinstance(inputs[0], Tensor) and isinstance(module, _NORMS):
            source, version, _ = outputs.get(id(inputs[0]), ("", -1, None))
            if version == inputs[0]._version:
                found.before_norm.append((source, name))

    def after(name: str, module: nn.Module, inputs: list[Any], output: Any) -> None:
        inside.pop()
        if isinstance(output, Tensor) and next(module.children(), None) is None:
            outputs[id(output)] = (name, output._version, output)
            weight = getattr(module, "weight", None)
            if isinstance(weight, nn.Parameter) and weight.ndim >= 2:
                found.scales.append((name, _deviation(output)))
                if inputs and isinstance(inputs[0], Tensor):
                    found.input_scale = _deviation(inputs[0])

    context.disable_dropout()
    with Observer(model, before, after):
        with _Rectifiers(found.units, inside):
            logits = model(batch.images)
        loss = context.training.parts.loss(logits, context.targets(batch))
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if parameter.requires_grad and gradient is None:
            found.missing.append(name)
        elif gradient is not None and parameter.ndim >= 2 and gradient.layout is torch.strided:
            found.gradients[name] = float(gradient.float().square().mean().sqrt())
    return found


def _deviation(values: Tensor) -> float:
    """Standard deviation between samples, on average."""
    return float(values.detach().float().std(0).mean())
