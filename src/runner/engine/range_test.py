"""The learning-rate range test (Smith 2017, arXiv:1506.01186): the loss while the rate increases at every step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from runner.engine.errors import Preempted
from runner.engine.plan import EpochPlan
from runner.engine.protocols import Source
from runner.engine.state import RunningMean
from runner.engine.step import Step

_SMOOTHING = 0.8  # the running mean lags by four steps
_DIVERGED = 4.0  # times the lowest smoothed loss
_LEAST_FALL = 0.05  # share of the first smoothed loss; if it falls less, no rate is suggested
# A loss is as good as the lowest if it exceeds it by no more than this share of the whole fall, also on a log scale.
_VALLEY, _VALLEY_LOG = 0.1, 0.2


@dataclass(frozen=True)
class Curve:
    """The result of a range test: for each step its rate, and the loss before its update."""

    rates: list[float]
    losses: list[float]
    smoothed: list[float]  # running mean of the losses
    stopped: str = ""  # why the test ended before the last rate


@dataclass(frozen=True)
class Suggestions:
    """Suggested learning rates."""

    edge: float  # the highest at which the smoothed loss is about as low as the lowest; above it, the loss rises
    fifth: float  # of `edge`
    lowest: float  # where the smoothed loss is lowest
    tenth: float  # of `lowest`
    steepest: float  # where the smoothed loss falls fastest over the logarithm of the rate


def exponential(start: float, end: float, steps: int) -> list[float]:
    """`steps` rates from `start` to `end`, each the same multiple of the one before."""
    return [start * (end / start) ** (step / (steps - 1)) for step in range(steps)]


def range_test(
    step: Step,
    source: Source,
    plan: EpochPlan,
    rates: Sequence[float],
    *,
    reference: float,
    interrupted: Callable[[], str] = lambda: "",
) -> Curve:
    """Train one step at each rate until the loss diverges. The state is of no use afterwards.

    The steps are those of training, with accumulation, clipping and loss scaling, over as many epochs as needed. The loss is
    read at every step, so each one waits for the device.

    `rates` are those of a parameter group whose `initial_lr` is `reference`; the other groups keep their ratios to it.
    `interrupted` returns the name of the signal that asks to stop, or an empty string.
    """
    state, guard = step.state, step.guard
    losses: list[float] = []
    smoothed: list[float] = []
    mean, stopped = 0.0, ""
    meter = state.meter = RunningMean(next(state.model.parameters()).device)
    state.averaged = None  # averaging weights during a sweep of the rate is meaningless
    state.train()
    if guard is not None:
        guard.start()
    for rate, window in zip(rates, _windows(source, plan, len(rates)), strict=True):
        if signal := interrupted():
            raise Preempted(signal)
        for group in state.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * (rate / reference)
        meter.reset()
        for batch, size, share, update in window:
            step(batch, share, size, update=update)
        loss = meter.read()
        # The three ends of the test: no number, a loss far above its lowest, and gradients that are not finite
        if not math.isfinite(loss):
            stopped = f"the loss is {loss} at a rate of {rate:.3g}"
            break
        losses.append(loss)
        mean = _SMOOTHING * mean + (1 - _SMOOTHING) * loss
        # Without the bias towards the initial 0 (Kingma & Ba 2015).
        smoothed.append(mean / (1 - _SMOOTHING ** len(losses)))
        # A multiple of the lowest loss, except near or below zero, where that is noise
        first, low = smoothed[0], min(smoothed)
        if smoothed[-1] > max(low + (_DIVERGED - 1) * abs(low), low + _VALLEY * (first - low)):
            stopped = f"the loss is {_DIVERGED:g} times its lowest at a rate of {rate:.3g}"
            break
        if guard is not None and guard.found():
            stopped = f"the gradients are not finite at a rate of {rate:.3g}"
            break
    return Curve(list(rates[: len(losses)]), losses, smoothed, stopped)


def suggest(curve: Curve) -> Suggestions:
    """Derive learning rates from a curve; `ValueError` describes one whose loss hardly falls."""
    smoothed, because = curve.smoothed, f" ({curve.stopped})" if curve.stopped else ""
    if len(smoothed) < 2:
        raise ValueError(f"the loss is not finite from the first step on{because}")
    lowest = min(range(len(smoothed)), key=smoothed.__getitem__)
    if lowest == 0 or smoothed[0] - smoothed[lowest] < _LEAST_FALL * abs(smoothed[0]):
        raise ValueError(
            f"the loss hardly falls at any rate from {curve.rates[0]:.3g} to {curve.rates[-1]:.3g}: "
            f"from {smoothed[0]:.4g} to {smoothed[lowest]:.4g} at best{because}"
        )
    # If the loss is level over many rates, noise decides where it is lowest, but not where it begins to rise.
    # "About as low" also by its logarithm, because a high first loss could hide a rise.
    first, low = smoothed[0], smoothed[lowest]
    level = low + _VALLEY * (first - low)
    level = min(level, low * (first / low) ** _VALLEY_LOG) if low > 0 else level
    edge = curve.rates[max(place for place, loss in enumerate(smoothed) if loss <= level)]
    # The rates are evenly spaced on a logarithmic scale, so differences between steps are slopes.
    slopes = [smoothed[place + 1] - smoothed[place - 1] for place in range(1, lowest)] or [0.0]
    steepest = 1 + min(range(len(slopes)), key=slopes.__getitem__)
    bottom = curve.rates[lowest]
    return Suggestions(edge, edge / 5, bottom, bottom / 10, curve.rates[steepest])


def _windows(source: Source, plan: EpochPlan, steps: int) -> Iterator[list[tuple[Any, int, float, bool]]]:
    """The batches of each step, epoch after epoch, each with what `EpochPlan.parts` says of it."""
    for epoch in itertools.count():
        # Only request batches that are used: workers would read the others in vain.
        count = min(plan.steps, steps)
        batches = source.batches(epoch, 0, min(plan.batches, count * plan.accumulate))
        window = []
        for batch, part in zip(batches, plan.parts(0), strict=False):
            window.append((batch, *part))
            if part[-1]:
                yield window
                window = []
        steps -= count
        if steps == 0:
            return
