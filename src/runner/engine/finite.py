"""Every output and every gradient looked at while training: the first that is not finite ends the run and is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from runner.engine.errors import Diverged
from runner.engine.state import TrainState


class FiniteWatch:
    """Looks at what every module gives and at the gradients that reach it, by hooks; a model without it costs nothing.

    Each look waits for the device. Where the loss is scaled, gradients overflow as part of scaling, so outputs alone are
    looked at.

    Args:
        state: what training changes; hooks are put on its model and parameters.

    Raises:
        Diverged: from the step, naming the module or the parameter.
    """

    def __init__(self, state: TrainState) -> None:
        self._state = state
        self._gradients = state.scaler is None
        self._passed = "the loss"  # where the gradient was last seen to be finite
        state.model.register_forward_pre_hook(self._begin, with_kwargs=True)
        for name, module in state.model.named_modules():
            module.register_forward_hook(self._looking_at(f"{name or 'the model'} ({type(module).__name__})"))
        stepped = {parameter for group in state.optimizer.param_groups for parameter in group["params"]}
        for name, parameter in state.model.named_parameters():
            if self._gradients and parameter in stepped:
                needed = parameter.requires_grad  # what is frozen for a while takes no hooks meanwhile
                parameter.requires_grad_(True).register_hook(self._gradient_of(name, "of"))  # type: ignore[no-untyped-call]
                parameter.requires_grad_(needed)

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._passed = "the loss"
        if not _finite(args) or not _finite(kwargs):
            raise Diverged(f"{self._when()} the images of the batch have values that are not finite")

    def _looking_at(self, label: str) -> Callable[[nn.Module, Any, Any], None]:
        gradient = self._gradient_of(f"the output of {label}", "at")

        def look(module: nn.Module, args: Any, output: Any) -> None:
            if not _finite(output):
                raise Diverged(f"{self._when()} the output of {label} is the first that is not finite")
            for tensor in _tensors(output):
                if self._gradients and tensor.requires_grad:
                    tensor.register_hook(gradient)  # type: ignore[no-untyped-call]

        return look

    def _gradient_of(self, label: str, at: str) -> Callable[[Tensor], None]:
        def look(gradient: Tensor) -> None:
            if not _finite(gradient):
                raise Diverged(
                    f"{self._when()} the gradient {at} {label} is the first that is not finite; "
                    f"at {self._passed} it was finite"
                )
            if at == "at":
                self._passed = label

        return look

    def _when(self) -> str:
        done = self._state.position.global_step
        return f"in step {done + 1}" if self._state.model.training else f"in the evaluation after step {done}"


def _finite(value: Any) -> bool:
    return all(bool(tensor.detach().isfinite().all()) for tensor in _tensors(value))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            return []
        return [value if value.layout is torch.strided else value.coalesce().values()]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, list | tuple) else []
