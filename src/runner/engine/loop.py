"""The training loop.

    on_start
    until finished:
        for each remaining batch of the epoch:
            step                           # forward, loss, backward
            at the end of an accumulation window:
                                           # optimizer step
                on_step                    # then the next learning rate
                evaluate, on_evaluation    # if due
                on_boundary                # save checkpoints; then obey signals and limits
    on_end

Training only stops at a boundary, where position and state describe the run completely. Steps that were skipped on the
device are found when numbers are next read from it: on_step_skipped.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any

from runner.distributed.world import world
from runner.engine.diagnosis import diagnose
from runner.engine.errors import BadMetric, Diverged, Interrupted, Preempted
from runner.engine.plan import Best, EpochPlan, Limits
from runner.engine.protocols import Source
from runner.engine.step import Step
from runner.engine.weight_average import loss_for
from runner.instrument.no_trace import preserved_rng

_STEPS_BETWEEN_COLLECTIONS = 500
_MOST_DIAGNOSES = 3  # under the policy skip
_RESERVED = ("global_step", "epoch", "split")  # the other columns of a log


class Loop:
    """Trains until a limit, a callback or a signal ends it.

    Args:
        step: trains on a batch, and has the state, which is what training changes.
        source: the training split.
        plan: how its epochs divide into steps.
        limits: when to stop and when to evaluate.
        evaluate: evaluates the validation split, and raises `Interrupted` if `interrupted` says so; None without one.
        callbacks: objects with some of the methods of `runner.engine.callbacks.METHODS`.
        monitor: metric and mode (`min` or `max`) that decide which evaluation is best; an empty name for none.
        directory: where callbacks may write: the run directory, or a temporary folder on other ranks than the first.
        interrupted: returns the name of the signal that asks the run to stop, or an empty string.
    """

    def __init__(
        self,
        step: Step,
        source: Source,
        plan: EpochPlan,
        *,
        limits: Limits,
        evaluate: Callable[[], dict[str, float]] | None,
        callbacks: Sequence[Any],
        monitor: tuple[str, str],
        directory: Path,
        interrupted: Callable[[], str] = lambda: "",
    ) -> None:
        self.step, self.state, self.source, self.plan, self.limits = step, step.state, source, plan, limits
        self.callbacks, self.monitor, self.interrupted = list(callbacks), monitor, interrupted
        self.directory = directory
        self._evaluate, self._evaluated_at = evaluate, -1  # the step of the latest evaluation in this process
        self._diagnosed = 0  # steps that were skipped and had a diagnosis
        self._restart_batches = False  # whether the source was asked for other batches meanwhile
        self._on_step, self._on_boundary = self._methods("on_step"), self._methods("on_boundary")
        self.improved = False  # whether the latest evaluation at this boundary is the best so far
        self.epoch_ended = False  # whether this boundary is the end of an epoch
        self.stop_reason = ""
        self.pruned = False  # whether it is the reason of a search
        self.stopping = ""  # the signal that ends the run at this boundary
        # Since this process started:
        self.samples_seen = 0
        self.waited_s = 0.0  # for batches
        self.paused_s = 0.0  # not spent on training, such as compilation; callbacks add to it

    def run(self) -> None:
        """Train from the current position to the end.

        Raises:
            Preempted: after a signal, once the callbacks have seen the boundary.
            Diverged: if loss or gradients are not finite, and the policy does not continue.
        """
        # For the next step, wherever the state comes from
        self.state.train()
        self.state.set_learning_rate()
        if self.step.guard is not None:
            self.step.guard.start()
        self.emit("on_start")
        with collecting_between_steps():
            # An evaluation may be left over from the process before, which was stopped while it was due
            while self.state.position.evaluation_due or not self.finished:
                try:
                    if self.state.position.evaluation_due:
                        self._boundary()
                    else:
                        self._epoch()
                # Data and models of the user fail here, so the message says how far training was
                except Exception as error:
                    position = self.state.position
                    error.add_note(f"in epoch {position.epoch + 1}, after {position.global_step} optimizer steps")
                    raise
        self.emit("on_end")

    def _epoch(self) -> None:
        """Train from the position to the end of the epoch or of training."""
        state, plan, step = self.state, self.plan, self.step
        position, interval = state.position, self.limits.evaluate_every_steps
        self._restart_batches = False
        # The position says which batches are next, so a resumed run does not replay the epoch
        batches = self.source.batches(position.epoch, position.batch, plan.batches)
        for size, share, update in plan.parts(position.batch):
            began = perf_counter()
            try:
                batch = next(batches)
            except Exception as error:
                # Unreadable data do not spoil the state: save it, so that the fixed run resumes from here
                self._save_after(error)
                raise
            self.waited_s += perf_counter() - began
            if not self.samples_seen:
                self.emit("on_first_batch", batch)
            step(batch, share, size, update=update)
            self.samples_seen += size
            # The position moves once the batch is part of the state; a checkpoint before would repeat it
            position.batch += 1
            # Everything below happens once a step, at the only point where a checkpoint is possible
            if not update:
                continue
            position.global_step = done = position.global_step + 1
            self.epoch_ended = position.batch == plan.batches
            if self.epoch_ended:
                position.epoch, position.batch = position.epoch + 1, 0
            # Collections happen between steps and only of young objects, because a full one takes long
            if done % _STEPS_BETWEEN_COLLECTIONS == 0:
                gc.collect(1)
            # Frozen parts whose time has come are trained in the next step
            if state.freezing.parts:
                state.freezing.follow(position, self.finished)
            for method in self._on_step:
                method(self)
            # The rate of the next step is part of the state that is saved
            state.set_learning_rate()
            # Decide now and store it: if the process ends before the evaluation, the resumed one makes it up
            if self.epoch_ended or self.finished or (interval is not None and done % interval == 0):
                position.evaluation_due = self._evaluation_due()
            self._boundary()
            if self.finished or self.epoch_ended or self._restart_batches:
                return

    def _boundary(self) -> None:
        """Evaluate if it is due, let callbacks save, and obey signals."""
        self.improved = False
        self._evaluate_if_due()
        for method in self._on_boundary:
            method(self)
            late = self.stop_reason and not self.stopping and self._evaluated_at != self.state.position.global_step
            if late and self._evaluation_due():
                # A callback requested the end after the decision whether to evaluate; others have yet to save.
                self.state.position.evaluation_due = True
                self._evaluate_if_due()
        # Only now, when callbacks have saved the step
        if self.stopping:
            raise Preempted(self.stopping)

    def _evaluate_if_due(self) -> None:
        """Evaluate if it is due, and ask for signals."""
        position = self.state.position
        if position.evaluation_due and not self.interrupted():
            # Weights that are not finite are reported as such, not as a bad evaluation
            self.check_nonfinite()
            try:
                self._run_evaluation()
                position.evaluation_due = False
            except Interrupted:
                pass  # the evaluation stays due, and follows after resuming
            except Exception as error:
                self._save_after(error)
                raise
        # Asked once, so that callbacks and loop agree whenever the signal comes.
        self.stopping = self.interrupted()

    def _evaluation_due(self) -> bool:
        """True if to evaluate at the end of this epoch, interval or run."""
        position, limits = self.state.position, self.limits
        epochs, steps = limits.evaluate_every_epochs, limits.evaluate_every_steps
        if self._evaluate is None or (epochs is None and steps is None):
            return False
        by_epochs = epochs is not None and self.epoch_ended and position.epoch % epochs == 0
        return by_epochs or (steps is not None and position.global_step % steps == 0) or self.finished

    def _run_evaluation(self) -> None:
        assert self._evaluate is not None, "an evaluation is due without a validation split"
        state, (name, mode) = self.state, self.monitor
        metrics = self._evaluate()
        state.last_metrics, self._evaluated_at = metrics, state.position.global_step
        value = metrics[name] if name else math.nan  # a task without a monitor has no best evaluation
        loss_name = loss_for(name)  # missing if a user-defined metric happens to be called ema_...
        loss = metrics.get(loss_name, metrics.get("val/loss", 0.0))
        # A value that is not finite is never the best; the loss decides between equal values
        if math.isfinite(value) and (state.best is None or state.best.beaten_by(value, loss)):
            state.best = Best(
                name, mode, value, loss=loss, global_step=state.position.global_step, epoch=state.position.epoch
            )
            self.improved = True
        # Plateau schedules change the rate by the metric, so the rate is set again
        state.schedule.observe(value)
        state.set_learning_rate()
        self.collect("on_evaluation", metrics)

    def _save_after(self, error: Exception) -> None:
        """Let callbacks save what was trained before data could not be read, except within an accumulation window.

        With several ranks nothing is saved: the others, which read other samples, would have to take part.
        """
        position = self.state.position
        # Ranks cannot save alone, and inside an accumulation window no state is complete
        if world().size > 1 or not position.global_step or position.batch % self.plan.accumulate:
            return
        self.stopping = type(error).__name__
        with contextlib.suppress(Exception):  # the first error is the one to report
            for method in self._on_boundary:
                method(self)

    # The end

    @cached_property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run, decided where training starts."""
        return self.limits.total_steps(self.plan, self.state.position)

    @property
    def finished(self) -> bool:
        """True if the limits are reached or a callback requested the end."""
        return bool(self.stop_reason) or self.state.position.global_step >= self.total_steps

    def request_stop(self, reason: str) -> None:
        """End training at the next boundary, after a last evaluation; `reason` is a clause for people."""
        self.stop_reason = self.stop_reason or reason

    def prune(self, reason: str) -> None:
        """End training at this boundary, where the run has turned out not to be worth more steps; it is not tested."""
        self.pruned = self.pruned or not self.stop_reason
        self.request_stop(reason)

    # Callbacks

    def _methods(self, name: str) -> list[Callable[..., None]]:
        return [getattr(callback, name) for callback in self.callbacks if hasattr(callback, name)]

    def emit(self, name: str, *args: Any) -> None:
        """Call a method of every callback that has it, in the order of the list."""
        for method in self._methods(name):
            method(self, *args)

    def collect(self, name: str, metrics: dict[str, float]) -> None:
        """Call a method of every callback that receives metrics and may add to them; `BadMetric` if they cannot be logged."""
        for method in self._methods(name):
            method(self, metrics)
            _check_metrics(f"callback {type(getattr(method, '__self__', method)).__name__}, {name}", metrics)

    # Steps that are not finite

    def check_nonfinite(self) -> None:
        """Find out whether steps since the last call were skipped because they are not finite; waits for the device.

        Called before numbers are read, the state is saved, or the validation split is evaluated. If a step was skipped, the
        policy decides: `raise` raises `Diverged`, and `skip` goes on.
        """
        guard = self.step.guard
        if guard is None or guard.steps == 0:
            return
        # The guard counts steps since it was asked; add them to the step at which that was
        before = self.state.position.global_step - guard.steps
        for index in guard.found():
            step = before + index + 1
            # A diagnosis computes the step again, so only the first few skipped steps get one
            if guard.policy == "skip" and self._diagnosed >= _MOST_DIAGNOSES:
                self.emit("on_step_skipped", step, None)
                continue
            with preserved_rng():  # making batches may draw random numbers
                epoch, batches = self._batches_of(step)
            diagnosis = diagnose(self.step, batches, step, epoch + 1)
            self._diagnosed += 1
            self.emit("on_step_skipped", step, diagnosis)
            if guard.policy == "raise":
                raise Diverged(str(diagnosis))

    def _batches_of(self, step: int) -> tuple[int, list[Any]]:
        """The epoch and the batches of an earlier optimizer step."""
        position, plan = self.state.position, self.plan
        epoch, done = position.epoch, math.ceil(position.batch / plan.accumulate)
        behind = position.global_step - (step - 1)
        while behind > done:
            epoch, behind, done = epoch - 1, behind - done, plan.steps
        start = (done - behind) * plan.accumulate
        self._restart_batches = True
        return epoch, list(self.source.batches(epoch, start, min(start + plan.accumulate, plan.batches)))


@contextlib.contextmanager
def collecting_between_steps() -> Iterator[None]:
    """Leave garbage collection to the loop: it never interrupts a step, and examines young objects only."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _check_metrics(source: str, metrics: dict[str, Any]) -> None:
    """Raise `BadMetric` for the first metric that cannot be logged."""
    for name, value in metrics.items():
        if not isinstance(name, str) or name.removeprefix("val/") in _RESERVED:
            raise BadMetric(f"{source}: the metric cannot be named {name!r}", f"text other than {', '.join(_RESERVED)}")
        try:
            # Trackers convert later, in the background: refuse here, where the source is still known
            if isinstance(value, str | bytes):
                raise TypeError
            float(value)
        except (TypeError, ValueError, RuntimeError):
            kind = type(value).__name__ + (f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else "")
            raise BadMetric(f"{source}: metric {name!r} is a {kind}, not a number", "a float") from None
