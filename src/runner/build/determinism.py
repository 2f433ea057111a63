"""A training step that names the module whose backward is refused by `deterministic=true`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from runner.engine.state import TrainState
from runner.engine.step import StepConfig
from runner.runtime.determinism import caller_in_backward, operation, refusal

Step = Callable[[TrainState, StepConfig, Any, float, int, bool], None]


def named(step: Step) -> Step:
    """A step as `train_step`, to be given to `Loop` where operations without a deterministic form are refused.

    It raises a `UserError` in place of torch's error about such an operation in backward, if its module can be found.
    """

    def named_step(state: TrainState, parts: StepConfig, batch: Any, weight: float, samples: int, update: bool) -> None:
        try:
            step(state, parts, batch, weight, samples, update)
        except RuntimeError as error:
            _tell(error, state, parts, batch)
            raise

    return named_step


def _tell(error: RuntimeError, state: TrainState, parts: StepConfig, batch: Any) -> None:
    """Raise a `UserError` if the error is about such an operation."""
    # In forward the stack says who it was; a compiled graph cannot be looked into.
    if not operation(str(error)) or parts.compiled_loss is not None:
        return

    def forward() -> Tensor:
        with parts.autocast():
            return parts.loss(state.model(batch.images), parts.targets(batch.targets))

    try:
        caller = caller_in_backward(state.model, forward)
    except RuntimeError:  # it was in forward after all
        caller = ""
    told = refusal(error, caller)
    assert told is not None, "the error is about such an operation"
    raise told from error
