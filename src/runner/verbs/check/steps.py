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
from runner.engine.loop import Loop
from runner.engine.plan import EpochPlan, Limits
from runner.engine.protocols import Schedule
from runner.verbs.check.context import Subject
from runner.verbs.check.loop import _callbacks
from runner.verbs.check.overfit_batch import _without_dropout
from runner.verbs.check.verdict import Verdict, check, failed, out_of_time, passed, skipped

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

    def __init__(self, subject: Subject) -> None:
        self._subject, self._until = subject, subject.left * (1 - _SECONDS)

    def on_step(self, loop: Loop) -> None:
        """Ask for the end."""
        if self._subject.left < self._until:
            loop.request_stop("budget_s is used up")


def _value(subject: Subject, batch: Batch) -> float:
    """The loss of the batch as the weights are now."""
    _without_dropout(subject)
    with torch.no_grad():
        return float(subject.training.parts.loss(subject.model(batch.images), subject.targets(batch)))


def _course(subject: Subject, batch: Batch, scale: float, callbacks: bool, clip: bool, constant: bool) -> float:
    """The loss of a batch after a few dozen steps on it from the start; infinite if they diverge."""
    training = subject.training
    subject.restart()
    state, real = training.state, training.state.schedule
    rates = [group["initial_lr"] for group in state.optimizer.param_groups]
    extra, roll_back = _callbacks(subject) if callbacks else ([], lambda loop: subject.restart())
    split = training.splits.val or training.splits.train_for_eval
    metrics = fresh_metrics(subject.config, training.task, training.device)

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
            (lambda _: evaluate_both(training, subject.config, evaluate_once)) if callbacks else None,
            [*extra, _Clock(subject)],
            (training.monitor, training.mode),
            step=training.step,
            roll_back=roll_back,
        )
        if constant:
            state.schedule = _Flat(real)
        loop.run()
        value = _value(subject, batch)
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


def _plain(subject: Subject, batch: Batch) -> float:
    """The loss after as many steps of AdamW and nothing else."""
    best = math.inf
    for rate in (1e-3, 1e-2):
        subject.restart()
        weights = [each for each in subject.model.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=0.0)
        _without_dropout(subject)
        for _ in range(_STEPS):
            loss = subject.training.parts.loss(subject.model(batch.images), subject.targets(batch))
            if not loss.requires_grad:
                return math.inf
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        value = _value(subject, batch)
        best = min(best, value) if math.isfinite(value) else best
    return best


@check
def short_training(subject: Subject) -> Verdict:
    """Schedule, clipping, callbacks or optimizer that undo the work: the loss of one batch does not fall in a few dozen steps."""
    whole = subject.batch
    batch = Batch(whole.images[:_SAMPLES], whole.targets[:_SAMPLES], whole.indices[:_SAMPLES])
    subject.restart()
    first = _value(subject, batch)
    if not math.isfinite(first) or first <= 1e-6:
        return skipped(f"the loss is {first:.3g} before the first step")
    own = any(not type(each).__module__.startswith("runner.") for each in _callbacks(subject)[0])
    best, scale = math.inf, 1.0
    for each in _RATES:
        value = _course(subject, batch, each, True, True, False)
        if value < best:
            best, scale = value, each
        if best < _FALLEN * first:
            break
    told = f"loss {first:.4g} to {best:.4g} in {_STEPS} steps on {len(batch.images)} samples"
    told += "" if scale == 1.0 else f" at {scale:g} times the rate"
    if best < _FALLEN * first:
        if own:
            without = _course(subject, batch, scale, False, True, False)
            if first - best < _UNDONE * (first - without):
                return failed(
                    f"{told}, to {without:.4g} without callbacks", "look at what the callbacks do to weights and rates"
                )
        return passed(told)
    if subject.left <= 1:
        return out_of_time(f"budget_s={subject.config.budget_s:g} is too short: {told}")
    for what, arguments, fix in (
        ("without callbacks", (False, True, False), "look at what the callbacks do to weights and rates"),
        ("without clipping", (True, False, False), "larger bounds in grad_clip, or null"),
        ("at a constant rate", (True, True, True), "another scheduler: scheduler=constant tells"),
    ):
        value = min(_course(subject, batch, each, *arguments) for each in _RATES[:2])
        if value < _FALLEN * first:
            return failed(f"{told}, to {value:.4g} {what}", fix)
    plain = _plain(subject, batch)
    if plain < _FALLEN * first:
        return failed(
            f"{told}, to {plain:.4g} with AdamW", "another optimizer, or other arguments of it: see step-size"
        )
    return skipped(f"{told}, and not with AdamW either: overfit tells more")
