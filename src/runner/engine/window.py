"""Steps that need all batches of an accumulation window at once: several optimizers, and optimizers that need a closure."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from runner.distributed.world import world
from runner.engine.optimizers import Optimizers
from runner.engine.protocols import Batch
from runner.engine.step import Step, drop_gradients, parameters_of

_Window = list[tuple[Batch, float, int]]


@dataclass(eq=False)
class WindowStep(Step):
    """A step that trains at the end of an accumulation window, on all of its batches.

    With several optimizers, the task yields the loss of one after the other, see `runner.run.step.TaskSteps.alternate`: each
    is updated with the gradients of the whole window before the next loss is computed. Otherwise the optimizer gets a
    closure that computes loss and gradients of the window as often as it asks.
    """

    _window: _Window = field(default_factory=list, init=False)

    def accumulate(self, batch: Batch, weight: float, samples: int) -> None:
        """Keep a batch until the end of its window."""
        self._window.append((batch, weight, samples))

    def update(self) -> None:
        """Train on the window."""
        window, self._window = self._window, []
        optimizer = self.state.optimizer
        if isinstance(optimizer, Optimizers):
            self.finish(self._alternate(optimizer, window))
        else:
            self.finish(self._with_closure(optimizer, window))

    def _alternate(self, optimizers: Optimizers, window: _Window) -> bool:
        """Update the optimizers in the order in which the task yields their losses; False if the guard forbids one."""
        objective: Any = self.objective
        losses, allowed = objective.alternate([batch.data for batch, _, _ in window]), True
        sums: list[Tensor | float] = [0.0] * len(window)
        while True:
            with self.autocast():
                found = next(losses, None)
            if found is None:
                break
            place, name, loss, terms = found
            batch, weight, samples = window[place]
            sums[place] = sums[place] + loss.detach()
            self.state.add_terms(terms, samples)
            if self.guard is not None:
                self.guard.watch_loss(loss)
            # Of its own weights alone: the loss of a generator runs through the discriminator, which has another loss
            optimizer = optimizers.named[name]
            own = [each for each in parameters_of(optimizer) if each.requires_grad]
            if not own:  # frozen for a while
                continue
            self.backward(loss, self.share(batch.data, weight), own)
            if place == len(window) - 1:
                allowed = self.apply(optimizer) and allowed
        for total, (_, _, samples) in zip(sums, window, strict=True):
            self.state.meter.add(torch.as_tensor(total), samples)
        return allowed

    def _with_closure(self, optimizer: Any, window: _Window) -> bool:
        """Let an optimizer step that computes the loss itself; False, and the weights restored, if it is not finite."""
        weights = parameters_of(optimizer)
        before, evaluations = [weight.detach().clone() for weight in weights], 0

        @torch.enable_grad()
        def closure() -> Tensor:
            nonlocal evaluations
            drop_gradients(optimizer)
            total = before[0].new_zeros(())
            for batch, weight, samples in window:
                # The loss that is logged is that before the update
                loss = self.loss(batch.data) if evaluations else self.forward(batch, samples)
                share = self.share(batch.data, weight)
                self.backward(loss, share)
                total += loss.detach() * share
            evaluations += 1
            divisor = self.combine(optimizer)
            if self.guard is not None and not self.guard.allows_step():
                raise _NotFinite
            self.clip(optimizer)
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


def needs_window(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer needs `WindowStep`: it is several, or its `step` cannot be called without a closure."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return isinstance(optimizer, Optimizers) or (closure is not None and closure.default is closure.empty)


class _NotFinite(Exception):
    """Gradients within a step are not finite."""
