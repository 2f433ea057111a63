"""What happens around the steps.

A callback is any object with some of these methods; those that it lacks cost nothing. They are called in the order of the
list of callbacks:

    on_start(loop)                  before the first step
    on_step(loop)                   after an optimizer step
    on_log(loop, metrics)           when training is logged; may add to `metrics`, a dict of floats
    on_evaluation(loop, metrics)    after the validation split was evaluated; metrics as {"val/accuracy": 0.9, ...}
    on_step_skipped(loop, step, diagnosis)   a step's gradients were not finite, so it was left out; why, or None
    on_rollback(loop, found)        the state is that of an earlier step again; `found.step` will be left out
    on_boundary(loop)               after everything that was due at this step: the state may be saved here
    on_end(loop)                    after the last step, also when training was stopped early

`state_dict()` and `load_state_dict(state)`, if it has them, make what it remembers part of the checkpoint.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from runner.engine.errors import Diverged, NotFinite

if TYPE_CHECKING:
    from runner.engine.loop import Loop

_SAVES_APART = 50  # times as long as the last one took
_SPIKE, _SPIKE_WINDOW = 3.0, 10  # times the median of as many lines of training


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
        """Ask for the end again, in a run that was stopped between that and its last save."""
        if self._waited >= self.patience:
            loop.request_stop(self._reason())

    def on_evaluation(self, loop: Loop, metrics: dict[str, float]) -> None:
        """Count evaluations without improvement, which one that is not finite is; ask for the end after `patience` of them."""
        value = metrics[self.monitor]
        sign = 1.0 if self.mode == "max" else -1.0
        if math.isfinite(value) and (self._best is None or sign * (value - self._best) > self.min_delta):
            self._best, self._waited = value, 0
            return
        self._waited += 1
        if self._waited >= self.patience:
            loop.request_stop(self._reason())

    def _reason(self) -> str:
        if self._best is None:
            return f"{self.monitor} was not finite in any of {self._waited} evaluations"
        return f"{self.monitor} has not improved on {self._best} for {self._waited} evaluations"

    def state_dict(self) -> dict[str, Any]:
        """Best value, evaluations waited, and what the value is of."""
        return {"best": self._best, "waited": self._waited, "monitor": self.monitor, "mode": self.mode}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state; anew, if it is of another metric or direction."""
        if (state.get("monitor", self.monitor), state.get("mode", self.mode)) == (self.monitor, self.mode):
            self._best, self._waited = state["best"], state["waited"]


class LearningRateMonitor:
    """Adds the learning rate of each parameter group to what is logged of training."""

    def on_log(self, loop: Loop, metrics: dict[str, float]) -> None:
        """Learning rates of the step that was just taken: `lr`, or `lr_0`, `lr_1`, ... for several groups."""
        rates = [float(group["lr"]) for group in loop.state.optimizer.param_groups]
        metrics |= {"lr": rates[0]} if len(rates) == 1 else {f"lr_{index}": rate for index, rate in enumerate(rates)}


class Progress:
    """Tells where training stands after every step.

    Args:
        advance: called with (global_step, epoch), the epoch counted from 1; must be quick.
    """

    def __init__(self, advance: Callable[[int, int], None]) -> None:
        self._advance = advance

    def on_step(self, loop: Loop) -> None:
        """Tell."""
        position = loop.state.position
        self._advance(position.global_step, position.epoch + (position.batch > 0))


class Log:
    """Reads the training loss from the device every few steps and hands it on, evaluations too.

    Lines of training also say `samples_per_s`, and in `data_wait` which share of that time the loop waited for batches.

    Args:
        every_steps: optimizer steps between readings; in between nothing waits for the device.
        sinks: called with (split, metrics, global_step, epoch), the epoch counted from 1.
        hardware_metrics: further figures of a training line, given its samples a second; must not wait for the device.
        warn: told in a sentence when the loss jumps.
    """

    def __init__(
        self,
        every_steps: int,
        sinks: Sequence[Callable[[str, dict[str, float], int, int], None]],
        hardware_metrics: Callable[[float], dict[str, float]] = lambda rate: {},
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._warn = warn
        self._losses: deque[float] = deque(maxlen=_SPIKE_WINDOW)
        self.every_steps = every_steps
        self.sinks = list(sinks)
        self.hardware_metrics = hardware_metrics
        self._since = time.perf_counter()
        self._samples = 0
        self._waited_s = self._paused_s = 0.0

    def on_start(self, loop: Loop) -> None:
        """Start the clock."""
        self._begin(loop, time.perf_counter())

    def on_step(self, loop: Loop) -> None:
        """Log if it is time, or if training ends here."""
        step = loop.state.position.global_step
        if step % self.every_steps and not loop.finished:
            return
        loop.check_nonfinite()
        loss = loop.state.meter.read()
        if not math.isfinite(loss):
            raise Diverged(f"the training loss is {loss} at step {step}")
        self._watch(loss, step)
        now = time.perf_counter()
        seconds = max(now - self._since - (loop.paused_s - self._paused_s), 1e-9)
        rate = (loop.samples_seen - self._samples) / seconds
        speed = {"samples_per_s": rate, "data_wait": (loop.waited_s - self._waited_s) / seconds}
        self._begin(loop, now)
        metrics = {"loss": loss}
        loop.collect("on_log", metrics)
        self._send(loop, "train", metrics | speed | self.hardware_metrics(rate))
        loop.state.meter.reset()

    def on_evaluation(self, loop: Loop, metrics: dict[str, float]) -> None:
        """Log an evaluation of the validation split."""
        self._send(loop, "val", {name.removeprefix("val/"): value for name, value in metrics.items()})
        # The time that an evaluation takes is not training time.
        self._begin(loop, time.perf_counter())

    def _watch(self, loss: float, step: int) -> None:
        """Warn of a loss far above those of the lines before."""
        if len(self._losses) == _SPIKE_WINDOW:
            usual = statistics.median(self._losses)
            if loss > _SPIKE * usual > 0:
                self._warn(
                    f"the training loss jumped to {loss:.4g} at step {step}, from a median of {usual:.4g} before"
                )
        self._losses.append(loss)

    def on_rollback(self, loop: Loop, found: NotFinite) -> None:
        """Start the clock anew."""
        self._begin(loop, time.perf_counter())

    def _begin(self, loop: Loop, now: float) -> None:
        self._since, self._samples = now, loop.samples_seen
        self._waited_s, self._paused_s = loop.waited_s, loop.paused_s

    def _send(self, loop: Loop, split: str, metrics: dict[str, float]) -> None:
        position = loop.state.position
        epoch = position.epoch + (position.batch > 0)
        for sink in self.sinks:
            sink(split, metrics, position.global_step, epoch)


class Checkpointing:
    """Saves at boundaries: every few steps or epochs, after the best evaluation, and whenever training stops.

    Saves that epochs or evaluations ask for in quick succession are put off until `min_seconds` have passed since the last
    one, and 50 times as long as that one took, so that saving takes 2% of the time at most. A best state that is put off is
    copied, so that it can be written later. What is put off changes no bit of the run.

    Args:
        every_steps: optimizer steps between saves, which are never put off; None for no such saves.
        every_epochs: epochs between saves; None for no such saves.
        save: called with the loop, whether the state is the best so far, and a copy of the best state if that was put off.
        copy: called with the loop; gives a copy of the state that later steps leave alone.
        min_seconds: time between saves that may be put off; 0 for none that is.
        check: called at every boundary; raises what went wrong with a save that goes on in the background.
    """

    def __init__(
        self,
        every_steps: int | None,
        every_epochs: int | None,
        save: Callable[[Loop, bool, Any], None],
        copy: Callable[[Loop], Any] = lambda loop: None,
        min_seconds: float = 0.0,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._check = check
        self.every_steps, self.every_epochs, self.min_seconds = every_steps, every_epochs, min_seconds
        self._save, self._copy = save, copy
        self._best: Any = None
        self._put_off = False
        self._pause = min_seconds
        self._since = time.monotonic()

    def on_start(self, loop: Loop) -> None:
        """Start the clock."""
        self._since = time.monotonic()

    def on_boundary(self, loop: Loop) -> None:
        """Save if it is time."""
        self._check()
        position = loop.state.position
        if (
            loop.finished
            or bool(loop.stopping)
            or (self.every_steps is not None and position.global_step % self.every_steps == 0)
        ):
            self._write(loop)
            return
        if loop.improved or (
            self.every_epochs is not None and loop.epoch_ended and position.epoch % self.every_epochs == 0
        ):
            self._put_off = True
        if not self._put_off:
            return
        if time.monotonic() - self._since >= self._pause:
            self._write(loop)
        elif loop.improved:
            self._best = self._copy(loop)

    def on_rollback(self, loop: Loop, found: NotFinite) -> None:
        """Forget what was put off: it belongs to steps that are taken anew."""
        self._best, self._put_off = None, False

    def leave(self) -> Any:
        """Hand over the copy of the best state that is still to be written, or None."""
        best, self._best = self._best, None
        return best

    def _write(self, loop: Loop) -> None:
        best, self._best, self._put_off = self._best, None, False
        began = time.monotonic()
        self._save(loop, loop.improved, None if loop.improved else best)
        self._since = time.monotonic()
        self._pause = max(self.min_seconds, _SAVES_APART * (self._since - began)) if self.min_seconds else 0.0
