"""Checks that train for more steps: the learning rate, and what schedule, clipping, callbacks and optimizer do to the loss."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from runner.data.loaders import Batch
from runner.engine.errors import Diverged
from runner.engine.loop import Loop
from runner.engine.plan import EpochPlan, Limits
from runner.engine.state import RunningMean
from runner.lab.check.checks.loop import build_loop, held_out_loader, run_callbacks, train_on_batch, without_noise
from runner.lab.check.context import CheckContext
from runner.lab.check.guess import guess_loss, loss_range, overfit_samples
from runner.lab.check.result import Result, check, failed, graded, need, passed, warned

_RAMP = 10  # steps up to the learning rate, and as many at it
_EXPLODED, _RISEN = 15, 3  # how often the loss rises by the range between the first one, or a guess, and the lowest
_STEPS, _EPOCH = 32, 8  # of a short training
_RATES = (1.0, 0.1, 10.0, 100.0)  # multiples of the rate of the run: its size is for another check
_PLAIN_RATES = (1e-3, 1e-2)  # of AdamW
_LEARNED = 0.1  # share of the range between a guess, or the first loss, and the lowest
_FALLEN = 0.02  # of this range, in a training on all samples
_UNDONE = 0.5  # share of the progress without callbacks


def _count_every_loss(context: CheckContext) -> None:
    """Until the check ends, also count losses that are not finite, which the running mean of `on_nonfinite=skip` skips."""
    context.training.state.meter = RunningMean(next(context.model.parameters()).device)


@check("loop", any_task=True)
def learning_rate(context: CheckContext) -> Result:
    """A learning rate at which the loss explodes within a few steps, or nothing changes."""
    training, (guess, lowest) = context.training, context.cached(loss_range)
    _count_every_loss(context)
    state, plan, loader = training.state, training.plan, training.data.train.loader
    rates = [float(group["initial_lr"]) for group in state.optimizer.param_groups]
    # What moves too little does not learn, even if the loss is finite
    before = {name: p.detach().clone() for name, p in training.model.named_parameters() if p.requires_grad}
    losses: list[float] = []
    epochs = (zip(loader.batches(n, 0, plan.batches), plan.parts(0), strict=False) for n in itertools.count())
    for batch, (size, weight, update) in itertools.chain.from_iterable(epochs):
        context.in_time()
        # Up to the rate in equal factors, from a hundredth of it: a short warm-up.
        share = 0.01 ** max(0.0, 1 - len(losses) / (_RAMP - 1))
        for group, rate in zip(state.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * share
        training.step(state, training.parts, context.shortened(batch), weight, size, update=update)
        if update:
            losses.append(state.meter.read())
            state.meter.reset()
            if len(losses) >= 2 * _RAMP or not math.isfinite(losses[-1]):
                break
    # The result of a short ramp: how far the weights moved, and where the loss went
    after = dict(training.model.named_parameters())
    moves = [float((after[name].detach() - old).norm() / old.norm()) for name, old in before.items() if bool(old.any())]
    moved, first, last = max([0.0, *moves]), losses[0], statistics.median(losses[-5:])
    evidence = f"loss {first:.4g} to {last:.4g} in {len(losses)} steps up to {max(rates):g}; "
    evidence += f"weights move by up to {moved:.2g} of their size"
    fix = "a smaller optimizer.lr"
    # A rise is measured by the range of the loss, as losses have no common scale
    rise, reach = last - first, max(first, guess) - lowest
    if not math.isfinite(last) or not math.isfinite(losses[-1]) or rise > _EXPLODED * reach:
        return failed(evidence, fix)
    if training.parts.guard is not None and (skipped_steps := training.parts.guard.found()):
        return failed(f"{evidence}; the gradients of step {skipped_steps[0] + 1} are not finite", fix)
    if rise > _RISEN * reach:
        return warned(evidence, fix)
    return graded(evidence, "a larger optimizer.lr", warn=moved < 1e-5)


@contextlib.contextmanager
def _squeezed(context: CheckContext, steps: int, scale: float = 1.0, constant: bool = False) -> Iterator[None]:
    """The schedule of the whole run in a few steps, or none, times `scale`."""
    state, real, total = context.training.state, context.training.state.schedule, context.training.total_steps

    def factor(step: int) -> float:
        return scale * (1.0 if constant else real.factor(min(total - 1, step * total // steps)))

    # Evaluations after so few steps mean little to it.
    states: Any = {"state_dict": real.state_dict, "load_state_dict": real.load_state_dict}
    state.schedule = SimpleNamespace(factor=factor, observe=lambda metric: None, **states)
    try:
        yield
    finally:
        state.schedule = real


@check("loop")
def training(context: CheckContext) -> Result:
    """A short training like that of the run that ends at the loss of a guess, or with a higher loss (train=true)."""
    need(context.config.train, "only with train=true")
    run, (_, lowest) = context.training, context.cached(loss_range)
    losses: list[float] = []

    def on_step(loop: Loop) -> None:
        loop.check_nonfinite()
        losses.append(loop.state.meter.read())
        loop.state.meter.reset()

    run.state.train()
    _count_every_loss(context)
    steps = min(context.config.train_steps, run.total_steps)
    limits = Limits(epochs=None, max_steps=steps, evaluate_every_epochs=None)
    extra = [SimpleNamespace(on_step=on_step)]
    loop = build_loop(context, run.data.train.loader, run.plan, limits, extra=extra)
    fix = "see overfit and short-training about model and optimizer; learnable, batches and splits about the data"
    # The schedule is squeezed into these few steps, so that its end is seen too
    try:
        with _squeezed(context, steps):
            loop.run()
    except Diverged as error:
        return failed(f"diverged: {error}", f"a smaller optimizer.lr, or grad_clip.norm=1.0: {fix}")
    if wrong := [place for place, value in enumerate(losses, 1) if not math.isfinite(value)]:
        return failed(f"the loss of step {wrong[0]} of {steps} is not finite", f"a smaller optimizer.lr: {fix}")
    # Means of the first and last part, as single losses are noisy
    parts = losses[: max(1, len(losses) // 10)], losses[-max(1, len(losses) // 5) :]
    (first, last), guess = map(statistics.fmean, parts), guess_loss(context)
    evidence = f"mean loss {first:.4g} in the first {len(parts[0])} of {steps} steps, "
    evidence += f"{last:.4g} in the last {len(parts[1])}; a guess gives {guess:.4g}"
    margin = _FALLEN * (guess - lowest)
    if last >= guess - margin or last > first + margin:
        return failed(evidence, fix)
    return passed(evidence)


def _loss_now(context: CheckContext, batch: Batch) -> float:
    """The loss of the batch with the weights as they are now; infinite if it is not finite."""
    without_noise(context)
    with torch.no_grad():
        value = float(context.training.loss(context.model(batch.images), context.targets(batch)))
    return value if math.isfinite(value) else math.inf


def _loss_after(context: CheckContext, batch: Batch, scale: float, without: str = "") -> float:
    """The loss of a batch after a few dozen steps on it from the start; infinite if they diverge.

    The learning rate is multiplied by `scale`; `without` is one of `callbacks`, `clipping` and `schedule`, or nothing.
    """
    context.restore()
    callbacks, parts, size = without != "callbacks", context.training.parts, len(batch.images)
    if without == "clipping":
        parts = dataclasses.replace(parts, clip_norm=None, clip_value=None, clip_adaptive=None)
    limits = Limits(epochs=None, max_steps=_STEPS, evaluate_every_epochs=1 if callbacks else None)
    repeated: Any = SimpleNamespace(
        samples=size * _EPOCH, batch_size=size, batches=lambda epoch, start, stop: iter([batch] * (stop - start))
    )
    plan, held_out = EpochPlan(repeated.samples, size), held_out_loader(context) if callbacks else None
    timer = [SimpleNamespace(on_step=lambda loop: context.in_time())]
    loop = build_loop(context, repeated, plan, limits, callbacks=callbacks, extra=timer, held_out=held_out, parts=parts)
    try:
        with _squeezed(context, _STEPS, scale, without == "schedule"):
            loop.run()
            return _loss_now(context, batch)
    except Diverged:
        return math.inf


@check("steps")
def short_training(context: CheckContext) -> Result:
    """Schedule, clipping, callbacks or optimizer that undo training: the loss of one batch does not fall in 32 steps."""
    count, (guess, lowest) = len(overfit_samples(context).images), context.cached(loss_range)
    batch = context.batch.first(count)
    context.restore()
    first = _loss_now(context, batch)
    start = min(first, guess)
    need(lowest < start < math.inf, f"the loss is {first:.3g} before the first step")
    enough = start - _LEARNED * (start - lowest)
    # Only callbacks of the user can undo training; the others are known
    custom = any(not type(each).__module__.startswith("runner.") for each in run_callbacks(context))
    best, scale = math.inf, 1.0
    # Several rates, because the one of the config fits a long training and not one batch
    for each in _RATES:
        value = _loss_after(context, batch, each)
        if value < best:
            best, scale = value, each
        if best < enough:
            break
    evidence = f"loss {first:.4g} to {best:.4g} in {_STEPS} steps on {count} samples"
    evidence += "" if scale == 1.0 else f" at {scale:g} times the rate"
    of_callbacks = "check what the callbacks do to weights and learning rates"
    # The loss falls, so that only callbacks could still be at fault
    if best < enough:
        without = _loss_after(context, batch, scale, "callbacks") if custom else best
        if first - best < _UNDONE * (first - without):
            return failed(f"{evidence}, to {without:.4g} without callbacks", of_callbacks)
        return passed(evidence)
    # It does not fall: omit one suspect at a time, and see whether that helps
    for without_what, how, fix in (
        ("callbacks", "without callbacks", of_callbacks),
        ("clipping", "without clipping", "larger bounds in grad_clip, or null"),
        ("schedule", "at a constant rate", "another scheduler: compare with scheduler=constant"),
    ):
        value = min(_loss_after(context, batch, each, without_what) for each in _RATES[:2])
        if value < enough:
            return failed(f"{evidence}, to {value:.4g} {how}", fix)
    # A plain optimizer tells whether the model can learn the batch at all
    plain = []
    for rate in _PLAIN_RATES:
        train_on_batch(context, batch.images, rate, _STEPS, until_learned=False)
        plain.append(_loss_now(context, batch))
    if min(plain) < enough:
        fix = "another optimizer, or other arguments for it: see step-size"
        return failed(f"{evidence}, to {min(plain):.4g} with AdamW", fix)
    if first > guess + _LEARNED * (guess - lowest):
        fix = "repair what hides the images from the model, and start with small weights in the last layer: see overfit"
        return failed(f"{evidence}, where a guess gives {guess:.4g}: only the bad start is undone", fix)
    return Result("skip", f"{evidence}, and not with AdamW either: overfit says more")
