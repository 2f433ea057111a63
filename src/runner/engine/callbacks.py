"""Callbacks, which act around the steps.

A callback is any object with some of the methods of `METHODS`. They are called in the order of the list of callbacks. If a
callback has `state_dict()` and `load_state_dict(state)`, its state is part of the checkpoint.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from runner.engine.errors import Diverged

if TYPE_CHECKING:
    from runner.engine.loop import Loop

METHODS = {
    "on_start": ("loop",),  # before the first step
    "on_first_batch": ("loop", "batch"),  # before the first batch of this process is trained on
    "on_step": ("loop",),  # after an optimizer step
    "on_log": ("loop", "metrics"),  # when training is logged; may add to `metrics`, a dict of floats
    "on_evaluation": ("loop", "metrics"),  # after the validation split was evaluated: {"val/accuracy": 0.9, ...}
    # A step was skipped because its gradients are not finite; `diagnosis` says why, or is None
    "on_step_skipped": ("loop", "step", "diagnosis"),
    "on_boundary": ("loop",),  # after everything that was due at this step: the state may be saved here
    "on_end": ("loop",),  # after the last step, also if training was stopped early
}
"""The methods of a callback, each with the names of its arguments."""

_PAUSE_FACTOR = 50  # the pause between saves, as a multiple of the time that the last one took
_FIRST_S = 2.0  # seconds of training without a checkpoint that a kill may cost
_SPIKE, _SPIKE_WINDOW = 3.0, 10  # multiple of the median of that many logged losses
LINES = 50  # of training, in a run of few epochs


class EarlyStopping:
    """End training when a metric has stopped improving.

    Args:
        monitor: metric to watch, such as `val/loss`.
        mode: whether smaller (`min`) or larger (`max`) is better.
        patience: evaluations without improvement to wait for.
        min_delta: smallest change that counts as an improvement.
    """

    def __init__(self, monitor: str, mode: Literal["min", "max"], patience: int = 5, min_delta: float = 0.0) -> None:
        if patience < 1:
            raise ValueError(f"patience must be at least 1, got {patience}")
        if min_delta < 0:
            raise ValueError(f"min_delta must be at least 0, got {min_delta}")
        self.monitor, self.mode, self.patience, self.min_delta = monitor, mode, patience, min_delta
        self._best: float | None = None
        self._waited = 0

    def on_start(self, loop: Loop) -> None:
        """Stop again if the resumed run had been stopped, but was interrupted before its last save."""
        self._stop_if_due(loop)

    def on_evaluation(self, loop: Loop, metrics: dict[str, float]) -> None:
        """Count evaluations without improvement, including those that are not finite."""
        value = metrics[self.monitor]
        sign = 1.0 if self.mode == "max" else -1.0
        if math.isfinite(value) and (self._best is None or sign * (value - self._best) > self.min_delta):
            self._best, self._waited = value, 0
            return
        self._waited += 1
        self._stop_if_due(loop)

    def _stop_if_due(self, loop: Loop) -> None:
        if self._waited < self.patience:
            return
        why = "was not finite in any of" if self._best is None else f"has not improved on {self._best} for"
        loop.request_stop(f"{self.monitor} {why} {self._waited} evaluations")

    def state_dict(self) -> dict[str, Any]:
        """Best value, evaluations waited, metric and mode."""
        return {"best": self._best, "waited": self._waited, "monitor": self.monitor, "mode": self.mode}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state; start again if it belongs to another metric or mode."""
        if (state.get("monitor", self.monitor), state.get("mode", self.mode)) == (self.monitor, self.mode):
            self._best, self._waited = state["best"], state["waited"]


class LearningRateMonitor:
    """Adds the learning rate of each parameter group to the logged training metrics."""

    def on_log(self, loop: Loop, metrics: dict[str, float]) -> None:
        """Learning rates of the latest step: `lr`, or `lr_0`, `lr_1`, ... for several groups, or `lr_NAME` of optimizers."""
        groups = loop.state.optimizer.param_groups
        owners = [group.get("optimizer") for group in groups]
        names = [
            f"lr_{place}" if owner is None else f"lr_{owner}" if owners.count(owner) == 1 else f"lr_{owner}_{place}"
            for place, owner in enumerate(owners)
        ]
        names = ["lr"] if len(groups) == 1 else names
        metrics |= {name: float(group["lr"]) for name, group in zip(names, groups, strict=True)}


class Progress:
    """Reports the position after every step: `advance(global_step, epoch)`, the epoch counted from 1, must be fast."""

    def __init__(self, advance: Callable[[int, int], None]) -> None:
        self._advance = advance

    def on_step(self, loop: Loop) -> None:
        """Report the position."""
        position = loop.state.position
        self._advance(position.global_step, position.epoch + (position.batch > 0))


class Log:
    """Reads the training loss from the device every few steps and passes it on, and evaluations too.

    Training metrics include `samples_per_s`, and `data_wait`, the share of that time that the loop waited for batches.

    Args:
        every_steps: optimizer steps between readings; in between nothing waits for the device. `auto` reads after each fiftieth of
            the run, counted from the start of the epoch, and at the end of each epoch, where an evaluation waits anyway.
        sinks: called with (split, metrics, global_step, epoch), the epoch counted from 1.
        hardware_metrics: further training metrics, given the samples per second; must not wait for the device.
        warn: called with a sentence when the loss jumps, and the first time that it is 0 or the monitored metric nan.
    """

    def __init__(
        self,
        every_steps: int | Literal["auto"],
        sinks: Sequence[Callable[[str, dict[str, float], int, int], None]],
        hardware_metrics: Callable[[float], dict[str, float]] = lambda rate: {},
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.every_steps, self.sinks, self.hardware_metrics = every_steps, sinks, hardware_metrics
        self._warn = functools.cache(warn)  # nothing is said twice
        self._losses: deque[float] = deque(maxlen=_SPIKE_WINDOW)
        self._began = (time.perf_counter(), 0, 0.0, 0.0)

    def on_start(self, loop: Loop) -> None:
        """Start the clock."""
        self._began = _clock(loop)

    def on_step(self, loop: Loop) -> None:
        """Log every few steps, and after the last step."""
        step = done = loop.state.position.global_step
        every = max(1, loop.total_steps // LINES) if self.every_steps == "auto" else self.every_steps
        if self.every_steps == "auto":  # the end of an epoch counts as 0 steps of the next one
            done = math.ceil(loop.state.position.batch / loop.plan.accumulate)
        if done % every and not loop.finished:
            return
        # Reading the loss waits for the device anyway, so it is the time to ask the guard
        loop.check_nonfinite()
        loss = loop.state.meter.read()
        if not math.isfinite(loss):
            raise Diverged(f"the training loss is {loss} at step {step}")
        self._warn_of_loss(loss, step)
        # Speed is of training alone: pauses such as compilation and evaluations are subtracted
        now = _clock(loop)
        passed, samples, waited, paused = (after - before for after, before in zip(now, self._began, strict=True))
        self._began, seconds = now, max(passed - paused, 1e-9)
        rate = samples / seconds
        # A large share of waiting means that data and not the device limit the speed
        speed = {"samples_per_s": rate, "data_wait": waited / seconds}
        terms = {name: mean.read(empty=None) for name, mean in loop.state.same_terms().items()}
        metrics = {"loss": loss} | {name: value for name, value in terms.items() if value is not None}
        loop.collect("on_log", metrics)
        self._send(loop, "train", metrics | speed | self.hardware_metrics(rate))
        for mean in (loop.state.meter, *loop.state.terms.values()):
            mean.reset()

    def on_evaluation(self, loop: Loop, metrics: dict[str, float]) -> None:
        """Log an evaluation of the validation split, whose time is not training time."""
        if (name := loop.monitor[0]) and math.isnan(metrics[name]):
            self._warn(f"{name} is nan: it cannot be computed, as where the validation split has no object")
        self._send(loop, "val", {name.removeprefix("val/"): value for name, value in metrics.items()})
        self._began = _clock(loop)

    def _warn_of_loss(self, loss: float, step: int) -> None:
        if loss == 0:
            self._warn("the training loss is exactly 0: no target counts, or nothing is left to learn")
        usual = statistics.median(self._losses) if len(self._losses) == _SPIKE_WINDOW else 0.0
        if loss > _SPIKE * usual > 0:
            self._warn(f"the training loss jumped to {loss:.4g} at step {step}, from a median of {usual:.4g} before")
        self._losses.append(loss)

    def _send(self, loop: Loop, split: str, metrics: dict[str, float]) -> None:
        position = loop.state.position
        for sink in self.sinks:
            sink(split, metrics, position.global_step, position.epoch + (position.batch > 0))


def _clock(loop: Loop) -> tuple[float, int, float, float]:
    """The time in seconds, samples seen, and seconds waited for batches and not spent on training."""
    return time.perf_counter(), loop.samples_seen, loop.waited_s, loop.paused_s


class Checkpointing:
    """Saves at boundaries: every few steps or epochs, after the best evaluation, and whenever training stops.

    Saves that are due to an epoch or an evaluation are delayed until `min_seconds` have passed since the last one, and 50
    times the time that it took, so that saving takes at most 2% of the time. If the best state is delayed, it is copied, so
    that it can be written later. The first save comes at the first step after 2 seconds. No bit of the run depends on this.

    Args:
        every_steps: optimizer steps between saves, which are never delayed; None for no such saves.
        every_epochs: epochs between saves; None for no such saves.
        save: called with the loop, whether the state is the best so far, and the copy of a delayed best state.
        copy: called with the loop; returns a copy of the state that later steps do not change.
        min_seconds: shortest time between saves that may be delayed; 0 never delays, and makes no early save.
        check: called at every boundary; raises the error of a save in the background.
        clock: gives the time in seconds; that of rank 0, where several ranks have to agree. None for that of this process.
    """

    def __init__(
        self,
        every_steps: int | None,
        every_epochs: int | None,
        save: Callable[[Loop, bool, Any], None],
        copy: Callable[[Loop], Any] = lambda loop: None,
        *,
        min_seconds: float = 0.0,
        check: Callable[[], None] = lambda: None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.every_steps, self.every_epochs, self.min_seconds = every_steps, every_epochs, min_seconds
        self._save, self._copy, self._check = save, copy, check
        self._clock = clock or (lambda: time.monotonic())
        self._best: Any = None
        self._delayed = False
        self._pause = min_seconds
        # The first save comes early, as a kill before it loses everything
        self._first = min(_FIRST_S, min_seconds) if every_steps or every_epochs else 0.0  # 0 once there was a save
        self._since = self._clock()

    def on_start(self, loop: Loop) -> None:
        """Start the clock."""
        self._since = self._clock()

    def on_boundary(self, loop: Loop) -> None:
        """Save if it is time."""
        # Background writing may have failed, and is reported at the next boundary
        self._check()
        position, steps, epochs = loop.state.position, self.every_steps, self.every_epochs
        # These cannot wait: the end, a signal, and a step that the user named
        if loop.finished or bool(loop.stopping) or (steps is not None and position.global_step % steps == 0):
            self._write(loop)
            return
        # Others may wait until min_seconds have passed, so that fast epochs do not spend their time on writing
        if loop.improved or (epochs is not None and loop.epoch_ended and position.epoch % epochs == 0):
            self._delayed = True
        if not (self._delayed or self._first):
            return
        if self._clock() - self._since >= (self._first or self._pause):
            self._write(loop)
        # The best state is copied in memory, as the weights change before it is written
        elif loop.improved:
            self._best = self._copy(loop)

    def leave(self) -> Any:
        """Hand over the copy of the best state that is not yet written, or None."""
        best, self._best = self._best, None
        return best

    def _write(self, loop: Loop) -> None:
        best, self._best, self._delayed = self._best, None, False
        began = self._clock()
        self._save(loop, loop.improved, None if loop.improved else best)
        self._first = 0.0
        self._since = self._clock()
        self._pause = max(self.min_seconds, _PAUSE_FACTOR * (self._since - began)) if self.min_seconds else 0.0
