"""One training step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from runner.engine.clipping import AdaptiveClip, clip_gradients
from runner.engine.nonfinite import NonFiniteGuard
from runner.engine.state import TrainState


class Batch(Protocol):
    """Samples on the device: see `runner.data.loaders.Batch`."""

    @property
    def images(self) -> Tensor:
        """(B, C, H, W), augmented and normalised."""

    @property
    def targets(self) -> Tensor:
        """(B, ...)."""

    @property
    def indices(self) -> Tensor:
        """(B,) int64."""


@dataclass(frozen=True)
class StepConfig:
    """What a step is made of.

    Attributes:
        targets: targets of the data set -> targets of the loss.
        loss: (logits, targets) -> scalar mean over the samples.
        autocast: gives the context that forward and loss run in.
        clip_norm: largest norm of all gradients together; None for no limit.
        clip_value: largest absolute value of a gradient element; None for no limit.
        clip_adaptive: bounds of each unit's gradient; None for no limit.
        compiled_loss: (images, targets) -> loss, in place of model and loss one after the other; None for these.
        guard: keeps the optimizer from steps whose gradients are not finite; None lets it take them.
        optimizer_step: what `optimizer.step` does, in less time; None for that itself.
    """

    targets: Callable[[Tensor], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    autocast: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    clip_norm: float | None = None
    clip_value: float | None = None
    clip_adaptive: AdaptiveClip | None = None
    compiled_loss: Callable[[Tensor, Tensor], Tensor] | None = None
    guard: NonFiniteGuard | None = None
    optimizer_step: Callable[[], object] | None = None


def train_step(state: TrainState, parts: StepConfig, batch: Batch, weight: float, samples: int, update: bool) -> None:
    """Train on one batch; at the end of an accumulation window, update the weights.

    The order is: fetch, move and augment, which the source of batches has done; autocast forward and loss, scale, backward;
    then finite check, unscale, clip, optimizer step, scaler update, averaging; counters and the next learning rate are the
    loop's.
    Nothing here waits for the device, unless `NonFiniteGuard.waits` says that the optimizer makes it.

    Args:
        state: what training changes.
        parts: what the step is made of.
        batch: samples on the device.
        weight: share of this batch in its window, see `EpochPlan.weight`.
        samples: size of the batch.
        update: whether the window ends here.
    """
    loss = forward(state, parts, batch, samples)
    backward(state, loss, weight)
    if update:
        update_weights(state, parts)


def forward(state: TrainState, parts: StepConfig, batch: Batch, samples: int) -> Tensor:
    """The mean loss of a batch, which is counted as well."""
    targets = parts.targets(batch.targets)
    with parts.autocast():
        if parts.compiled_loss is not None:
            loss = parts.compiled_loss(batch.images, targets)
        else:
            loss = parts.loss(state.model(batch.images), targets)
    state.meter.add(loss, samples)
    if parts.guard is not None:
        parts.guard.watch_loss(loss)
    return loss


def backward(state: TrainState, loss: Tensor, weight: float) -> None:
    """Add a batch's share to the gradients."""
    if weight != 1.0:
        loss = loss * weight
    if state.scaler is not None:
        loss = state.scaler.scale(loss)
    loss.backward()  # type: ignore[no-untyped-call]


def update_weights(state: TrainState, parts: StepConfig) -> None:
    """Take an optimizer step with the gradients, and drop them."""
    model, optimizer, scaler, guard = state.model, state.optimizer, state.scaler, parts.guard
    if guard is None or guard.allows_step():
        if parts.clip_norm is not None or parts.clip_value is not None or parts.clip_adaptive is not None:
            if scaler is not None:
                scaler.unscale_(optimizer)
            clip_gradients(model, parts.clip_norm, parts.clip_value, parts.clip_adaptive)
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        elif parts.optimizer_step is not None:
            parts.optimizer_step()
        else:
            optimizer.step()
        if guard is not None:
            guard.undo()
        if state.averaged is not None:
            state.averaged.update(state.position.global_step + 1, guard.skipped if guard is not None else None)
    if guard is not None:
        guard.stepped()
    # As zero_grad(set_to_none=True) does, without its bookkeeping.
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None
