"""Runs of a few steps: plain steps on one batch, and steps in the loop of the run with its callbacks and evaluation."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runner.build.evaluation import evaluate_both
from runner.build.metrics import build_callbacks, fresh_metrics
from runner.checkpoint import resume
from runner.data.loaders import Batch, Loader
from runner.engine.callbacks import UnfreezeCallback
from runner.engine.evaluation import evaluate
from runner.engine.loop import Loop
from runner.engine.plan import EpochPlan, Limits
from runner.verbs.check.context import BATCH_NORM, CheckContext

SHARE = 0.25  # of the time left, for one check
_MOST_STEPS = 150
_FEWEST_STEPS = 12  # that memorizing takes
_SAMPLES = 16
_RATES = (1e-3, 1e-4, 1e-2)  # of AdamW; deep models without norms need the small one
_LEARNED = 0.1  # share of the first loss that is left
_RIGHT = 0.9  # share of correct classes


class LearningCurve(NamedTuple):
    """How training on one batch went."""

    losses: list[float]  # before each step
    right: float | None  # share of correct classes at the end; None for regression
    rate: float
    late: bool = False  # whether time ran out

    @property
    def learned(self) -> bool:
        """Whether almost nothing is left of the first loss, and the classes, if any, are correct."""
        low = math.isfinite(self.losses[-1]) and self.losses[-1] < _LEARNED * self.losses[0]
        return low and (self.right is None or self.right >= _RIGHT)


def overfit_samples(context: CheckContext) -> Batch:
    """The batch that is memorized, with targets as the loss takes them."""
    images, _, indices = context.batch
    return Batch(images[:_SAMPLES], context.targets(context.batch)[:_SAMPLES], indices[:_SAMPLES])


def train_on_batch(
    context: CheckContext, images: Tensor, rate: float, most: int, seconds: float = math.inf, until_learned: bool = True
) -> LearningCurve:
    """Train from the start with AdamW and without dropout on `images` with the targets of `overfit_samples`.

    Training ends after `most` steps, after `seconds`, if the loss is not finite or has no gradient, or with `until_learned`
    once the batch is learned.
    """
    context.restore()
    loss_of, targets = context.training.parts.loss, overfit_samples(context).targets
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


def overfit_batch(context: CheckContext) -> LearningCurve:
    """The curve of the first learning rate that memorizes the batch, or else of the one with the lowest loss."""
    curves: list[LearningCurve] = []
    for rate in _RATES:
        seconds = max(1.0, SHARE * context.left)
        curves.append(train_on_batch(context, overfit_samples(context).images, rate, _MOST_STEPS, seconds))
        if curves[-1].learned:
            return curves[-1]
    best = min(curves, key=lambda curve: curve.losses[-1] if math.isfinite(curve.losses[-1]) else math.inf)
    return best._replace(late=any(curve.late for curve in curves))


def run_callbacks(context: CheckContext) -> tuple[list[Any], Callable[[Loop], None]]:
    """The callbacks of the run that affect training, and what `on_nonfinite=rollback` does: back to the start."""
    training = context.training
    extra = build_callbacks(context.config, training.task, training.monitor)
    kept = {name: resume.copied(each.state_dict()) for name, each in extra.items() if hasattr(each, "state_dict")}

    def roll_back(loop: Loop) -> None:
        context.restore()
        for name, before in kept.items():
            if hasattr(extra[name], "load_state_dict"):
                extra[name].load_state_dict(resume.copied(before))

    return [UnfreezeCallback(lambda line: None), *extra.values()], roll_back


def build_loop(
    context: CheckContext,
    source: Loader,
    plan: EpochPlan,
    limits: Limits,
    *,
    callbacks: bool = True,
    extra: Sequence[Any] = (),
    held_out: Loader | None = None,
    **options: Any,
) -> Loop:
    """The loop of the run with other batches and limits.

    Args:
        context: the run.
        source: the batches.
        plan: how they divide into steps.
        limits: when to stop and when to evaluate.
        callbacks: whether to call the callbacks of the run.
        extra: further callbacks.
        held_out: where given, the first batch of it is evaluated when `limits` says so.
        **options: `step` or `parts` instead of those of the run.
    """
    training = context.training
    own, roll_back = run_callbacks(context) if callbacks else ([], lambda loop: context.restore())
    metrics = fresh_metrics(context.config, training.task, training.device)

    def evaluate_once() -> dict[str, float]:
        assert held_out is not None
        arguments = (training.model, held_out, training.task.targets, training.loss, metrics())
        values = evaluate(*arguments, training.precision.autocast, 1)
        return {f"val/{name}": value for name, value in values.items()}

    return Loop(
        training.state,
        source,
        plan,
        options.get("parts", training.parts),
        limits,
        (lambda _: evaluate_both(training, evaluate_once)) if held_out is not None else None,
        [*own, *extra],
        training.monitor,
        step=options.get("step", training.step),
        roll_back=roll_back,
    )


def held_out_loader(context: CheckContext) -> Loader:
    """The validation split, or the training split as it is evaluated."""
    loader: Loader = (context.splits.val or context.splits.train_for_eval).loader
    return loader
