"""A few dozen steps on one batch with all that a run puts around them: schedule, clipping, optimizer and callbacks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch

from runner.build.metrics import fresh_metrics
from runner.build.weight_average import evaluate_both
from runner.data.loaders import Batch
from runner.engine.errors import Diverged
from runner.engine.evaluation import evaluate
from runner.engine.loop import Limits, Loop
from runner.engine.plan import EpochPlan
from runner.engine.state import Schedule
from runner.verbs.check.context import CheckContext
from runner.verbs.check.loop import _callbacks
from runner.verbs.check.overfit_batch import disable_dropout
from runner.verbs.check.result import Result, check, failed, out_of_time, passed, skipped

_SAMPLES = 16
_STEPS, _EPOCH = 32, 8
_RATES = (1.0, 0.1, 10.0, 100.0)  # times that of the run, as the check is about direction and not about size
_FALLEN = 0.9  # share of the first loss
_UNDONE = 0.5  # share of what is gained without callbacks
_SECONDS = 0.1  # share of the remaining time that one course may take


class _Repeated:
    """One batch again and again, where the loop expects epochs."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self.samples, self.batch_size = len(batch.images) * _EPOCH, len(batch.images)

    def batches(self, epoch: int, start: int, stop: int) -> Iterator[Batch]:
        """The batch, as often as asked."""
        for _ in range(start, stop):
            yield self._batch

    def close(self) -> None:
        """Nothing to end."""


class _Squeezed:
    """A schedule of the whole run in a few steps."""

    def __init__(self, real: Schedule, total: int) -> None:
        self._real, self._total = real, total

    def factor(self, step: int) -> float:
        """The factor at the same share of the run."""
        return self._real.factor(min(self._total - 1, step * self._total // _STEPS))

    def observe(self, metric: float) -> None:
        """Nothing: evaluations of so few steps say nothing."""

    def state_dict(self) -> dict[str, Any]:
        """That of the real one."""
        return self._real.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """To the real one."""
        self._real.load_state_dict(state)


class _Clock:
    """Ends a course when its time is up."""

    def __init__(self, context: CheckContext) -> None:
        self._subject, self._until = context, context.left * (1 - _SECONDS)

    def on_step(self, loop: Loop) -> None:
        """Ask for the end."""
        if self._subject.left < self._until:
            loop.request_stop("budget_s is used up")


def _value(context: CheckContext, batch: Batch) -> float:
    """The loss of the batch as the weights are now."""
    disable_dropout(context)
    with torch.no_grad():
        return float(context.training.parts.loss(context.model(batch.images), context.targets(batch)))


def _course(context: CheckContext, batch: Batch, scale: float, callbacks: bool, clip: bool, constant: bool) -> float:
    """The loss of a batch after a few dozen steps on it from the start; infinite if they diverge."""
    training = context.training
    context.restore()
    state, real = training.state, training.state.schedule
    rates = [group["initial_lr"] for group in state.optimizer.param_groups]
    extra, roll_back = _callbacks(context) if callbacks else ([], lambda loop: context.restore())
    split = training.splits.val or training.splits.train_for_eval
    metrics = fresh_metrics(context.config, training.task, training.device)

    def evaluate_once() -> dict[str, float]:
        arguments = (training.model, split.loader, training.task.targets, training.loss, metrics())
        return {f"val/{name}": each for name, each in evaluate(*arguments, training.precision.autocast, 1).items()}

    parts = (
        training.parts
        if clip
        else dataclasses.replace(training.parts, clip_norm=None, clip_value=None, clip_adaptive=None)
    )
    source = _Repeated(batch)
    try:
        if not constant:
            state.schedule = _Squeezed(real, training.total_steps)
        for group, rate in zip(state.optimizer.param_groups, rates, strict=True):
            group["initial_lr"] = rate * scale
        loop = Loop(
            state,
            source,
            EpochPlan(source.samples, source.batch_size),
            parts,
            Limits(epochs=None, max_steps=_STEPS, evaluate_every_epochs=1 if callbacks else None),
            (lambda _: evaluate_both(training, context.config, evaluate_once)) if callbacks else None,
            [*extra, _Clock(context)],
            (training.monitor, training.mode),
            step=training.step,
            roll_back=roll_back,
        )
        if constant:
            state.schedule = _Flat(real)
        loop.run()
        value = _value(context, batch)
    except Diverged:
        return math.inf
    finally:
        state.schedule = real
        for group, rate in zip(state.optimizer.param_groups, rates, strict=True):
            group["initial_lr"] = rate
    return value if math.isfinite(value) else math.inf


class _Flat(_Squeezed):
    """The full rate throughout."""

    def __init__(self, real: Schedule) -> None:
        super().__init__(real, 1)

    def factor(self, step: int) -> float:
        """1, whatever the step."""
        return 1.0


def _plain(context: CheckContext, batch: Batch) -> float:
    """The loss after as many steps of AdamW and nothing else."""
    best = math.inf
    for rate in (1e-3, 1e-2):
        context.restore()
        weights = [each for each in context.model.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=0.0)
        disable_dropout(context)
        for _ in range(_STEPS):
            loss = context.training.parts.loss(context.model(batch.images), context.targets(batch))
            if not loss.requires_grad:
                return math.inf
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        value = _value(context, batch)
        best = min(best, value) if math.isfinite(value) else best
    return best


@check
def short_training(context: CheckContext) -> Result:
    """Schedule, clipping, callbacks or optimizer that undo the work: the loss of one batch does not fall in a few dozen steps."""
    whole = context.batch
    batch = Batch(whole.images[:_SAMPLES], whole.targets[:_SAMPLES], whole.indices[:_SAMPLES])
    context.restore()
    first = _value(context, batch)
    if not math.isfinite(first) or first <= 1e-6:
        return skipped(f"the loss is {first:.3g} before the first step")
    own = any(not type(each).__module__.startswith("runner.") for each in _callbacks(context)[0])
    best, scale = math.inf, 1.0
    for each in _RATES:
        value = _course(context, batch, each, True, True, False)
        if value < best:
            best, scale = value, each
        if best < _FALLEN * first:
            break
    told = f"loss {first:.4g} to {best:.4g} in {_STEPS} steps on {len(batch.images)} samples"
    told += "" if scale == 1.0 else f" at {scale:g} times the rate"
    if best < _FALLEN * first:
        if own:
            without = _course(context, batch, scale, False, True, False)
            if first - best < _UNDONE * (first - without):
                return failed(
                    f"{told}, to {without:.4g} without callbacks", "look at what the callbacks do to weights and rates"
                )
        return passed(told)
    if context.left <= 1:
        return out_of_time(f"budget_s={context.config.budget_s:g} is too short: {told}")
    for what, arguments, fix in (
        ("without callbacks", (False, True, False), "look at what the callbacks do to weights and rates"),
        ("without clipping", (True, False, False), "larger bounds in grad_clip, or null"),
        ("at a constant rate", (True, True, True), "another scheduler: scheduler=constant tells"),
    ):
        value = min(_course(context, batch, each, *arguments) for each in _RATES[:2])
        if value < _FALLEN * first:
            return failed(f"{told}, to {value:.4g} {what}", fix)
    plain = _plain(context, batch)
    if plain < _FALLEN * first:
        return failed(
            f"{told}, to {plain:.4g} with AdamW", "another optimizer, or other arguments of it: see step-size"
        )
    return skipped(f"{told}, and not with AdamW either: overfit tells more")
