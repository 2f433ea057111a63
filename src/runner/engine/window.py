"""Steps that need all batches of an accumulation window at once: several optimizers, and optimizers that need a closure."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from runner.distributed.world import world
from runner.engine.optimizers import Optimizers
from runner.engine.protocols import Batch
from runner.engine.state import TrainState
from runner.engine.step import (
    StepConfig,
    apply_gradients,
    backward,
    clip,
    combine_gradients,
    drop_gradients,
    end_step,
    forward,
    loss_of,
    share_of,
)

_Window = list[tuple[Batch, float, int]]


class WindowStep:
    """A replacement of `train_step` that trains at the end of an accumulation window, on all of its batches.

    With several optimizers, the task yields the loss of one after the other, see `runner.run.step.TaskSteps.alternate`: each
    is updated with the gradients of the whole window before the next loss is computed. Otherwise the optimizer gets a
    closure that computes loss and gradients of the window as often as it asks.
    """

    def __init__(self) -> None:
        self._window: _Window = []

    def __call__(
        self, state: TrainState, parts: StepConfig, batch: Batch, weight: float, samples: int, *, update: bool
    ) -> None:
        """Train on one batch, see `train_step`."""
        self._window.append((batch, weight, samples))
        if not update:
            return
        window, self._window = self._window, []
        if isinstance(state.optimizer, Optimizers):
            allowed = _alternate(state, parts, state.optimizer, window)
        else:
            allowed = _with_closure(state, parts, state.optimizer, window)
        end_step(state, parts, allowed)


def needs_window(optimizer: torch.optim.Optimizer) -> bool:
    """Whether steps with an optimizer need `WindowStep`: it is several, or its `step` cannot be called without a closure."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return isinstance(optimizer, Optimizers) or (closure is not None and closure.default is closure.empty)


def _alternate(state: TrainState, parts: StepConfig, optimizers: Optimizers, window: _Window) -> bool:
    """Update the optimizers in the order in which the task yields their losses; returns False if the guard forbids one."""
    objective: Any = parts.objective
    losses, allowed = objective.alternate([batch.data for batch, _, _ in window]), True
    sums: list[Tensor | float] = [0.0] * len(window)
    while True:
        with parts.autocast():
            found = next(losses, None)
        if found is None:
            break
        place, name, loss, terms = found
        batch, weight, samples = window[place]
        sums[place] = sums[place] + loss.detach()
        state.add_terms(terms, samples)
        if parts.guard is not None:
            parts.guard.watch_loss(loss)
        # Of its own weights alone: the loss of a generator runs through the discriminator, which has another loss
        optimizer = optimizers.named[name]
        own = [each for group in optimizer.param_groups for each in group["params"] if each.requires_grad]
        if not own:  # frozen for a while
            continue
        backward(state, loss, share_of(state, parts, batch.data, weight), own)
        if place == len(window) - 1:
            allowed = apply_gradients(state, parts, optimizer) and allowed
    for total, (_, _, samples) in zip(sums, window, strict=True):
        state.meter.add(torch.as_tensor(total), samples)
    return allowed


def _with_closure(state: TrainState, parts: StepConfig, optimizer: Any, window: _Window) -> bool:
    """Let an optimizer step that computes the loss itself; weights are restored, and False returned, if it is not finite."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    before, evaluations = [weight.detach().clone() for weight in weights], 0

    @torch.enable_grad()
    def closure() -> Tensor:
        nonlocal evaluations
        drop_gradients(optimizer)
        total = before[0].new_zeros(())
        for batch, weight, samples in window:
            # The loss that is logged is that before the update
            loss = loss_of(parts, batch.data) if evaluations else forward(state, parts, batch, samples)
            share = share_of(state, parts, batch.data, weight)
            backward(state, loss, share)
            total += loss.detach() * share
        evaluations += 1
        divisor = combine_gradients(state, parts, optimizer)
        if parts.guard is not None and not parts.guard.allows_step():
            raise _NotFinite
        clip(state, parts)
        # Ranks have to take the same decisions
        total = world().total(total) / world().size
        return total if divisor is None else total / divisor

    try:
        optimizer.step(closure)
    except _NotFinite:
        torch._foreach_copy_([weight.detach() for weight in weights], before)
        return False
    finally:
        drop_gradients(optimizer)
    return True


class _NotFinite(Exception):
    """Gradients within a step are not finite."""
