"""A training step in named ranges, for profiling: the same work in the same order as `train_step`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from runner.engine.state import TrainState
from runner.engine.step import StepConfig, backward, forward, update_weights

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"

Mark = Callable[[str], contextlib.AbstractContextManager[object]]
"""Gives a context for a range of that name."""


def marked_step(mark: Mark) -> Callable[[TrainState, StepConfig, Any, float, int, bool], None]:
    """`train_step` with its parts in ranges, to be given to `Loop`; a run that is not profiled pays nothing for them."""

    def step(state: TrainState, parts: StepConfig, batch: Any, weight: float, samples: int, update: bool) -> None:
        with mark(FORWARD):
            loss = forward(state, parts, batch, samples)
        with mark(BACKWARD):
            backward(state, loss, weight)
        if update:
            with mark(OPTIMIZER):
                update_weights(state, parts)

    return step
