"""One batch learned by heart, which any sound model can."""

from __future__ import annotations

import math
import time
from typing import NamedTuple

import torch
from torch import Tensor, nn

from runner.verbs.check.context import CheckContext

SHARE = 0.25  # of what is left of the time, that one check may take
MOST_STEPS = 150
_FEWEST_STEPS = 12  # that learning by heart takes
_SAMPLES = 16
_RATES = (1e-3, 1e-4, 1e-2)  # of AdamW, that one batch is learned with; deep models without norms need the small one
_LEARNED = 0.1  # share of the first loss that is left of it
_RIGHT = 0.9  # share of classes that have to be right


class LearningCurve(NamedTuple):
    """How one batch was learned.

    Attributes:
        losses: of each step.
        right: share of classes that are right in the end; None for numbers.
        rate: the learning rate.
        late: whether time ran out.
    """

    losses: list[float]
    right: float | None
    rate: float
    late: bool = False

    @property
    def learned(self) -> bool:
        """Whether hardly anything of the first loss is left, and the classes are right where there are classes."""
        low = math.isfinite(self.losses[-1]) and self.losses[-1] < _LEARNED * self.losses[0]
        return low and (self.right is None or self.right >= _RIGHT)


def learn(context: CheckContext, images: Tensor, rate: float, most: int, seconds: float) -> LearningCurve:
    """Train on one batch from the start with AdamW and without dropout, until it is learned or for `most` steps."""
    context.restore()
    model, parts, targets = context.model, context.training.parts, overfit_samples(context)[1]
    disable_dropout(context)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
    classes = not targets.is_floating_point()
    began = time.monotonic()
    course = LearningCurve([], None, rate)
    for step in range(most):
        outputs = model(images)
        loss = parts.loss(outputs, targets)
        right = float((outputs.argmax(1) == targets).float().mean()) if classes else None
        course = LearningCurve([*course.losses, float(loss.detach())], right, rate)
        taken = time.monotonic() - began
        # What cannot be learned in time is better not begun: the time serves other checks.
        hopeless = step >= 2 and taken / step * min(most, _FEWEST_STEPS) > seconds
        if not math.isfinite(course.losses[-1]) or course.learned or not loss.requires_grad:
            break
        if taken > seconds or hopeless:
            return course._replace(late=True)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return course


def disable_dropout(context: CheckContext) -> None:
    """Evaluation mode, as learning by heart needs every unit and dropout may be of any make, but for what depends on it."""
    context.training.state.train()
    # BatchNorm takes its statistics from the batch; cuDNN goes back through recurrent layers in training mode alone.
    kinds = nn.modules.batchnorm._BatchNorm | nn.RNNBase
    kept = [module for module in context.model.modules() if isinstance(module, kinds) and module.training]
    context.model.eval()
    for module in kept:
        module.train()


def overfit_samples(context: CheckContext) -> tuple[Tensor, Tensor]:
    """Images and targets of the samples that are learned."""
    batch = context.batch
    return batch.images[:_SAMPLES], context.targets(batch)[:_SAMPLES]


def overfit_batch(context: CheckContext) -> LearningCurve:
    """The course of the learning rate that brings the loss of one batch further down."""
    courses: list[LearningCurve] = []
    for rate in _RATES:
        courses.append(learn(context, overfit_samples(context)[0], rate, MOST_STEPS, max(1.0, SHARE * context.left)))
        if courses[-1].learned:
            return courses[-1]
    best = min(courses, key=lambda course: course.losses[-1] if math.isfinite(course.losses[-1]) else math.inf)
    return best._replace(late=any(course.late for course in courses))
