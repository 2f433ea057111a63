"""One training step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from runner.distributed.world import world
from runner.engine.clipping import AdaptiveClip, clip_gradients
from runner.engine.nonfinite import NonFiniteGuard
from runner.engine.protocols import Batch
from runner.engine.state import TrainState


@dataclass(frozen=True)
class Supervised:
    """The mean loss of images and targets, which a task that defines no step of its own is trained on."""

    model: Callable[[Tensor], Any]
    loss: Callable[[Any, Tensor], Tensor]  # (logits, targets) -> scalar mean over the samples
    targets: Callable[[Tensor], Tensor]  # converts targets of the data set to those of the loss

    def __call__(self, data: tuple[Tensor, Tensor]) -> Tensor:
        """The loss of images (B, C, H, W) and targets (B, ...) of the data set."""
        images, targets = data
        return self.loss(self.model(images), self.targets(targets))

    def feed(self, data: tuple[Tensor, Tensor]) -> None:
        """Send the images through the model."""
        self.model(data[0])

    def evaluated(self, data: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """Loss, outputs and targets of such data, see `runner.engine.evaluation.evaluate`."""
        images, targets = data[0], self.targets(data[1])
        outputs = self.model(images)
        return {"loss": self.loss(outputs, targets), "outputs": outputs, "targets": targets}


@dataclass(frozen=True)
class StepConfig:
    """The parts of the computation of a step."""

    objective: Callable[[Any], Tensor]  # the data of a batch -> scalar mean over the samples
    weight: Callable[[Any], Any] | None = None  # what the mean of the data of a batch is over; None for its samples
    autocast: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext  # around it
    clip_norm: float | None = None  # largest 2-norm of all gradients together; None for no limit
    clip_value: float | None = None  # largest absolute value of a gradient element; None for no limit
    clip_adaptive: AdaptiveClip | None = None  # bounds of each unit's gradient; None for no limit
    equivalent: Callable[[Any], Tensor] | None = None  # the objective compiled, or over several ranks; replaces it
    guard: NonFiniteGuard | None = None  # prevents steps with gradients that are not finite; None allows them
    optimizer_step: Callable[[], object] | None = None  # a faster equivalent of `optimizer.step`; None for that itself
    # around batches that do not end an accumulation window: their gradients are not yet averaged over the ranks
    no_sync: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    # over the ranks, where backward has not done it
    average_gradients: Callable[[Sequence[nn.Parameter]], None] | None = None
    after_step: Callable[[], object] | None = None  # called at the end of each step, even if its update was skipped

    @property
    def clips(self) -> bool:
        """Whether gradients are clipped."""
        return self.clip_norm is not None or self.clip_value is not None or self.clip_adaptive is not None


StepFunction = Callable[..., None]
"""The signature of `train_step`."""


def train_step(
    state: TrainState, parts: StepConfig, batch: Batch, weight: float, samples: int, *, update: bool
) -> None:
    """Train on one batch; at the end of an accumulation window, update the weights.

    The source of batches has already fetched, moved and augmented the batch; counters and the next learning rate are the
    loop's job. Nothing here waits for the device, unless `NonFiniteGuard.waits` says that the optimizer needs it.

    Args:
        state: what training changes.
        parts: how a step is computed.
        batch: samples on the device.
        weight, samples, update: see `EpochPlan.parts`.
    """
    # Inside a window, gradients only add up: ranks exchange them once, at its end
    if not update:
        with parts.no_sync():
            backward(state, forward(state, parts, batch, samples), share_of(state, parts, batch.data, weight))
        return
    backward(state, forward(state, parts, batch, samples), share_of(state, parts, batch.data, weight))
    update_weights(state, parts)


def forward(state: TrainState, parts: StepConfig, batch: Batch, samples: int) -> Tensor:
    """The mean loss of a batch, which is also added to the running mean."""
    loss = loss_of(parts, batch.data)
    state.meter.add(loss, samples)
    if terms := getattr(parts.objective, "terms", None):
        state.add_terms(terms, samples)
    if parts.guard is not None:
        parts.guard.watch_loss(loss)
    return loss


def loss_of(parts: StepConfig, data: Any) -> Tensor:
    """The mean loss of the data of a batch."""
    with parts.autocast():
        return (parts.equivalent or parts.objective)(data)


def share_of(state: TrainState, parts: StepConfig, data: Any, share: float) -> float | Tensor:
    """What a loss counts in the sum of a step: its share, or its weight, by whose sum `update_weights` divides the gradients."""
    if parts.weight is None:
        return share
    weight = torch.as_tensor(parts.weight(data), dtype=state.meter.dtype, device=state.meter.device)
    if share == 0:  # a rank without a sample of this batch has taken another one
        weight = torch.zeros_like(weight)
    state.window_weight = weight if state.window_weight is None else state.window_weight + weight
    return weight


def backward(state: TrainState, loss: Tensor, weight: float | Tensor, inputs: Sequence[Tensor] | None = None) -> None:
    """Accumulate a batch's share of the gradients, of all weights or of `inputs`."""
    # The usual weight is 1, and a multiplication less is a kernel less.
    if isinstance(weight, Tensor) or weight != 1.0:
        loss = loss * weight
    if state.scaler is not None:
        loss = state.scaler.scale(loss)
    loss.backward(inputs=inputs)  # type: ignore[no-untyped-call]


def update_weights(state: TrainState, parts: StepConfig) -> None:
    """Unscale and clip the gradients, take an optimizer step unless the guard forbids it, and drop the gradients."""
    end_step(state, parts, apply_gradients(state, parts, state.optimizer))


def combine_gradients(state: TrainState, parts: StepConfig, optimizer: torch.optim.Optimizer) -> Tensor | None:
    """Make an optimizer's gradients those of all batches and ranks of an accumulation window.

    Returns:
        What they were divided by, if the task counts a weight.
    """
    if parts.average_gradients is None and state.window_weight is None:
        return None
    parameters, total = [parameter for group in optimizer.param_groups for parameter in group["params"]], None
    # Where backward has not averaged the gradients over the ranks, as with several optimizers, it happens here
    if parts.average_gradients is not None:
        parts.average_gradients(parameters)
    # The weights of all batches and ranks are known only now; the ranks have averaged, and not added
    if state.window_weight is not None:
        total = world().total(state.window_weight) / world().size
        total = total.where(total != 0, 1)  # nothing counts in this step: its gradients are zeros
        torch._foreach_div_([weight.grad for weight in parameters if weight.grad is not None], total)
        state.window_weight = None
    return total


def apply_gradients(state: TrainState, parts: StepConfig, optimizer: torch.optim.Optimizer) -> bool:
    """Take a step with an optimizer, which may be one of several; returns False if the guard forbids it."""
    scaler, guard = state.scaler, parts.guard
    combine_gradients(state, parts, optimizer)
    # The guard looks at the gradients before clipping, which would spread a NaN over all of them.
    allowed = guard is None or guard.allows_step()
    if allowed:
        # Clipping needs the gradients as they are, so the loss scale is removed first
        if scaler is not None and parts.clips:
            scaler.unscale_(optimizer)
        clip(state, parts)
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        elif parts.optimizer_step is not None and optimizer is state.optimizer:
            parts.optimizer_step()
        else:
            optimizer.step()
    drop_gradients(optimizer)
    return allowed


def clip(state: TrainState, parts: StepConfig) -> None:
    """Clip the gradients that there are, as the config says."""
    if parts.clips:
        trained = [parameter for _, parameter in state.named_parameters()]
        clip_gradients(trained, parts.clip_norm, parts.clip_value, parts.clip_adaptive)


def drop_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Equals `zero_grad(set_to_none=True)` without its bookkeeping."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def end_step(state: TrainState, parts: StepConfig, allowed: bool) -> None:
    """Let the task go on from the updated weights, average them, and note the outcome, once all updates are done."""
    guard = parts.guard
    if parts.after_step is not None:  # also if a kernel or the guard skipped the update: the host may not know it
        with torch.no_grad():
            parts.after_step()
    # After the update, as it is the updated weights that are averaged
    if allowed and state.averaged is not None:
        state.averaged.update(state.position.global_step + 1, guard.skipped if guard is not None else None)
    if guard is not None:
        guard.stepped()
