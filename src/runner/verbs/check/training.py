"""Checks that train for more steps: the learning rate, and what schedule, clipping, callbacks and optimizer do to the loss."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
import time
from types import SimpleNamespace
from typing import Any

import torch

from runner.data.loaders import Batch
from runner.engine.errors import Diverged, NotFinite
from runner.engine.loop import Loop
from runner.engine.plan import EpochPlan, Limits
from runner.engine.state import RunningMean
from runner.verbs.check.context import CheckContext
from runner.verbs.check.loop import (
    build_loop,
    held_out_loader,
    overfit_samples,
    run_callbacks,
    train_on_batch,
    without_noise,
)
from runner.verbs.check.result import Result, failed, graded, need, out_of_time, passed, warned

_RAMP = 10  # steps up to the learning rate, and as many at it
_SHARE_OF_RAMP = 0.6  # of the time left, for these steps

_STEPS, _EPOCH = 32, 8  # of a short training
_RATES = (1.0, 0.1, 10.0, 100.0)  # multiples of the rate of the run: its size is for another check
_PLAIN_RATES = (1e-3, 1e-2)  # of AdamW
_FALLEN = 0.9  # share of the first loss
_UNDONE = 0.5  # share of the progress without callbacks
_SECONDS = 0.1  # share of the time left, for one short training


def _count_every_loss(context: CheckContext) -> None:
    """Until the check ends, also count losses that are not finite, which the running mean of `on_nonfinite=skip` skips."""
    context.training.state.meter = RunningMean(next(context.model.parameters()).device)


def learning_rate(context: CheckContext) -> Result:
    """A learning rate at which the loss explodes within a few steps, or nothing changes."""
    training, budget = context.training, f"budget_s={context.config.budget_s:g} is too short"
    if (possible := context.affordable_steps()) < 2 * _RAMP:
        return out_of_time(f"it takes {2 * _RAMP} steps, and there is time for {possible:.0f}")
    _count_every_loss(context)
    state, plan, loader = training.state, training.plan, training.data.train.loader
    rates = [float(group["initial_lr"]) for group in state.optimizer.param_groups]
    before = {name: p.detach().clone() for name, p in training.model.named_parameters() if p.requires_grad}
    losses: list[float] = []
    until = time.monotonic() + max(1.0, _SHARE_OF_RAMP * context.left)
    epochs = (zip(loader.batches(n, 0, plan.batches), plan.parts(0), strict=False) for n in itertools.count())
    for batch, (size, weight, update) in itertools.chain.from_iterable(epochs):
        # Up to the rate in equal factors, from a hundredth of it: a short warm-up.
        share = 0.01 ** max(0.0, 1 - len(losses) / (_RAMP - 1))
        for group, rate in zip(state.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * share
        training.step(state, training.parts, batch, weight, size, update)
        if update:
            losses.append(state.meter.read())
            state.meter.reset()
            if len(losses) >= 2 * _RAMP or time.monotonic() > until or not math.isfinite(losses[-1]):
                break
    after = dict(training.model.named_parameters())
    moves = [float((after[name].detach() - old).norm() / old.norm()) for name, old in before.items() if bool(old.any())]
    moved, first, last = max([0.0, *moves]), losses[0], statistics.median(losses[-5:])
    evidence = f"loss {first:.4g} to {last:.4g} in {len(losses)} steps up to {max(rates):g}; "
    evidence += f"weights move by up to {moved:.2g} of their size"
    fix = "a smaller optimizer.lr"
    if not math.isfinite(last) or not math.isfinite(losses[-1]) or last > 10 * first + 10:
        return failed(evidence, fix)
    if training.parts.guard is not None and (skipped_steps := training.parts.guard.found()):
        return failed(f"{evidence}; the gradients of step {skipped_steps[0] + 1} are not finite", fix)
    if len(losses) < 2 * _RAMP:
        return out_of_time(f"{budget}: {evidence}")
    if last > 3 * first + 1:
        return warned(evidence, fix)
    return graded(evidence, "a larger optimizer.lr", warn=moved < 1e-5)


class _LossRecorder:
    """Records the mean loss of every few steps."""

    def __init__(self, context: CheckContext, every: int) -> None:
        self.context, self.every = context, every
        self.losses: list[tuple[int, float]] = []
        self.rollbacks: list[str] = []

    def on_step(self, loop: Loop) -> None:
        done = loop.state.position.global_step
        if done % self.every == 0:
            loop.check_nonfinite()
            if set(range(done - self.every + 1, done + 1)) <= set(loop.state.position.skipped_steps):
                return  # there is no loss to read
            self.losses.append((done, loop.state.meter.read()))
            loop.state.meter.reset()
        if self.context.left < 1:
            loop.request_stop("budget_s is used up")

    def on_rollback(self, loop: Loop, found: NotFinite) -> None:
        """Training starts again, without the step."""
        self.rollbacks.append(str(found))
        self.losses.clear()
        _count_every_loss(self.context)


def training(context: CheckContext) -> Result:
    """A short training like that of the run, in which the loss does not fall (train=true)."""
    need(context.config.train, "only with train=true")
    run = context.training
    steps = min(context.config.train_steps, run.total_steps)
    every = max(1, steps // 10)
    recorder = _LossRecorder(context, every)
    run.state.train()
    _count_every_loss(context)
    limits = Limits(epochs=None, max_steps=steps, evaluate_every_epochs=None)
    loop = build_loop(context, run.data.train.loader, run.plan, limits, extra=[recorder])
    fix = "overfit and learning-rate tell model and optimizer apart; a larger train_steps"
    try:
        loop.run()
    except Diverged as error:
        return failed(f"diverged: {error}", f"a smaller optimizer.lr, or grad_clip.norm=1.0: {fix}")
    losses, rollbacks = recorder.losses, recorder.rollbacks
    if wrong := [done for done, value in losses if not math.isfinite(value)]:
        return failed(f"the loss is not finite up to step {wrong[0]} of {steps}", f"a smaller optimizer.lr: {fix}")
    if len(losses) < 3:
        if rollbacks:
            return failed(f"rolled back {len(rollbacks)} times, and hardly a step is left: {rollbacks[0]}", fix)
        return warned(f"only {len(losses)} values of the loss", "a larger train_steps or budget_s")
    first, last = losses[0][1], statistics.fmean(value for _, value in losses[-2:])
    done = losses[-1][0]
    evidence = f"mean loss {first:.4g} in the first {every} of {done} steps, {last:.4g} in the last {2 * every}"
    if last >= 0.95 * first:
        return failed(evidence, fix)
    if rollbacks:
        return warned(f"{evidence}; rolled back {len(rollbacks)} times: {rollbacks[0]}", "repair what is not finite")
    return passed(evidence)


def _loss_now(context: CheckContext, batch: Batch) -> float:
    """The loss of the batch with the weights as they are now; infinite if it is not finite."""
    without_noise(context)
    with torch.no_grad():
        value = float(context.training.parts.loss(context.model(batch.images), context.targets(batch)))
    return value if math.isfinite(value) else math.inf


def _loss_after(context: CheckContext, batch: Batch, scale: float, without: str = "") -> float:
    """The loss of a batch after a few dozen steps on it from the start; infinite if they diverge.

    The learning rate is multiplied by `scale`; `without` is one of `callbacks`, `clipping` and `schedule`, or nothing.
    """
    run = context.training
    context.restore()
    state, real = run.state, run.state.schedule
    groups = state.optimizer.param_groups
    rates = [group["initial_lr"] for group in groups]
    callbacks, parts, size, until = without != "callbacks", run.parts, len(batch.images), context.left * (1 - _SECONDS)
    if without == "clipping":
        parts = dataclasses.replace(parts, clip_norm=None, clip_value=None, clip_adaptive=None)
    limits = Limits(epochs=None, max_steps=_STEPS, evaluate_every_epochs=1 if callbacks else None)
    plan, held_out = EpochPlan(size * _EPOCH, size), held_out_loader(context) if callbacks else None
    repeated: Any = SimpleNamespace(
        samples=plan.samples, batch_size=size, batches=lambda epoch, start, stop: iter([batch] * (stop - start))
    )

    def stop_in_time(loop: Loop) -> None:
        if context.left < until:
            loop.request_stop("budget_s is used up")

    def factor(step: int) -> float:  # the schedule of the whole run in a few steps
        return 1.0 if without == "schedule" else real.factor(min(run.total_steps - 1, step * run.total_steps // _STEPS))

    extra = [SimpleNamespace(on_step=stop_in_time)]
    loop = build_loop(context, repeated, plan, limits, callbacks=callbacks, extra=extra, held_out=held_out, parts=parts)
    states = {"state_dict": real.state_dict, "load_state_dict": real.load_state_dict}
    try:
        # Evaluations after so few steps mean little to it.
        state.schedule = SimpleNamespace(factor=factor, observe=lambda metric: None, **states)
        for group, rate in zip(groups, rates, strict=True):
            group["initial_lr"] = rate * scale
        loop.run()
        return _loss_now(context, batch)
    except Diverged:
        return math.inf
    finally:
        state.schedule = real
        for group, rate in zip(state.optimizer.param_groups, rates, strict=True):
            group["initial_lr"] = rate


def short_training(context: CheckContext) -> Result:
    """Schedule, clipping, callbacks or optimizer that undo training: the loss of one batch does not fall in 32 steps."""
    count = len(overfit_samples(context).images)
    batch = Batch(*(each[:count] for each in context.batch))
    context.restore()
    first = _loss_now(context, batch)
    need(1e-6 < first < math.inf, f"the loss is {first:.3g} before the first step")
    enough = _FALLEN * first
    custom = any(not type(each).__module__.startswith("runner.") for each in run_callbacks(context)[0])
    best, scale = math.inf, 1.0
    for each in _RATES:
        value = _loss_after(context, batch, each)
        if value < best:
            best, scale = value, each
        if best < enough:
            break
    evidence = f"loss {first:.4g} to {best:.4g} in {_STEPS} steps on {count} samples"
    evidence += "" if scale == 1.0 else f" at {scale:g} times the rate"
    of_callbacks = "check what the callbacks do to weights and learning rates"
    if best < enough:
        without = _loss_after(context, batch, scale, "callbacks") if custom else best
        if first - best < _UNDONE * (first - without):
            return failed(f"{evidence}, to {without:.4g} without callbacks", of_callbacks)
        return passed(evidence)
    if context.left <= 1:
        return out_of_time(f"budget_s={context.config.budget_s:g} is too short: {evidence}")
    for without_what, how, fix in (
        ("callbacks", "without callbacks", of_callbacks),
        ("clipping", "without clipping", "larger bounds in grad_clip, or null"),
        ("schedule", "at a constant rate", "another scheduler: compare with scheduler=constant"),
    ):
        value = min(_loss_after(context, batch, each, without_what) for each in _RATES[:2])
        if value < enough:
            return failed(f"{evidence}, to {value:.4g} {how}", fix)
    plain = []
    for rate in _PLAIN_RATES:
        train_on_batch(context, batch.images, rate, _STEPS, until_learned=False)
        plain.append(_loss_now(context, batch))
    if min(plain) < enough:
        fix = "another optimizer, or other arguments for it: see step-size"
        return failed(f"{evidence}, to {min(plain):.4g} with AdamW", fix)
    return Result("skip", f"{evidence}, and not with AdamW either: overfit says more")
