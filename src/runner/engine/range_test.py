"""The learning-rate range test (Smith 2017, arXiv:1506.01186): the loss while the rate grows from step to step."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from runner.engine.errors import Preempted
from runner.engine.evaluation import Source
from runner.engine.plan import EpochPlan
from runner.engine.state import RunningMean, TrainState
from runner.engine.step import StepConfig, train_step
from runner.instrument.no_trace import no_trace

_KEPT = 0.8  # share of the running mean that is kept at a step: it lags by four steps
_DIVERGED = 4.0  # times the lowest smoothed loss
_LEAST_FALL = 0.05  # of the first smoothed loss, for there to be anything to suggest
# What lies no higher above the lowest smoothed loss than these parts of the whole fall is level with it.
_VALLEY, _VALLEY_LOG = 0.1, 0.2


@dataclass(frozen=True)
class Curve:
    """What the steps showed.

    Attributes:
        rates: the learning rate of each step.
        losses: mean training loss of the batches of each step, before its update.
        smoothed: running mean of the losses.
        stopped: why it ended before the last rate; empty if it did not.
    """

    rates: list[float]
    losses: list[float]
    smoothed: list[float]
    stopped: str = ""


@dataclass(frozen=True)
class Suggestions:
    """Rates that a curve suggests.

    Attributes:
        edge: the last rate at which the smoothed loss is still about as low as it gets; above it, it rises.
        fifth: a fifth of that.
        lowest: where the smoothed loss is lowest.
        tenth: a tenth of that.
        steepest: where the smoothed loss falls fastest over the logarithm of the rate.
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
    step: Callable[[TrainState, StepConfig, Any, float, int, bool], None] = train_step,
    interrupted: Callable[[], str] = lambda: "",
) -> Curve:
    """Train a step at each rate, until the loss diverges; everything is then put back, bit for bit.

    The steps are those of training: accumulation, clipping, loss scaling and all. An epoch that is shorter is followed by
    the next one. The loss is read at every step, so each one waits for the device.

    Args:
        state: what training changes.
        source: the training split.
        plan: how its epochs divide into steps.
        parts: what a step is made of.
        rates: the rate of each step, for a parameter group whose `initial_lr` is `reference`; the other groups keep
            their ratios to it.
        reference: see `rates`.
        step: trains on a batch as `train_step` does.
        interrupted: the name of the signal that asks to stop, or an empty string.

    Raises:
        Preempted: when asked to stop.
    """
    losses: list[float] = []
    smoothed: list[float] = []
    stopped = ""
    windows = _windows(source, plan, len(rates))
    with unchanged(state, parts.loss):
        meter = state.meter = RunningMean(next(state.model.parameters()).device)
        state.averaged = None  # weights on the way through all rates are worth no average
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
                smoothed.append(_corrected(losses))
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
    """The rates that a curve suggests.

    Raises:
        ValueError: if the loss hardly falls, so that there is nothing to go by; it says what it did.
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
    # Where the loss is level over many rates, noise decides where it is lowest, but not where it begins to rise.
    level = _level(smoothed)
    edge = curve.rates[max(place for place, loss in enumerate(smoothed) if loss <= level)]
    # The rates are evenly spaced on a logarithmic scale, so differences between steps are slopes.
    slopes = [smoothed[place + 1] - smoothed[place - 1] for place in range(1, lowest)] or [0.0]
    steepest = 1 + min(range(len(slopes)), key=slopes.__getitem__)
    bottom = curve.rates[lowest]
    return Suggestions(edge, edge / 5, bottom, bottom / 10, curve.rates[steepest])


def _level(smoothed: Sequence[float]) -> float:
    """Up to where a loss is about as low as the lowest; by its logarithm as well, lest a high beginning hide a rise."""
    first, low = smoothed[0], min(smoothed)
    level = low + _VALLEY * (first - low)
    return min(level, low * (first / low) ** _VALLEY_LOG) if low > 0 else level


def _diverged(smoothed: Sequence[float]) -> float:
    """Above which a loss diverges; near or below zero a multiple of the lowest is still no more than noise."""
    first, low = smoothed[0], min(smoothed)
    return max(low + (_DIVERGED - 1) * abs(low), low + _VALLEY * (first - low))


def _because(curve: Curve) -> str:
    return f" ({curve.stopped})" if curve.stopped else ""


def _corrected(values: Sequence[float]) -> float:
    """The exponential running mean at the last value, without the bias towards where it began (Kingma & Ba 2015)."""
    mean = 0.0
    for value in values:
        mean = _KEPT * mean + (1 - _KEPT) * value
    return mean / (1 - _KEPT ** len(values))


def _windows(source: Source, plan: EpochPlan, steps: int) -> Iterator[list[tuple[Any, int, float, bool]]]:
    """The batches of each step with their sizes, weights and whether they end it; epoch after epoch."""
    for epoch in itertools.count():
        # No batch is asked for that is not used: workers would read it for nothing.
        count = min(plan.steps, steps)
        batches = source.batches(epoch, 0, min(plan.batches, count * plan.accumulate))
        given = ((batch, *part) for batch, part in zip(batches, plan.parts(0), strict=False))
        for _ in range(count):
            yield _until_update(given)
        steps -= count
        if steps == 0:
            return


def _until_update(given: Iterator[tuple[Any, int, float, bool]]) -> list[tuple[Any, int, float, bool]]:
    window = []
    for item in given:
        window.append(item)
        if item[-1]:
            break
    return window


@contextlib.contextmanager
def unchanged(state: TrainState, loss: object = None) -> Iterator[None]:
    """Put back all that training changes: weights, optimizer, loss scale, position, and what `no_trace` puts back."""
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
