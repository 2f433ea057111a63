"""Learning-rate schedules as functions of the step.

A schedule returns a factor for every optimizer step; the loop multiplies each parameter group's `initial_lr` with it. All
but `Plateau` are pure: the factor depends on the step's number alone, so that resuming needs no state and no replay. A
factor is never negative, and never above 1 with the arguments that these classes accept.

All accept `warmup`: below 1 it is a share of all steps, from 1 on a number of steps. The factor rises linearly over the
warm-up, from a first value above 0 to 1 at the first step after it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from runner.base.errors import UserError, nearest


def _same(step: float) -> float:
    return step


@dataclass(frozen=True)
class Clock:
    """Converts steps in a run whose number of steps per epoch may have changed."""

    run: Callable[[float], float] = _same  # step -> step on the scale of `total_steps`
    epochs: Callable[[float], float] = _same  # step -> step on the scale of `steps_per_epoch`


# Of the arguments of all schedules: what holds for a value, and in words.
_LIMITS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "total_steps": (lambda value: value >= 1, "must be at least 1"),
    "warmup": (lambda value: math.isfinite(value) and value >= 0, "must not be negative"),
    "final": (lambda value: 0 <= value <= 1, "must be from 0 to 1"),
    "div": (lambda value: math.isfinite(value) and value >= 1, "must be at least 1"),
    "steps_per_epoch": (lambda value: value >= 1, "must be at least 1"),
    "every": (lambda value: value >= 1, "must be at least 1 epoch"),
    "gamma": (lambda value: 0 < value <= 1, "must be above 0 and at most 1"),
    "decay": (lambda value: 0 <= value <= 1, "must be a share from 0 to 1"),
    "mode": (lambda value: value in ("min", "max"), "must be 'min' or 'max'"),
    "factor": (lambda value: 0 < value < 1, "must be above 0 and below 1"),
    "patience": (lambda value: value >= 0, "must not be negative"),
    "min_factor": (lambda value: 0 <= value <= 1, "must be from 0 to 1"),
    "threshold": (lambda value: math.isfinite(value) and value >= 0, "must not be negative"),
    "clock": (lambda value: isinstance(value, Clock), "comes from the run, and cannot be set"),
}


def _check(arguments: dict[str, Any]) -> None:
    for name, (holds, words) in _LIMITS.items():
        if name in arguments and not holds(arguments[name]):
            raise ValueError(f"{name} {words}, got {arguments[name]!r}")


def _half_cosine(progress: float) -> float:
    """1 at progress 0, 0 at progress 1, half a cosine between."""
    return 0.5 * (1.0 + math.cos(math.pi * progress))


@dataclass(frozen=True)
class Schedule:
    """A pure schedule: linear warm-up (`_rise`), then `shape`.

    Args:
        total_steps: optimizer steps of the whole run.
        warmup: share of the run (below 1) or number of steps (from 1 on) of linear warm-up.
        clock: converts steps if the number of steps per epoch has changed.
    """

    total_steps: int
    warmup: float = 0.0
    clock: Clock = field(default=Clock(), kw_only=True, repr=False)

    def __post_init__(self) -> None:
        _check(vars(self))
        if self.warmup >= 1 and not float(self.warmup).is_integer():
            raise ValueError(f"warmup must be a share below 1 or a whole number of steps, got {self.warmup}")

    @cached_property
    def warmup_steps(self) -> int:
        """Number of warm-up steps."""
        return round(self.warmup * self.total_steps) if self.warmup < 1 else int(self.warmup)

    @cached_property
    def warmup_end(self) -> float:
        """The end of the warm-up, on the scale of `total_steps`."""
        return self.warmup_steps if self.warmup < 1 else self.clock.run(self.warmup_steps)

    def factor(self, step: int) -> float:
        """Multiplier of every group's `initial_lr` for optimizer step `step`, counted from 0 and without end."""
        done = self.clock.run(step) if self.warmup < 1 else step
        return self._rise(done) if done < self.warmup_steps else self.shape(step)

    def _rise(self, done: float) -> float:
        return (done + 1) / (self.warmup_steps + 1)

    def shape(self, step: int) -> float:
        """The factor of step `step` after the warm-up."""
        return 1.0

    def _progress(self, step: int, start: float) -> float:
        """The share of the way from `start`, on the scale of `total_steps`, to the end, from 0 to 1."""
        return min(max((self.clock.run(step) - start) / max(self.total_steps - start, 1), 0.0), 1.0)

    def observe(self, metric: float) -> None:
        """Receive a metric after an evaluation; the factor depends on the step alone."""

    def state_dict(self) -> dict[str, float]:
        """Nothing: resuming needs the step alone."""
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore nothing."""


@dataclass(frozen=True)
class Constant(Schedule):
    """The full learning rate after the warm-up."""


@dataclass(frozen=True)
class Cosine(Schedule):
    """Half a cosine from 1 down to `final` (Loshchilov and Hutter, arXiv:1608.03983, without restarts)."""

    final: float = 0.0

    def shape(self, step: int) -> float:
        """See `Schedule.shape`."""
        return self.final + (1 - self.final) * _half_cosine(self._progress(step, self.warmup_end))


@dataclass(frozen=True)
class OneCycle(Cosine):
    """Half a cosine up from 1/`div` to 1, then half a cosine down to `final` (Smith and Topin, arXiv:1708.07120).

    Only the learning rate is scheduled, not the momentum. The optimizer's `lr` is the peak.
    """

    warmup: float = 0.3
    div: float = 25.0

    def _rise(self, done: float) -> float:
        low = 1 / self.div
        return low + (1 - low) * (1 - _half_cosine(done / self.warmup_steps))


@dataclass(frozen=True)
class Step(Schedule):
    """Multiplied by `gamma` every `every` epochs."""

    steps_per_epoch: int = field(kw_only=True)
    every: int = 10
    gamma: float = 0.1

    def shape(self, step: int) -> float:
        """See `Schedule.shape`."""
        return float(self.gamma ** (self.clock.epochs(step) // (self.every * self.steps_per_epoch)))


@dataclass(frozen=True)
class WSD(Schedule):
    """Warm-up, stable, decay: the full rate until the last share `decay` of the run, then down to `final`.

    After Hu et al. (arXiv:2404.06395); the curve `1-sqrt`, which falls steeply first, follows Hägele et al.
    (arXiv:2405.18392).
    """

    decay: float = 0.2
    curve: Literal["linear", "1-sqrt"] = "linear"
    final: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decay + (self.warmup if self.warmup < 1 else 0) > 1:
            raise ValueError(f"warmup and decay must not overlap: {self.warmup} + {self.decay} is above 1")

    def shape(self, step: int) -> float:
        """See `Schedule.shape`."""
        if self.decay == 0:
            return 1.0
        start = self.total_steps - round(self.decay * self.total_steps)
        # A warm-up counted in steps may reach into the decay of a short run, which then starts at its end.
        progress = self._progress(step, max(start, self.warmup_end))
        fallen = progress if self.curve == "linear" else math.sqrt(progress)
        return self.final + (1 - self.final) * (1 - fallen)


@dataclass(frozen=True)
class Torch(Schedule):
    """A scheduler of `torch.optim.lr_scheduler`, by its name; linear warm-up before.

    It runs on an optimizer of its own, ahead of training, so that the factor is a pure function of the step here, too. Rates
    among its options are meant for `lr`. Momentum is left alone.

    Args:
        total_steps, warmup, clock: see `Schedule`.
        options: arguments of the scheduler; `T_max`, `total_steps` and the `total_iters` of PolynomialLR are those of the run
            if they are missing. `schedulers` is a list of mappings with name and options.
        interval: unit in which the scheduler counts.
        lr: learning rate of the optimizer.
    """

    name: str = "CosineAnnealingLR"
    options: Mapping[str, Any] = field(default_factory=dict)
    interval: Literal["epoch", "step"] = "epoch"
    steps_per_epoch: int = 1
    lr: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            self._rate(1)  # finds mistakes, some of which show at a step
        except (ArithmeticError, TypeError, KeyError) as error:
            raise ValueError(f"torch.{self.name} cannot use {dict(self.options)}: {error}") from error

    def shape(self, step: int) -> float:
        """The factor of step `step` after the warm-up."""
        in_epochs = self.interval == "epoch"
        return self._rate(int(self.clock.epochs(step) // self.steps_per_epoch if in_epochs else self.clock.run(step)))

    def _rate(self, count: int) -> float:
        optimizer, scheduler, rates = self._stepped
        while len(rates) <= count:
            try:
                scheduler.step()
            except ValueError:  # OneCycleLR is over
                return rates[-1]
            rates.append(optimizer.param_groups[0]["lr"] / self.lr)
        return rates[count]

    @cached_property
    def _stepped(self) -> tuple[Any, Any, list[float]]:
        from torch import optim, zeros

        optimizer = optim.SGD([zeros(1, requires_grad=True)], lr=self.lr)
        scheduler = self._made(optimizer, self.name, self.options)
        optimizer.step()  # torch warns if a scheduler is the first one to step
        return optimizer, scheduler, [optimizer.param_groups[0]["lr"] / self.lr]

    def _made(self, optimizer: Any, name: str, options: Mapping[str, Any]) -> Any:
        from torch.optim import lr_scheduler

        # Names come from the installed torch, so that new schedules work without a change here
        kinds = {each.__name__: each for each in lr_scheduler.LRScheduler.__subclasses__()}
        kinds = {word: kind for word, kind in kinds.items() if word in lr_scheduler.__all__}
        kinds.pop("ReduceLROnPlateau")
        if name == "ReduceLROnPlateau":
            raise UserError("scheduler.name", "ReduceLROnPlateau follows a metric", "scheduler=plateau")
        if name not in kinds:
            raise UserError("scheduler.name", f"torch has no '{name}'", ", ".join(kinds), nearest(name, kinds))
        takes, given = inspect.signature(kinds[name]).parameters, dict(options)
        # Momentum would change without the optimizer's settings showing it
        if given.setdefault("cycle_momentum", False):
            raise ValueError("options cannot have cycle_momentum, as momentum is not scheduled")
        # Most of torch's schedules ask for their length, which is known here
        length = self.total_steps if self.interval == "step" else math.ceil(self.total_steps / self.steps_per_epoch)
        given = {"T_max": length} | ({} if "epochs" in given else {"total_steps": length}) | given
        if name == "PolynomialLR":  # of the warm-ups, total_iters is not the length of the run
            given = {"total_iters": length} | given
        given = {word: value for word, value in given.items() if word in takes or word in options}
        # Some schedules are made of others
        if "schedulers" in given:
            given["schedulers"] = [self._made(optimizer, **each) for each in given["schedulers"]]
        return kinds[name](optimizer, **given)


class Plateau:
    """Multiplied by `factor` when the observed metric has stopped improving; linear warm-up before.

    Counts as `torch.optim.lr_scheduler.ReduceLROnPlateau` with an absolute threshold does: after `patience` evaluations in a
    row without improvement, the next one without improvement drops the rate and restarts the count. A metric that is not
    finite counts as no improvement.

    Args:
        total_steps, warmup, clock: see `Schedule`.
        factor: multiplier of each drop, above 0 and below 1.
        patience: number of evaluations without improvement that are tolerated.
        min_factor: lower bound of the factor.
        threshold: smallest change of the metric that counts as improvement, in the metric's unit.
    """

    def __init__(
        self,
        total_steps: int,
        mode: Literal["min", "max"] | None = None,
        factor: float = 0.1,
        *,
        patience: int = 5,
        min_factor: float = 0.001,
        threshold: float = 1e-4,
        warmup: float = 0.0,
        clock: Clock | None = None,
    ) -> None:
        # Its own steps follow the metric, and only the warmup follows the clock
        self._warming = Schedule(total_steps, warmup, clock=clock or Clock())
        _check({"mode": mode, "factor": factor, "patience": patience, "min_factor": min_factor, "threshold": threshold})
        self._sign = 1.0 if mode == "max" else -1.0
        self._drop, self._patience, self._min_factor, self._threshold = factor, patience, min_factor, threshold
        self._current, self._waited = 1.0, 0
        self._best = -math.inf  # of the metric times the sign, so that larger is better

    def factor(self, step: int) -> float:
        """Multiplier of every group's `initial_lr` for optimizer step `step`, counted from 0 and without end."""
        return self._warming.factor(step) * self._current

    def observe(self, metric: float) -> None:
        """Receive the metric after an evaluation."""
        score = self._sign * metric
        if math.isfinite(score) and (self._best == -math.inf or score > self._best + self._threshold):
            self._best = score
            self._waited = 0
            return
        self._waited += 1
        if self._waited > self._patience:
            self._current = max(self._current * self._drop, self._min_factor)
            self._waited = 0

    def state_dict(self) -> dict[str, float]:
        """Current factor, best metric so far (-inf or inf before the first) and evaluations waited since."""
        return {"factor": self._current, "best": self._sign * self._best, "waited": self._waited}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore a saved state; one of another schedule changes nothing."""
        if state.keys() == self.state_dict().keys():
            self._current, self._waited = float(state["factor"]), int(state["waited"])
            self._best = self._sign * float(state["best"])


class Annealed:
    """Another schedule up to a step, then half a cosine to a constant factor, as SWA uses (Izmailov et al., arXiv:1803.05407).

    Args:
        schedule: the schedule before that step, which has the state and observes the metric.
        start, steps: the step, from 0, at which the cosine begins, and how many steps it takes.
        final: the constant factor.
        epochs: step -> step on the scale of `steps`, if the number of steps per epoch has changed.
    """

    def __init__(
        self, schedule: Any, start: int, steps: int, final: float, epochs: Callable[[float], float] = _same
    ) -> None:
        self._schedule, self._start, self._steps, self._final, self._epochs = schedule, start, steps, final, epochs
        self.observe, self.state_dict = schedule.observe, schedule.state_dict
        self.load_state_dict = schedule.load_state_dict

    def factor(self, step: int) -> float:
        """Multiplier of every group's `initial_lr` for optimizer step `step`, counted from 0 and without end."""
        if step < self._start:
            return float(self._schedule.factor(step))
        passed = self._epochs(step) - self._epochs(self._start)
        left = _half_cosine(min((passed + 1) / self._steps, 1.0))
        return self._final + (float(self._schedule.factor(self._start)) - self._final) * left
