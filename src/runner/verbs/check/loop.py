"""Checks of the training loop: what a batch teaches the model, and what steps and evaluations leave behind."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor, nn

from runner.engine.plan import Limits
from runner.engine.state import TrainState
from runner.engine.step import StepConfig
from runner.verbs.check.context import CheckContext
from runner.verbs.check.loop_runs import build_loop, held_out_loader
from runner.verbs.check.overfit_batch import SHARE, overfit_batch, overfit_samples, train_on_batch
from runner.verbs.check.result import Result, failed, join_names, out_of_time, passed, skipped, warned


def overfit(context: CheckContext) -> Result:
    """A model that cannot memorize one batch, with AdamW and without augmentation and dropout."""
    curve = context.cached(overfit_batch)
    first, last, samples = curve.losses[0], curve.losses[-1], len(overfit_samples(context)[0])
    evidence = f"loss {first:.4g} to {last:.4g} in {len(curve.losses) - 1} steps on {samples} samples"
    if curve.right is not None:
        evidence += f", {curve.right:.0%} right"
    if not math.isfinite(last):
        return failed(evidence, "find the operation with debug=anomaly")
    right = curve.right is None or curve.right >= 0.9
    if curve.learned or (curve.right == 1.0 and last < 0.5 * first) or (right and first < 1e-3):
        return passed(evidence)
    fix = "debug=overfit shows more; see which checks above fail: dead units, gradients, softmax, targets"
    if curve.late:
        return out_of_time(f"budget_s={context.config.budget_s:g} is too short: {evidence}")
    if not right and last < 0.1 * first:
        return failed(f"{evidence}: the loss falls, but the answers stay wrong", f"a loss of the right answers: {fix}")
    if last < 0.5 * first or curve.right == 1.0:
        return warned(evidence, f"a larger model, or more time: {fix}")
    return failed(evidence, fix)


def zero_input(context: CheckContext) -> Result:
    """Images that make no difference: the model memorizes targets of zero images just as well."""
    images, targets = overfit_samples(context)
    if len(torch.unique(targets, dim=0)) < 2:
        return skipped("the samples have the same target")
    curve = context.cached(overfit_batch)
    if not math.isfinite(curve.losses[-1]):
        return skipped("the loss is not finite")
    seconds = max(1.0, SHARE * context.left)
    without = train_on_batch(context, torch.zeros_like(images), curve.rate, len(curve.losses), seconds)
    steps, empty = len(without.losses) - 1, without.losses[-1]
    evidence = f"loss {curve.losses[steps]:.4g} with the images, {empty:.4g} with zeros, after {steps} steps"
    if curve.losses[steps] < 0.9 * empty or not math.isfinite(empty):
        return passed(evidence)
    if without.late or curve.late:
        return out_of_time(f"budget_s={context.config.budget_s:g} is too short: {evidence}")
    return failed(evidence, "check what reaches the model: empty images, dead units, unused inputs")


class _StepObserver:
    """The step of the run; notes gradients and modes at the start of each."""

    def __init__(self, context: CheckContext) -> None:
        self.step = context.training.step
        self.modules = [(name or "the model", module) for name, module in context.model.named_modules()]
        self.usual = self._in_evaluation()
        self.stale: dict[str, int] = {}
        self.in_evaluation: set[str] = set()
        self.from_hooks: list[str] = []
        self.begins = True
        self.steps = 0

    def _in_evaluation(self) -> set[str]:
        return {name for name, module in self.modules if not module.training}

    def __call__(
        self, state: TrainState, parts: StepConfig, batch: Any, weight: float, samples: int, update: bool
    ) -> None:
        if self.begins:
            for name, parameter in state.model.named_parameters():
                if parameter.grad is not None and bool(parameter.grad.count_nonzero()):
                    self.stale.setdefault(name, self.steps)
        self.in_evaluation |= self._in_evaluation() - self.usual
        self.step(state, parts, batch, weight, samples, update)
        self.begins = update
        self.steps += update


def _gradients_from_hooks(context: CheckContext) -> list[str]:
    """Parameters with a nonzero gradient for a loss times zero: a hook adds to it."""
    context.restore()
    model, (images, targets) = context.model, overfit_samples(context)
    model.eval()
    loss = context.training.parts.loss(model(images), targets)
    if not loss.requires_grad or not bool(loss.isfinite()):
        return []
    (loss * 0).backward()  # type: ignore[no-untyped-call]
    found = [name for name, p in model.named_parameters() if p.grad is not None and bool((p.grad != 0).any())]
    context.restore()
    return found


def _observe_loop(context: CheckContext) -> _StepObserver:
    """Three steps in the loop of the run with its callbacks and an evaluation after each, and then what hooks add."""
    training = context.training
    training.state.train()
    observer = _StepObserver(context)
    plan = dataclasses.replace(training.plan, limit=min(training.plan.batches, 3 * context.config.accumulate))
    limits = Limits(epochs=None, max_steps=3, evaluate_every_epochs=None, evaluate_every_steps=1)
    held_out = context.shortened(held_out_loader(context))
    source = context.shortened(training.data.train.loader)
    build_loop(context, source, plan, limits, held_out=held_out, step=observer).run()
    observer.from_hooks = _gradients_from_hooks(context)
    return observer


def stale_gradients(context: CheckContext) -> Result:
    """Gradients of an earlier step that are left when the next one begins: zero_grad is missing or undone."""
    observer = context.cached(_observe_loop)
    if observer.stale:
        name, step = next(iter(observer.stale.items()))
        evidence = f"{len(observer.stale)} gradients are not zero when a step begins: {name} after step {step}"
        return failed(evidence, "let no callback, hook or optimizer keep .grad; give the optimizer all parameters")
    if hooked := observer.from_hooks:
        evidence = f"{len(hooked)} gradients of a loss times zero are not zero: {join_names(hooked)}"
        return failed(evidence, "let no hook accumulate gradients")
    return passed(f"zero at the start of each of {observer.steps} steps")


def mode_in_training(context: CheckContext) -> Result:
    """Training steps in evaluation mode, for example after an evaluation in a callback."""
    observer = context.cached(_observe_loop)
    names = sorted(observer.in_evaluation)
    if names:
        evidence = f"{len(names)} modules are in evaluation mode when a step begins: {join_names(names)}"
        return failed(evidence, "call model.train() after whatever calls model.eval()")
    return passed(f"in training mode at each of {observer.steps} steps")


def evaluation_leaves_state(context: CheckContext) -> Result:
    """An evaluation that changes weights or buffers."""
    training = context.training
    before = _copies(training.model)
    training.model.eval()
    # Not `evaluate`, which restores buffers.
    with torch.no_grad(), training.precision.autocast():
        for batch in context.shortened(held_out_loader(context)).batches(0, 0, 1):
            training.loss(training.model(batch.images), training.task.targets(batch.targets))
    changed, count = _differences(before, _copies(training.model))
    if not changed:
        return passed(f"{count} tensors are unchanged")
    evidence = f"{len(changed)} of {count} tensors change: {join_names(changed)}"
    return failed(evidence, "change buffers in forward only `if self.training`")


def _copies(model: nn.Module) -> dict[str, Tensor]:
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _differences(before: dict[str, Tensor], after: dict[str, Tensor]) -> tuple[list[str], int]:
    """Names of new and changed tensors, and how many there are in all; NaN equals NaN."""

    def same(a: Tensor, b: Tensor) -> bool:
        return a.shape == b.shape and torch.allclose(a.float(), b.float(), 0.0, 0.0, equal_nan=True)

    return [name for name, each in after.items() if name not in before or not same(before[name], each)], len(after)


def _weights_after(context: CheckContext, steps: int) -> dict[str, Tensor]:
    """Weights and buffers after a few steps from the start."""
    context.restore()
    training, plan = context.training, context.training.plan
    loader = context.shortened(training.data.train.loader)
    batches = loader.batches(0, 0, min(plan.batches, steps * plan.accumulate))
    for batch, (size, weight, update) in zip(batches, plan.parts(0), strict=False):
        training.step(training.state, training.parts, batch, weight, size, update)
    return _copies(training.model)


def repeatability(context: CheckContext) -> Result:
    """Three training steps that give different weights the second time."""
    first, second = _weights_after(context, 3), _weights_after(context, 3)
    changed, count = _differences(second, first)
    if not changed:
        return passed(f"the same bits twice in {count} tensors")
    apart = max(float((first[name].float() - second[name].float()).abs().max()) for name in changed)
    evidence = f"{len(changed)} of {count} tensors differ, by up to {apart:.2g}: {join_names(changed)}"
    return warned(evidence, "python -m runner audit names the operation that differs; deterministic=true refuses it")
