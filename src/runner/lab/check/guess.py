"""Outputs that are optimized without the model: the loss of a guess, which knows no image, and the lowest loss."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from runner.data.loaders import Batch
from runner.lab.check.context import CheckContext
from runner.lab.check.result import need

_SAMPLES = 16
_RATE, _STEPS = 0.1, 120  # of Adam


def overfit_samples(context: CheckContext) -> Batch:
    """The batch that is memorized, with targets as the loss takes them."""
    batch = context.batch.first(_SAMPLES)
    return batch._replace(data=(batch.images, context.targets(batch)))


def takes_logits(context: CheckContext) -> bool:
    """True if the loss takes outputs of any size, not only probabilities."""
    targets = overfit_samples(context).targets
    outputs = torch.linspace(-20, 20, len(targets) * context.training.task.outputs(context.splits.classes))
    try:
        context.training.loss(outputs.view(len(targets), -1).to(targets.device), targets)
    except (RuntimeError, ValueError):
        return False
    return True


def free_outputs(
    context: CheckContext, targets: Tensor, equal: bool = False
) -> tuple[Tensor, Callable[[], tuple[Tensor, Tensor]]]:
    """A parameter, and a function that turns it into outputs as the loss takes them, and gives these and their loss.

    With `equal` all samples have the same outputs.
    """
    shape = 1 if equal else len(targets), context.training.task.outputs(context.splits.classes)
    free = (0.1 * torch.randn(*shape, generator=torch.Generator().manual_seed(0))).to(targets.device).requires_grad_()
    values = targets.float()
    numbers = not context.classes and targets.is_floating_point()
    scale, shift = (values.std().clamp_min(1e-6), values.mean()) if numbers else (1.0, 0.0)

    logits = context.cached(takes_logits)

    def scored() -> tuple[Tensor, Tensor]:
        outputs = (free * scale + shift if logits else free.sigmoid()).expand(len(targets), -1)
        return outputs, context.training.loss(outputs, targets)

    return free, scored


def optimize_outputs(context: CheckContext, targets: Tensor, equal: bool = False) -> tuple[Tensor, list[float]]:
    """The outputs after a few steps, and the losses; a single loss if it has no gradient."""
    free, scored = free_outputs(context, targets, equal)
    optimizer = torch.optim.Adam([free], lr=_RATE)
    outputs, loss = scored()
    losses = [float(loss.detach())]
    while loss.requires_grad and len(losses) <= _STEPS:
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        outputs, loss = scored()
        losses.append(float(loss.detach()))
    return outputs.detach(), losses


def lowest_loss(context: CheckContext) -> float:
    """The lowest loss of `overfit_samples`, above 0 with label smoothing or soft targets."""
    return min(optimize_outputs(context, overfit_samples(context).targets)[1])


def loss_range(context: CheckContext) -> tuple[float, float]:
    """Of `overfit_samples`: the loss of a guess, which is the lowest with equal outputs for all, and the lowest loss."""
    if not context.supervised:  # neither is known, so the range is the size of the first loss
        first = float(context.loss().detach())
        need(math.isfinite(first), f"the first loss is {first:.4g}")
        return first, first - max(abs(first), 1e-6)
    guess = min(optimize_outputs(context, overfit_samples(context).targets, equal=True)[1])
    lowest = context.cached(lowest_loss)
    need(math.isfinite(guess) and lowest < guess, f"the loss of a guess is {guess:.4g}, and the lowest {lowest:.4g}")
    return guess, lowest
