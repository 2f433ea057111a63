"""Checks of the training loop, and runs of a few steps: on one batch, and in the loop of the run with its callbacks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from runner.data.loaders import Loader
from runner.engine.callbacks import UnfreezeCallback
from runner.engine.evaluation import evaluate
from runner.engine.loop import Loop
from runner.engine.plan import EpochPlan, Limits
from runner.engine.step import StepConfig, StepFunction
from runner.lab.check.context import BATCH_NORM, CheckContext
from runner.lab.check.guess import loss_range, lowest_loss, overfit_samples
from runner.lab.check.result import Result, check, failed, need, none_of, passed, warned
from runner.run.evaluation import evaluate_both
from runner.run.metrics import build_callbacks, fresh_metrics

_MOST_STEPS = 150
_RATES = (1e-3, 1e-4, 1e-2)  # of AdamW; deep models without norms need the small one
_LEARNED = 0.1  # share that is left of what the first loss is above the lowest
_RIGHT = 0.9  # share of correct classes
_FEW_STEPS, _MEAN, _FALLEN = 24, 4, 0.01  # of own steps: steps, averaged losses, share by which these fall at least


class LearningCurve(NamedTuple):
    """The losses of a training on one batch."""

    losses: list[float]  # before each step
    right: float | None  # share of correct classes at the end; None for regression
    rate: float
    lowest: float  # loss of any outputs

    @property
    def learned(self) -> bool:
        """True if the loss is almost the lowest one, and the classes, if any, are correct."""
        low = self.losses[-1] - self.lowest < _LEARNED * (self.losses[0] - self.lowest)
        return low and (self.right is None or self.right >= _RIGHT)


def train_on_batch(
    context: CheckContext, images: Tensor, rate: float, most: int, until_learned: bool = True
) -> LearningCurve:
    """Train from the start with AdamW and without dropout on `images` with the targets of `overfit_samples`.

    It ends after `most` steps, if the loss is not finite or has no gradient, or with `until_learned` once that is learned.
    """
    context.restore()
    loss_of, targets = context.training.loss, overfit_samples(context).targets
    without_noise(context)
    parameters = [parameter for parameter in context.model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
    curve = LearningCurve([], None, rate, lowest := max(0.0, context.cached(lowest_loss)))
    for _ in range(most):
        context.in_time()
        outputs = context.model(images)
        loss = loss_of(outputs, targets)
        right = None if targets.is_floating_point() else float((outputs.argmax(1) == targets).float().mean())
        curve = LearningCurve([*curve.losses, float(loss.detach())], right, rate, lowest)
        if not math.isfinite(curve.losses[-1]) or (until_learned and curve.learned) or not loss.requires_grad:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return curve


def without_noise(context: CheckContext) -> None:
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
        curves.append(train_on_batch(context, overfit_samples(context).images, rate, _MOST_STEPS))
        if curves[-1].learned:
            return curves[-1]
    return min(curves, key=lambda curve: torch.tensor(curve.losses[-1]).nan_to_num(math.inf).item())


def run_callbacks(context: CheckContext) -> list[Any]:
    """The callbacks of the run that affect training."""
    extra = build_callbacks(context.config, context.training.task, context.training.monitor)
    return [UnfreezeCallback(lambda line: None), *extra.values()]


def build_loop(
    context: CheckContext,
    source: Loader,
    plan: EpochPlan,
    limits: Limits,
    *,
    parts: StepConfig | None = None,
    step: StepFunction | None = None,
    callbacks: bool = True,
    extra: Sequence[Any] = (),
    held_out: Loader | None = None,
) -> Loop:
    """The loop of the run with other batches and limits, and `step` or `parts` instead of those of the run.

    With `callbacks`, those of the run are called before `extra`. When `limits` says so, the first batch of `held_out` is
    evaluated.
    """
    training = context.training
    metrics = fresh_metrics(context.config, training.task, training.device)

    def evaluate_once() -> dict[str, float]:
        assert held_out is not None
        values = evaluate(
            training.model,
            held_out,
            context.evaluated,
            loss=training.loss,
            metrics=metrics(),
            autocast=training.precision.autocast,
            limit=1,
        )
        return {f"val/{name}": value for name, value in values.items()}

    return Loop(
        training.state,
        source,
        plan,
        parts=parts or training.parts,
        limits=limits,
        evaluate=(lambda: evaluate_both(training, evaluate_once)) if held_out is not None else None,
        callbacks=[*(run_callbacks(context) if callbacks else ()), *extra],
        monitor=training.monitor,
        step=step or training.step,
    )


def held_out_loader(context: CheckContext) -> Loader:
    """The validation split, or the training split as it is evaluated."""
    loader: Loader = (context.splits.val or context.splits.train_for_eval).loader
    return loader


def _fall(context: CheckContext) -> Result:
    """Whether the loss of a task falls on one batch; how far it can is not known."""
    samples = len(context.batch.indices)
    for rate in _RATES:
        context.restore()
        context.disable_dropout()
        trained = [each for _, each in context.training.state.named_parameters() if each.requires_grad]
        optimizer, losses = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0), []
        for step in range(1, 1 + _FEW_STEPS):
            context.in_time()
            loss = context.loss()
            losses.append(float(loss.detach()))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            first, last = (sum(part) / _MEAN for part in (losses[:_MEAN], losses[-_MEAN:]))
            evidence = f"loss {first:.4g} to {last:.4g} in {step} steps on {samples} samples at a rate of {rate:g}"
            if step >= 2 * _MEAN and first - last > _FALLEN * abs(first):
                return passed(evidence)
    fix = "see which checks fail: parameters without gradient, a detached loss, inputs that do not reach the model"
    return failed(evidence, fix)


@check("loop", any_task=True)
def overfit(context: CheckContext) -> Result:
    """A model that cannot memorize one batch, with AdamW and without augmentation and dropout."""
    if not context.supervised:
        return _fall(context)
    curve = context.cached(overfit_batch)
    first, last, samples = curve.losses[0], curve.losses[-1], len(overfit_samples(context).images)
    evidence = f"loss {first:.4g} to {last:.4g} in {len(curve.losses) - 1} steps on {samples} samples"
    if curve.right is not None:
        evidence += f", {curve.right:.0%} right"
    if not math.isfinite(last):
        return failed(evidence, "find the operation with debug=anomaly")
    right = curve.right is None or curve.right >= _RIGHT
    if curve.learned or (curve.right == 1.0 and last < 0.5 * first) or (right and first < 1e-3):
        return passed(evidence)
    fix = "debug=overfit shows more; see which checks above fail: dead units, gradients, softmax, targets"
    if not right and last < 0.1 * first:
        return failed(f"{evidence}: the loss falls, but the answers stay wrong", f"a loss of the right answers: {fix}")
    guess, lowest = context.cached(loss_range)
    evidence += f"; a guess gives {guess:.4g}"
    if last < (min(first, guess) + lowest) / 2 or curve.right == 1.0:
        return warned(evidence, f"a larger model, or more time: {fix}")
    return failed(evidence, fix)


@check("loop")
def zero_input(context: CheckContext) -> Result:
    """Images that make no difference: the model memorizes targets of zero images just as well."""
    images, targets = overfit_samples(context).data
    need(len(torch.unique(targets, dim=0)) >= 2, "the samples have the same target")
    curve = context.cached(overfit_batch)
    need(math.isfinite(curve.losses[-1]), "the loss is not finite")
    without = train_on_batch(context, torch.zeros_like(images), curve.rate, len(curve.losses))
    steps, empty = len(without.losses) - 1, without.losses[-1]
    evidence = f"loss {curve.losses[steps]:.4g} with the images, {empty:.4g} with zeros, after {steps} steps"
    if curve.losses[steps] < 0.9 * empty or not math.isfinite(empty):
        return passed(evidence)
    return failed(evidence, "check what reaches the model: empty images, dead units, unused inputs")


@dataclasses.dataclass
class _ObservedSteps:
    """The state of the model at the start of each of a few steps."""

    stale: dict[str, int] = dataclasses.field(default_factory=dict)  # gradients that are not zero: after which step
    in_evaluation: set[str] = dataclasses.field(default_factory=set)  # modules
    hooked: list[str] = dataclasses.field(default_factory=list)  # nonzero gradients of a loss times zero
    steps: int = 0


def _observe_steps(context: CheckContext) -> _ObservedSteps:
    """Three steps in the loop of the run with its callbacks and an evaluation after each, and then what hooks add."""
    training, found, begins = context.training, _ObservedSteps(), True
    modules = [(name or "the model", module) for name, module in context.model.named_modules()]

    # Modules that were put into evaluation mode by someone, for example by a callback
    def in_evaluation() -> set[str]:
        return {name for name, module in modules if not module.training}

    def nonzero() -> list[str]:
        gradients = [(name, parameter.grad) for name, parameter in context.model.named_parameters()]
        return [name for name, gradient in gradients if gradient is not None and bool(gradient.count_nonzero())]

    def step(state: Any, parts: Any, batch: Any, weight: float, samples: int, *, update: bool) -> None:
        nonlocal begins
        for name in nonzero() if begins else ():
            found.stale.setdefault(name, found.steps)
        found.in_evaluation |= in_evaluation() - usual
        training.step(state, parts, context.shortened(batch), weight, samples, update=update)
        begins = update
        found.steps += update

    training.state.train()
    usual = in_evaluation()
    plan = dataclasses.replace(training.plan, limit=min(training.plan.batches, 3 * context.config.accumulate))
    limits = Limits(epochs=None, max_steps=3, evaluate_every_epochs=None, evaluate_every_steps=1)
    build_loop(context, training.data.train.loader, plan, limits, held_out=held_out_loader(context), step=step).run()

    # A hook that adds to gradients shows when the loss is multiplied by zero
    context.restore()
    context.disable_dropout()
    loss = context.loss()
    if loss.requires_grad and bool(loss.isfinite()):
        (loss * 0).backward()  # type: ignore[no-untyped-call]
        found.hooked = nonzero()
    return found


@check("loop", any_task=True)
def stale_gradients(context: CheckContext) -> Result:
    """Gradients of an earlier step that are left when the next one begins: zero_grad is missing or undone."""
    found = context.cached(_observe_steps)
    if found.stale:
        name, step = next(iter(found.stale.items()))
        evidence = f"{len(found.stale)} gradients are not zero when a step begins: {name} after step {step}"
        return failed(evidence, "let no callback, hook or optimizer keep .grad; give the optimizer all parameters")
    what, fix = "gradients of a loss times zero are not zero", "let no hook accumulate gradients"
    return none_of(found.hooked, what, fix, f"zero at the start of each of {found.steps} steps")


@check("loop", any_task=True)
def mode_in_training(context: CheckContext) -> Result:
    """Training steps in evaluation mode, for example after an evaluation in a callback."""
    found, fix = context.cached(_observe_steps), "call model.train() after whatever calls model.eval()"
    otherwise = f"in training mode at each of {found.steps} steps"
    return none_of(sorted(found.in_evaluation), "modules are in evaluation mode when a step begins", fix, otherwise)


@check("loop", any_task=True)
def evaluation_leaves_state(context: CheckContext) -> Result:
    """An evaluation that changes weights or buffers."""
    training = context.training
    before = _tensors(context)
    training.model.eval()
    # Not `evaluate`, which restores buffers.
    with torch.no_grad(), training.precision.autocast():
        for batch in map(context.shortened, held_out_loader(context).batches(0, 0, 1)):
            context.evaluated(batch.data)
    after = _tensors(context)
    fix = "change buffers in forward only `if self.training`"
    otherwise = f"{len(after)} tensors are unchanged"
    return none_of(_changed(before, after), f"of {len(after)} tensors change", fix, otherwise)


def _tensors(context: CheckContext) -> dict[str, Tensor]:
    """Copies of all weights and buffers."""
    tensors = dict(context.model.named_parameters()) | dict(context.model.named_buffers())
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _changed(before: dict[str, Tensor], after: dict[str, Tensor]) -> list[str]:
    """Names of new and changed tensors; NaN equals NaN."""

    def equal(a: Tensor | None, b: Tensor) -> bool:
        return a is not None and a.shape == b.shape and torch.allclose(a.float(), b.float(), 0.0, 0.0, equal_nan=True)

    return [name for name, new in after.items() if not equal(before.get(name), new)]


@check("loop", any_task=True)
def repeatability(context: CheckContext) -> Result:
    """Three training steps that give different weights the second time."""
    training, plan, runs = context.training, context.training.plan, []
    for _ in range(2):
        context.restore()
        batches = training.data.train.loader.batches(0, 0, min(plan.batches, 3 * plan.accumulate))
        for batch, (size, weight, update) in zip(batches, plan.parts(0), strict=False):
            training.step(training.state, training.parts, context.shortened(batch), weight, size, update=update)
        runs.append(_tensors(context))
    first, second = runs
    changed = _changed(second, first)
    apart = max([0.0, *(float((first[name].float() - second[name].float()).abs().max()) for name in changed)])
    what = f"of {len(first)} tensors differ, by up to {apart:.2g}"
    fix = "python -m runner audit names the operation that differs; deterministic=true refuses it"
    return none_of(changed, what, fix, f"the same bits twice in {len(first)} tensors", "warn")
