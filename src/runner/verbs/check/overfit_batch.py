"""Training on one batch until the model has memorized it, which any sound model can."""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import torch
from torch import Tensor, nn

from runner.verbs.check.context import BATCH_NORM, CheckContext

SHARE = 0.25  # of the time left, for one check
_MOST_STEPS = 150
_FEWEST_STEPS = 12  # that memorizing takes
_SAMPLES = 16
_RATES = (1e-3, 1e-4, 1e-2)  # of AdamW; deep models without norms need the small one
_LEARNED = 0.1  # share of the first loss that is left
_RIGHT = 0.9  # share of correct classes


class LearningCurve(NamedTuple):
    """How training on one batch went.

    Attributes:
        losses: before each step.
        right: share of correct classes at the end; None for regression.
        rate: the learning rate.
        late: whether time ran out.
    """

    losses: list[float]
    right: float | None
    rate: float
    late: bool = False

    @property
    def learned(self) -> bool:
        """Whether almost nothing is left of the first loss, and the classes, if any, are correct."""
        low = math.isfinite(self.losses[-1]) and self.losses[-1] < _LEARNED * self.losses[0]
        return low and (self.right is None or self.right >= _RIGHT)


def train_on_batch(
    context: CheckContext, images: Tensor, rate: float, most: int, seconds: float = math.inf, until_learned: bool = True
) -> LearningCurve:
    """Train from the start with AdamW and without dropout on `images` with the targets of `overfit_samples`.

    Training ends after `most` steps, after `seconds`, if the loss is not finite or has no gradient, or with `until_learned`
    once the batch is learned.
    """
    context.restore()
    loss_of, targets = context.training.parts.loss, overfit_samples(context)[1]
    evaluation_with_batch_statistics(context)
    parameters = [parameter for parameter in context.model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
    began, curve = time.monotonic(), LearningCurve([], None, rate)
    for step in range(most):
        outputs = context.model(images)
        loss = loss_of(outputs, targets)
        right = None if targets.is_floating_point() else float((outputs.argmax(1) == targets).float().mean())
        curve = LearningCurve([*curve.losses, float(loss.detach())], right, rate)
        taken = time.monotonic() - began
        # Do not start what cannot finish in time: other checks need the time.
        hopeless = step >= 2 and taken / step * min(most, _FEWEST_STEPS) > seconds
        if not math.isfinite(curve.losses[-1]) or (until_learned and curve.learned) or not loss.requires_grad:
            break
        if taken > seconds or hopeless:
            return curve._replace(late=True)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return curve


def evaluation_with_batch_statistics(context: CheckContext) -> None:
    """Evaluation mode, which turns off custom dropout too, but for modules that need training mode."""
    context.training.state.train()
    # BatchNorm takes its statistics from the batch; cuDNN runs recurrent layers backward only in training mode.
    kept = [each for each in context.model.modules() if isinstance(each, BATCH_NORM | nn.RNNBase) and each.training]
    context.model.eval()
    for module in kept:
        module.train()


def overfit_samples(context: CheckContext) -> tuple[Tensor, Tensor]:
    """Images and targets of the batch that is memorized."""
    batch = context.batch
    return batch.images[:_SAMPLES], context.targets(batch)[:_SAMPLES]


def overfit_batch(context: CheckContext) -> LearningCurve:
    """The curve of the first learning rate that memorizes the batch, or else of the one with the lowest loss."""
    curves: list[LearningCurve] = []
    for rate in _RATES:
        seconds = max(1.0, SHARE * context.left)
        curves.append(train_on_batch(context, overfit_samples(context)[0], rate, _MOST_STEPS, seconds))
        if curves[-1].learned:
            return curves[-1]
    best = min(curves, key=lambda curve: curve.losses[-1] if math.isfinite(curve.losses[-1]) else math.inf)
    return best._replace(late=any(curve.late for curve in curves))
