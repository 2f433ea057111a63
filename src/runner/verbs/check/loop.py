"""Checks of training itself: a few real steps, with the step, the optimizer and the callbacks of the run."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from runner.build.metrics import build_callbacks, fresh_metrics
from runner.build.weight_average import evaluate_both
from runner.checkpoint import resume
from runner.engine.errors import Diverged, NotFinite
from runner.engine.evaluation import evaluate
from runner.engine.freezing import UnfreezeCallback
from runner.engine.loop import Limits, Loop
from runner.engine.state import RunningMean, TrainState
from runner.engine.step import StepConfig
from runner.verbs.check.context import CheckContext
from runner.verbs.check.overfit_batch import SHARE, learn, overfit_batch, overfit_samples
from runner.verbs.check.result import Result, check, failed, join_names, out_of_time, passed, skipped, warned

_RAMP = 10  # steps up to the learning rate, and as many at it
_SHARE_OF_RAMP = 0.6  # of the time that is left, which it may take


@check
def overfit(context: CheckContext) -> Result:
    """A model that cannot learn one batch by heart, with AdamW and without augmentation and dropout."""
    course = context.cached(overfit_batch)
    losses, images = course.losses, overfit_samples(context)[0]
    evidence = f"loss {losses[0]:.4g} to {losses[-1]:.4g} in {len(losses) - 1} steps on {len(images)} samples"
    if course.right is not None:
        evidence += f", {course.right:.0%} right"
    if not math.isfinite(losses[-1]):
        return failed(evidence, "find the operation with debug=anomaly")
    right = course.right is None or course.right >= 0.9
    if course.learned or (course.right == 1.0 and losses[-1] < 0.5 * losses[0]) or (right and losses[0] < 1e-3):
        return passed(evidence)
    fix = "debug=overfit shows more; look at what fails above: dead units, gradients, softmax, targets"
    if course.late:
        return out_of_time(f"budget_s={context.config.budget_s:g} is too short: {evidence}")
    if not right and losses[-1] < 0.1 * losses[0]:
        return failed(f"{evidence}: the loss falls, and the answers stay wrong", f"a loss of the right answers: {fix}")
    if losses[-1] < 0.5 * losses[0] or course.right == 1.0:
        return warned(evidence, f"a larger model, or more time: {fix}")
    return failed(evidence, fix)


@check
def zero_input(context: CheckContext) -> Result:
    """Images that make no difference: all zeros in their place are learned just as well."""
    images, targets = overfit_samples(context)
    if len(torch.unique(targets, dim=0)) < 2:
        return skipped("the samples have one target")
    course = context.cached(overfit_batch)
    steps, real = len(course.losses), course.losses[-1]
    if not math.isfinite(real):
        return skipped("the loss is not finite")
    without = learn(context, torch.zeros_like(images), course.rate, steps, max(1.0, SHARE * context.left))
    empty = without.losses
    evidence = (
        f"after {len(empty) - 1} steps {course.losses[len(empty) - 1]:.4g} with the images, with zeros {empty[-1]:.4g}"
    )
    if course.losses[len(empty) - 1] < 0.9 * empty[-1] or not math.isfinite(empty[-1]):
        return passed(evidence)
    if without.late or course.late:
        return out_of_time(f"budget_s={context.config.budget_s:g} is too short: {evidence}")
    return failed(evidence, "look at what reaches the model: empty images, dead units, inputs that are not used")


class _StepObserver:
    """The step of the run, with a look at the gradients and modes that it begins with."""

    def __init__(self, context: CheckContext) -> None:
        self.step = context.training.step
        self.modes = [(name or "the model", module) for name, module in context.model.named_modules()]
        self.usual = {name for name, module in self.modes if not module.training}
        self.stale: dict[str, int] = {}
        self.still: set[str] = set()
        self.kept: list[str] = []
        self.begins = True
        self.steps = 0

    def __call__(
        self, state: TrainState, parts: StepConfig, batch: Any, weight: float, samples: int, update: bool
    ) -> None:
        if self.begins:
            for name, parameter in state.model.named_parameters():
                if parameter.grad is not None and bool(parameter.grad.count_nonzero()):
                    self.stale.setdefault(name, self.steps)
        self.still |= {name for name, module in self.modes if not module.training} - self.usual
        self.step(state, parts, batch, weight, samples, update)
        self.begins = update
        self.steps += update


def _callbacks(context: CheckContext) -> tuple[list[Any], Callable[[Loop], None]]:
    """The callbacks of the run that training depends on, and what `on_nonfinite=rollback` does: back to the start."""
    training = context.training
    extra = build_callbacks(context.config, training.task, training.monitor, training.mode)
    kept = {
        name: resume.copied(callback.state_dict())
        for name, callback in extra.items()
        if hasattr(callback, "state_dict")
    }

    def roll_back(loop: Loop) -> None:
        context.restore()
        for name, before in kept.items():
            if hasattr(extra[name], "load_state_dict"):
                extra[name].load_state_dict(resume.copied(before))

    return [UnfreezeCallback(lambda line: None), *extra.values()], roll_back


def _added_by_hooks(context: CheckContext) -> list[str]:
    """Parameters with a gradient other than zero of a loss times zero: something adds to it."""
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


def _run_loop(context: CheckContext) -> _StepObserver:
    """Three steps through the loop of the run, and what hooks add to gradients after them."""
    watch = _looped(context)
    watch.kept = _added_by_hooks(context)
    return watch


def _looped(context: CheckContext) -> _StepObserver:
    """Three steps through the loop of the run with its callbacks, and an evaluation after each."""
    training, config = context.training, context.config
    context.training.state.train()
    watch = _StepObserver(context)
    callbacks, roll_back = _callbacks(context)
    plan = dataclasses.replace(training.plan, limit=min(training.plan.batches, 3 * config.accumulate))
    held_out = context.shortened((training.splits.val or training.splits.train_for_eval).loader)
    metrics = fresh_metrics(config, training.task, training.device)

    def evaluate_once() -> dict[str, float]:
        arguments = (training.model, held_out, training.task.targets, training.loss, metrics())
        found = evaluate(*arguments, training.precision.autocast, 1)
        return {f"val/{name}": value for name, value in found.items()}

    loop = Loop(
        training.state,
        context.shortened(training.splits.train.loader),
        plan,
        training.parts,
        Limits(epochs=None, max_steps=3, evaluate_every_epochs=None, evaluate_every_steps=1),
        lambda _: evaluate_both(training, config, evaluate_once),
        callbacks,
        (training.monitor, training.mode),
        step=watch,
        roll_back=roll_back,
    )
    loop.run()
    return watch


@check
def stale_gradients(context: CheckContext) -> Result:
    """Gradients of an earlier step that are still there when the next one begins: a zero_grad that is missing or undone."""
    watch = context.cached(_run_loop)
    if watch.stale:
        name, step = next(iter(watch.stale.items()))
        evidence = f"{len(watch.stale)} gradients are not zero when a step begins: {name} after step {step}"
        return failed(evidence, "let no callback, hook or optimizer keep .grad; give the optimizer all parameters")
    if watch.kept:
        evidence = f"{len(watch.kept)} gradients of a loss times zero are not zero: {join_names(watch.kept)}"
        return failed(evidence, "let no hook add up gradients")
    return passed(f"gone at the start of each of {watch.steps} steps")


@check
def mode_in_training(context: CheckContext) -> Result:
    """Training steps that are made in evaluation mode, as after an evaluation in a callback."""
    watch = context.cached(_run_loop)
    if watch.still:
        evidence = (
            f"{len(watch.still)} modules are in evaluation mode when a step begins: {join_names(sorted(watch.still))}"
        )
        return failed(evidence, "call model.train() at the end of what calls model.eval()")
    return passed(f"in training mode at each of {watch.steps} steps")


@check
def evaluation_leaves_state(context: CheckContext) -> Result:
    """An evaluation that changes weights or buffers."""
    training = context.training
    before = {name: tensor.clone() for name, tensor in _tensors(training.model).items()}
    held_out = context.shortened((training.splits.val or training.splits.train_for_eval).loader)
    training.model.eval()
    # Not `evaluate`, which puts buffers back.
    with torch.no_grad(), training.precision.autocast():
        for batch in held_out.batches(0, 0, 1):
            training.loss(training.model(batch.images), training.task.targets(batch.targets))
    after = _tensors(training.model)
    changed = [name for name, tensor in after.items() if name not in before or not _same(before[name], tensor)]
    if changed:
        evidence = f"{len(changed)} of {len(after)} tensors change: {join_names(changed)}"
        return failed(evidence, "change buffers in forward only `if self.training`")
    return passed(f"{len(after)} tensors are the same after it")


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a.detach().float(), b.detach().float(), 0.0, 0.0, equal_nan=True)


def _steps(context: CheckContext, count: int) -> dict[str, Tensor]:
    """The weights after a few steps from the start."""
    context.restore()
    training = context.training
    loader, plan = context.shortened(training.splits.train.loader), training.plan
    batches = loader.batches(0, 0, min(plan.batches, count * plan.accumulate))
    for batch, (size, weight, update) in zip(batches, plan.parts(0), strict=False):
        training.step(training.state, training.parts, batch, weight, size, update)
    return {name: tensor.detach().clone() for name, tensor in _tensors(training.model).items()}


@check
def repeatability(context: CheckContext) -> Result:
    """Three training steps that give other weights the second time."""
    first, second = _steps(context, 3), _steps(context, 3)
    differ = [name for name, tensor in first.items() if not _same(tensor, second[name])]
    if differ:
        apart = max(float((first[name].float() - second[name].float()).abs().max()) for name in differ)
        evidence = f"{len(differ)} of {len(first)} tensors differ, by up to {apart:.2g}: {join_names(differ)}"
        return warned(evidence, "python -m runner audit names what does not repeat; deterministic=true refuses it")
    return passed(f"the same bits twice in {len(first)} tensors")


@contextlib.contextmanager
def _every_loss(state: TrainState) -> Iterator[None]:
    """Count losses that are not finite as well, which the meter of `on_nonfinite=skip` leaves out."""
    usual = state.meter
    state.meter = RunningMean(next(state.model.parameters()).device)
    try:
        yield
    finally:
        state.meter = usual


@check
def learning_rate(context: CheckContext) -> Result:
    """A learning rate that makes the loss explode within a few steps, or changes nothing."""
    with _every_loss(context.training.state):
        return _ramp(context)


def _ramp(context: CheckContext) -> Result:
    training = context.training
    if (possible := context.steps_in_time()) < 2 * _RAMP:
        return out_of_time(f"it takes {2 * _RAMP} steps, for {possible:.0f} of which there is time")
    state, plan = training.state, training.plan
    rates = [float(group["initial_lr"]) for group in state.optimizer.param_groups]
    before = {name: p.detach().clone() for name, p in training.model.named_parameters() if p.requires_grad}
    losses: list[float] = []
    moved = 0.0
    until, number, epoch = time.monotonic() + max(1.0, _SHARE_OF_RAMP * context.left), 0, 0
    while number < 2 * _RAMP and time.monotonic() < until:
        batches = training.splits.train.loader.batches(epoch, 0, plan.batches)
        for batch, (size, weight, update) in zip(batches, plan.parts(0), strict=False):
            # Up to the rate in equal factors, from a hundredth of it: what warm-up does, only shorter.
            share = 0.01 ** max(0.0, 1 - number / (_RAMP - 1))
            for group, rate in zip(state.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * share
            training.step(state, training.parts, batch, weight, size, update)
            if not update:
                continue
            losses.append(state.meter.read())
            state.meter.reset()
            number += 1
            if number >= 2 * _RAMP or time.monotonic() > until or not math.isfinite(losses[-1]):
                break
        epoch += 1
        if not losses or not math.isfinite(losses[-1]):
            break
    for name, parameter in training.model.named_parameters():
        if name in before and float(before[name].norm()) > 0:
            moved = max(moved, float((parameter.detach() - before[name]).norm() / before[name].norm()))
    # Two steps at least, and the later ones at the rate itself.
    first, last = losses[0], statistics.median(losses[-5:])
    top = f"{max(rates):g}"
    evidence = f"loss {first:.4g} to {last:.4g} in {len(losses)} steps up to {top}; weights move by up to {moved:.2g} of their size"
    fix = "a smaller optimizer.lr"
    if not math.isfinite(last) or not math.isfinite(losses[-1]) or last > 10 * first + 10:
        return failed(evidence, fix)
    left_out = training.parts.guard.found() if training.parts.guard is not None else []
    if left_out:
        return failed(f"{evidence}; the gradients of step {left_out[0] + 1} are not finite", fix)
    if number < 2 * _RAMP:
        return out_of_time(f"budget_s={context.config.budget_s:g} is too short: {evidence}")
    if last > 3 * first + 1:
        return warned(evidence, fix)
    return warned(evidence, "a larger optimizer.lr") if moved < 1e-5 else passed(evidence)


@check
def training(context: CheckContext) -> Result:
    """A short training as the run would make it, in which the loss does not fall (train=true)."""
    if not context.config.train:
        return skipped("train=true makes it")
    with _every_loss(context.training.state):
        return _short_training(context)


def _short_training(context: CheckContext) -> Result:
    config, parts = context.config, context.training
    losses: list[tuple[int, float]] = []

    class Note:
        """Reads the mean loss of every few steps."""

        def on_step(self, loop: Loop) -> None:
            done = loop.state.position.global_step
            if done % every == 0:
                loop.check_nonfinite()
                if set(range(done - every + 1, done + 1)) <= set(loop.state.position.left_out):
                    return  # nothing was read
                losses.append((done, loop.state.meter.read()))
                loop.state.meter.reset()
            if context.left < 1:
                loop.request_stop("budget_s is used up")

        def on_rollback(self, loop: Loop, found: NotFinite) -> None:
            """Training begins anew, without the step."""
            left_out.append(str(found))
            losses.clear()

    left_out: list[str] = []
    steps = min(config.train_steps, parts.total_steps)
    every = max(1, steps // 10)
    context.training.state.train()
    callbacks, roll_back = _callbacks(context)
    limits = Limits(epochs=None, max_steps=steps, evaluate_every_epochs=None)
    loop = Loop(
        parts.state,
        parts.splits.train.loader,
        parts.plan,
        parts.parts,
        limits,
        None,
        [*callbacks, Note()],
        (parts.monitor, parts.mode),
        step=parts.step,
        roll_back=roll_back,
    )
    fix = "overfit and learning-rate tell model and optimizer apart; a larger train_steps"
    try:
        loop.run()
    except Diverged as error:
        return failed(f"diverged: {error}", f"a smaller optimizer.lr, or grad_clip.norm=1.0: {fix}")
    wrong = [done for done, value in losses if not math.isfinite(value)]
    if wrong:
        return failed(f"the loss is not finite up to step {wrong[0]} of {steps}", f"a smaller optimizer.lr: {fix}")
    if left_out and len(losses) < 3:
        return failed(f"rolled back {len(left_out)} times, after which hardly a step is left: {left_out[0]}", fix)
    if len(losses) < 3:
        return warned(f"{len(losses)} readings only", "a larger train_steps or budget_s")
    values = [value for _, value in losses]
    first, last = values[0], statistics.fmean(values[-2:])
    evidence = (
        f"mean loss {first:.4g} in the first {every} steps, {last:.4g} in the last {2 * every} of {losses[-1][0]}"
    )
    if last >= 0.95 * first:
        return failed(evidence, fix)
    if left_out:
        return warned(f"{evidence}; rolled back {len(left_out)} times: {left_out[0]}", "mend what is not finite")
    return passed(evidence)
