"""The learning-rate range test (Smith 2017, arXiv:1506.01186): the loss while the rate increases at every step."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from runner.engine.errors import Preempted
from runner.engine.plan import EpochPlan
from runner.engine.protocols import Source
from runner.engine.state import RunningMean, TrainState
from runner.engine.step import StepConfig, StepFunction, train_step
from runner.instrument.no_trace import no_trace

_SMOOTHING = 0.8  # the running mean lags by four steps
_DIVERGED = 4.0  # times the lowest smoothed loss
_LEAST_FALL = 0.05  # share of the first smoothed loss; if it falls less, no rate is suggested
# A loss is as good as the lowest if it exceeds it by no more than this share of the whole fall, also on a log scale.
_VALLEY, _VALLEY_LOG = 0.1, 0.2

_Window = list[tuple[Any, int, float, bool]]  # batch, size, weight, whether the step ends, see EpochPlan.parts


@dataclass(frozen=True)
class Curve:
    """The result of a range test.

    Attributes:
        rates: the learning rate of each step.
        losses: mean training loss of the batches of each step, before its update.
        smoothed: running mean of the losses.
        stopped: why the test ended before the last rate; empty if it did not.
    """

    rates: list[float]
    losses: list[float]
    smoothed: list[float]
    stopped: str = ""


@dataclass(frozen=True)
class Suggestions:
    """Suggested learning rates.

    Attributes:
        edge: the highest rate at which the smoothed loss is about as low as the lowest; above it, the loss rises.
        fifth: a fifth of `edge`.
        lowest: the rate of the lowest smoothed loss.
        tenth: a tenth of `lowest`.
        steepest: the rate at which the smoothed loss falls fastest over the logarithm of the rate.
    """

    edge: float
    fifth: float
    lowest: float
    tenth: float
    steepest: float


def exponential(start: float, end: float, steps: int) -> list[float]:
    """`steps` rates from `start` to `end`, each the same multiple of the one before."""
    return [start * (end / start) ** (step / (steps - 1)) for step in range(steps)]


def range_test(
    state: TrainState,
    source: Source,
    plan: EpochPlan,
    parts: StepConfig,
    rates: Sequence[float],
    reference: float,
    step: StepFunction = train_step,
    interrupted: Callable[[], str] = lambda: "",
) -> Curve:
    """Train one step at each rate until the loss diverges, then restore everything bit for bit.

    The steps are those of training, with accumulation, clipping and loss scaling, over as many epochs as needed. The loss is
    read at every step, so each one waits for the device.

    Args:
        state: what training changes.
        source: the training split.
        plan: how its epochs divide into steps.
        parts: how a step is computed.
        rates: the rate of each step, for a parameter group whose `initial_lr` is `reference`; the other groups keep
            their ratios to it.
        reference: see `rates`.
        step: trains on a batch as `train_step` does.
        interrupted: returns the name of the signal that asks to stop, or an empty string.

    Raises:
        Preempted: when asked to stop.
    """
    losses: list[float] = []
    smoothed: list[float] = []
    mean, stopped = 0.0, ""
    windows = _windows(source, plan, len(rates))
    with _unchanged(state, parts.loss):
        meter = state.meter = RunningMean(next(state.model.parameters()).device)
        state.averaged = None  # averaging weights during a sweep of the rate is meaningless
        state.train()
        guard = parts.guard
        if guard is not None:
            guard.start()
        try:
            for rate, window in zip(rates, windows, strict=True):
                if signal := interrupted():
                    raise Preempted(signal)
                for group in state.optimizer.param_groups:
                    group["lr"] = group["initial_lr"] * (rate / reference)
                meter.reset()
                for batch, size, weight, update in window:
                    step(state, parts, batch, weight, size, update)
                loss = meter.read()
                if not math.isfinite(loss):
                    stopped = f"the loss is {loss} at a rate of {rate:.3g}"
                    break
                losses.append(loss)
                mean = _SMOOTHING * mean + (1 - _SMOOTHING) * loss
                # Without the bias towards the initial 0 (Kingma & Ba 2015).
                smoothed.append(mean / (1 - _SMOOTHING ** len(losses)))
                if smoothed[-1] > _diverged(smoothed):
                    stopped = f"the loss is {_DIVERGED:g} times its lowest at a rate of {rate:.3g}"
                    break
                if guard is not None and guard.found():
                    stopped = f"the gradients are not finite at a rate of {rate:.3g}"
                    break
        finally:
            if guard is not None:
                guard.start()
    return Curve(list(rates[: len(losses)]), losses, smoothed, stopped)


def suggest(curve: Curve) -> Suggestions:
    """Derive learning rates from a curve.

    Raises:
        ValueError: if the loss hardly falls; the message describes the curve.
    """
    smoothed = curve.smoothed
    if len(smoothed) < 2:
        raise ValueError(f"the loss is not finite from the first step on{_because(curve)}")
    lowest = min(range(len(smoothed)), key=smoothed.__getitem__)
    if lowest == 0 or smoothed[0] - smoothed[lowest] < _LEAST_FALL * abs(smoothed[0]):
        raise ValueError(
            f"the loss hardly falls at any rate from {curve.rates[0]:.3g} to {curve.rates[-1]:.3g}: "
            f"from {smoothed[0]:.4g} to {smoothed[lowest]:.4g} at best{_because(curve)}"
        )
    # If the loss is level over many rates, noise decides where it is lowest, but not where it begins to rise.
    level = _level(smoothed)
    edge = curve.rates[max(place for place, loss in enumerate(smoothed) if loss <= level)]
    # The rates are evenly spaced on a logarithmic scale, so differences between steps are slopes.
    slopes = [smoothed[place + 1] - smoothed[place - 1] for place in range(1, lowest)] or [0.0]
    steepest = 1 + min(range(len(slopes)), key=slopes.__getitem__)
    bottom = curve.rates[lowest]
    return Suggestions(edge, edge / 5, bottom, bottom / 10, curve.rates[steepest])


def _level(smoothed: Sequence[float]) -> float:
    """The loss that is about as low as the lowest; also by its logarithm, because a high first loss could hide a rise."""
    first, low = smoothed[0], min(smoothed)
    level = low + _VALLEY * (first - low)
    return min(level, low * (first / low) ** _VALLEY_LOG) if low > 0 else level


def _diverged(smoothed: Sequence[float]) -> float:
    """The loss above which the test ends; a multiple of the lowest, except near or below zero, where that is noise."""
    first, low = smoothed[0], min(smoothed)
    return max(low + (_DIVERGED - 1) * abs(low), low + _VALLEY * (first - low))


def _because(curve: Curve) -> str:
    return f" ({curve.stopped})" if curve.stopped else ""


def _windows(source: Source, plan: EpochPlan, steps: int) -> Iterator[_Window]:
    """The batches of each step, epoch after epoch."""
    for epoch in itertools.count():
        # Only request batches that are used: workers would read the others in vain.
        count = min(plan.steps, steps)
        batches = source.batches(epoch, 0, min(plan.batches, count * plan.accumulate))
        given = ((batch, *part) for batch, part in zip(batches, plan.parts(0), strict=False))
        for _ in range(count):
            window: _Window = []
            for item in given:
                window.append(item)
                if item[-1]:
                    break
            yield window
        steps -= count
        if steps == 0:
            return


@contextlib.contextmanager
def _unchanged(state: TrainState, loss: object = None) -> Iterator[None]:
    """Restore everything that training changes: weights, optimizer, loss scale, position, and what `no_trace` restores."""
    model, optimizer, scaler = state.model, state.optimizer, state.scaler
    meter, averaged, position = state.meter, state.averaged, copy.deepcopy(state.position)
    weights = [(parameter, parameter.detach().clone()) for parameter in model.parameters()]
    moments = {weight: copy.deepcopy(found) for weight, found in optimizer.state.items()}
    settings = [
        {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]
    scale = copy.deepcopy(scaler.state_dict()) if scaler is not None else {}
    try:
        with no_trace(model, loss):
            yield
    finally:
        for parameter, values in weights:
            parameter.data.copy_(values)
        optimizer.state.clear()
        optimizer.state.update(moments)
        for group, own in zip(optimizer.param_groups, settings, strict=True):
            group.update(own)
        if scaler is not None and scale:
            scaler.load_state_dict(scale)
        state.meter, state.averaged, state.position = meter, averaged, position
