"""Check every output and every gradient while training: the first that is not finite ends the run and is named."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

from runner.engine.errors import Diverged
from runner.engine.state import TrainState
from runner.instrument.nested import tensors_in
from runner.instrument.nonfinite import is_finite
from runner.instrument.observer import Observer, module_label, observe_gradients


class FiniteWatch:
    """Checks the output of every module and the gradients that reach it.

    Each check waits for the device. Where the loss is scaled, gradients overflow as part of scaling, so only outputs are
    checked.

    Args:
        state: what training changes; hooks are put on its model and parameters.

    Raises:
        Diverged: from the step, naming the module or the parameter.
    """

    def __init__(self, state: TrainState) -> None:
        self._state = state
        self._checks_gradients = state.scaler is None
        self._passed = "the loss"  # where the gradient was last seen to be finite
        Observer(state.model, before=self._check_inputs, names=[""])
        Observer(state.model, after=self._check_output)
        stepped = {parameter for group in state.optimizer.param_groups for parameter in group["params"]}
        for name, parameter in state.model.named_parameters():
            if self._checks_gradients and parameter in stepped:
                needed = parameter.requires_grad  # a parameter that is frozen for a while accepts no hook
                parameter.requires_grad_(True)
                observe_gradients(parameter, functools.partial(self._check_gradient, f"of {name}"))
                parameter.requires_grad_(needed)

    def _check_inputs(self, name: str, module: nn.Module, inputs: list[Any]) -> None:
        self._passed = "the loss"
        if not is_finite(inputs):
            raise Diverged(f"{self._when()} the images of the batch have values that are not finite")

    def _check_output(self, name: str, module: nn.Module, inputs: list[Any], output: Any) -> None:
        what = f"the output of {module_label(name, module, 'the model')}"
        if not is_finite(output):
            raise Diverged(f"{self._when()} {what} is the first that is not finite")
        if self._checks_gradients:
            floats = [tensor for tensor in tensors_in(output) if tensor.is_floating_point()]
            observe_gradients(floats, functools.partial(self._check_gradient, f"at {what}"))

    def _check_gradient(self, place: str, gradient: Tensor) -> None:
        if not is_finite(gradient):
            raise Diverged(
                f"{self._when()} the gradient {place} is the first that is not finite; at {self._passed} it was finite"
            )
        if place.startswith("at "):
            self._passed = place.removeprefix("at ")

    def _when(self) -> str:
        done = self._state.position.global_step
        return f"in step {done + 1}" if self._state.model.training else f"in the evaluation after step {done}"
