"""The training loop.

    on_start
    while there is something to do:
        for each batch of the epoch from where it stands:
            train_step                     # forward, loss, backward
            at the end of an accumulation window:
                                           # optimizer step, next learning rate
                on_step
                evaluate, on_evaluation    # if it is due
                on_boundary                # checkpoints; then signals and limits are looked at
            steps left out on the device are told of when numbers are read: on_step_skipped, on_rollback
    on_end

Whatever stops the loop stops it at a boundary, where position and state describe the run completely.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from runner.engine.diagnosis import diagnose
from runner.engine.errors import BadMetric, Diverged, Interrupted, NotFinite, Preempted
from runner.engine.evaluation import Source
from runner.engine.plan import EpochPlan, Timeline
from runner.engine.state import Best, Position, TrainState
from runner.engine.step import StepConfig, train_step
from runner.engine.weight_average import loss_beside
from runner.instrument.no_trace import preserved_rng

_STEPS_BETWEEN_COLLECTIONS = 500
_MOST_ROLLBACKS = 10
_RESERVED = ("global_step", "epoch", "split")  # the other columns of a log
_TOLD = 3  # steps that were left out whose cause is looked for


@dataclass(frozen=True)
class Limits:
    """When training ends and when the validation split is evaluated; None means never.

    Attributes:
        epochs: epochs in all.
        max_steps: optimizer steps in all.
        evaluate_every_epochs: epochs between evaluations.
        evaluate_every_steps: optimizer steps between evaluations.
    """

    epochs: int | None
    max_steps: int | None
    evaluate_every_epochs: int | None = 1
    evaluate_every_steps: int | None = None

    def epochs_decide(self, timeline: Timeline) -> bool:
        """Whether it is the number of epochs that ends the run, so that shares of the run are shares of its epochs."""
        return self.epochs is not None and (self.max_steps is None or timeline.step(self.epochs) <= self.max_steps)

    def total_steps(self, plan: EpochPlan, start: Position | None = None) -> int:
        """Optimizer steps of the whole run.

        Args:
            plan: how the epochs that are still to come divide into steps.
            start: where training starts. Epochs behind it may have had another number of steps, and count as they were.

        Raises:
            ValueError: if neither epochs nor steps are limited.
        """
        start = start or Position()
        before_epoch = start.global_step - math.ceil(start.batch / plan.accumulate)
        by_epochs = None if self.epochs is None else before_epoch + (self.epochs - start.epoch) * plan.steps
        limits = [self.max_steps, by_epochs]
        given = [limit for limit in limits if limit is not None]
        if not given:
            raise ValueError("epochs or max_steps must be given")
        return min(given)


class Loop:
    """Trains until a limit, a callback or a signal ends it.

    Args:
        state: what training changes.
        source: the training split.
        plan: how its epochs divide into steps.
        parts: what a step is made of.
        limits: when to stop and when to evaluate.
        evaluate: evaluates the validation split; None if there is none. Takes a function that tells whether to break off.
        callbacks: objects with some of the methods that `runner.engine.callbacks` lists.
        monitor: metric and mode (`min` or `max`) that say which evaluation is best.
        interrupted: the name of the signal that asks the run to stop, or an empty string.
        step: trains on a batch as `train_step` does.
        roll_back: puts the state back to that of an earlier step; needed where the guard's policy is `rollback`.
    """

    def __init__(
        self,
        state: TrainState,
        source: Source,
        plan: EpochPlan,
        parts: StepConfig,
        limits: Limits,
        evaluate: Callable[[Callable[[], bool]], dict[str, float]] | None,
        callbacks: Sequence[Any],
        monitor: tuple[str, str],
        interrupted: Callable[[], str] = lambda: "",
        step: Callable[[TrainState, StepConfig, Any, float, int, bool], None] = train_step,
        roll_back: Callable[[Loop], None] | None = None,
    ) -> None:
        self.step = step
        self._roll_back, self._rollbacks, self._told = roll_back, 0, 0
        self._ask_again = False  # whether the source was asked for other batches meanwhile
        self.state, self.source, self.plan, self.parts, self.limits = state, source, plan, parts, limits
        self._total_steps: int | None = None
        self.callbacks = list(callbacks)
        self.monitor = monitor
        self.interrupted = interrupted
        self.improved = False  # whether the latest evaluation at this boundary was the best so far
        self.samples_seen = 0  # since this process started
        self.waited_s = 0.0  # for batches, since this process started
        self.paused_s = 0.0  # for what is no training, such as compiling; callbacks add what they find
        self.epoch_ended = False  # whether this boundary is the end of an epoch
        self.stop_reason = ""
        self.stopping = ""  # the signal that ends the run at this boundary
        self._evaluate, self._evaluated_at = evaluate, -1  # the step of the latest evaluation in this process
        self._on_step = self._methods("on_step")
        self._on_boundary = self._methods("on_boundary")

    def _methods(self, name: str) -> list[Callable[..., None]]:
        return [getattr(callback, name) for callback in self.callbacks if hasattr(callback, name)]

    def emit(self, name: str, *args: Any) -> None:
        """Call a method of every callback that has it, in the order of the list."""
        for method in self._methods(name):
            method(self, *args)

    def collect(self, name: str, metrics: dict[str, float]) -> None:
        """Call a method of every callback that takes metrics and may add to them.

        Raises:
            BadMetric: if one of them adds a value that is not a number, or uses a reserved name.
        """
        for method in self._methods(name):
            method(self, metrics)
            if problem := _problem_in(metrics):
                raise BadMetric(f"callback {type(getattr(method, '__self__', method)).__name__}, {name}: {problem}")

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run, decided where training starts."""
        if self._total_steps is None:
            self._total_steps = self.limits.total_steps(self.plan, self.state.position)
        return self._total_steps

    @property
    def finished(self) -> bool:
        """Whether the limits are reached or a callback asked for the end."""
        return bool(self.stop_reason) or self.state.position.global_step >= self.total_steps

    def request_stop(self, reason: str) -> None:
        """End training at the next boundary, after the last evaluation; `reason` is a clause that people read."""
        self.stop_reason = self.stop_reason or reason

    def run(self) -> None:
        """Train from where the state stands to the end.

        Raises:
            Preempted: after a signal, once the callbacks have seen the boundary.
            Diverged: if loss or gradients are not finite, and nothing else is to be done about it.
        """
        state = self.state
        self._begin()
        self.emit("on_start")
        with collecting_between_steps():
            if state.position.evaluation_due and self.finished:
                self._boundary()
            while not self.finished:
                try:
                    if state.position.evaluation_due:
                        self._boundary()
                    else:
                        self._epoch()
                except NotFinite as found:
                    self._return_from(found)
        self.emit("on_end")

    def _begin(self) -> None:
        """Make the next step the first one after whatever put the state where it is."""
        self.state.train()
        self.state.set_learning_rate()
        if self.parts.guard is not None:
            self.parts.guard.start()

    def _epoch(self) -> None:
        """Train from the position to the end of the epoch, or to where training ends."""
        state, plan, parts, step = self.state, self.plan, self.parts, self.step
        position, interval = state.position, self.limits.evaluate_every_steps
        self._ask_again = False
        batches = self.source.batches(position.epoch, position.batch, plan.batches)
        for size, weight, update in plan.parts(position.batch):
            asked = perf_counter()
            try:
                batch = next(batches)
            except Exception as error:
                self._save_before(error)
                raise
            self.waited_s += perf_counter() - asked
            if position.left_out and position.global_step + 1 in position.left_out:
                self._leave_out(update)
            else:
                step(state, parts, batch, weight, size, update)
            self.samples_seen += size
            position.batch += 1
            if not update:
                continue
            position.global_step = done = position.global_step + 1
            self.epoch_ended = position.batch == plan.batches
            if self.epoch_ended:
                position.epoch, position.batch = position.epoch + 1, 0
            if done % _STEPS_BETWEEN_COLLECTIONS == 0:
                gc.collect(1)
            for method in self._on_step:
                method(self)
            state.set_learning_rate()
            if self.epoch_ended or self.finished or (interval is not None and done % interval == 0):
                position.evaluation_due = self._evaluation_due()
            self._boundary()
            if self.finished or self.epoch_ended or self._ask_again:
                return

    def _leave_out(self, update: bool) -> None:
        if update and self.parts.guard is not None:
            self.parts.guard.stepped()

    def check_nonfinite(self) -> None:
        """Find out whether steps since the last call were left out as their gradients are not finite; waits for the device.

        Called before numbers are read, the state is saved, or the validation split evaluated.

        Raises:
            Diverged: if they were, and the policy is to stop.
            NotFinite: if they were, and the policy is to go on from an earlier state.
        """
        guard = self.parts.guard
        if guard is None or guard.steps == 0:
            return
        before = self.state.position.global_step - guard.steps
        for index in guard.found():
            step = before + index + 1
            if guard.policy == "skip" and self._told >= _TOLD:
                self.emit("on_step_skipped", step, None)
                continue
            with preserved_rng():  # batches may be made with draws
                epoch, batches = self._batches_of(step)
            diagnosis = diagnose(self.state, self.parts, batches, step, epoch + 1)
            self._told += 1
            self.emit("on_step_skipped", step, diagnosis)
            if guard.policy == "raise":
                raise Diverged(str(diagnosis))
            if guard.policy == "rollback":
                raise NotFinite(step, str(diagnosis))

    def _batches_of(self, step: int) -> tuple[int, list[Any]]:
        """The epoch and the batches of an optimizer step that was taken in this or an earlier epoch."""
        position, plan = self.state.position, self.plan
        epoch, done = position.epoch, math.ceil(position.batch / plan.accumulate)
        behind = position.global_step - (step - 1)
        while behind > done:
            epoch, behind, done = epoch - 1, behind - done, plan.steps
        start = (done - behind) * plan.accumulate
        self._ask_again = True
        return epoch, list(self.source.batches(epoch, start, min(start + plan.accumulate, plan.batches)))

    def _return_from(self, found: NotFinite) -> None:
        """Go back to an earlier state, and leave out the step that was found when training comes to it again."""
        assert self._roll_back is not None, "the policy rollback needs a way back"
        self._rollbacks += 1
        if self._rollbacks > _MOST_ROLLBACKS:
            raise Diverged(f"{found}; training was rolled back {_MOST_ROLLBACKS} times before") from found
        earlier = self.state.position.left_out
        self._roll_back(self)
        self.state.position.left_out = sorted({*earlier, *self.state.position.left_out, found.step})
        self.epoch_ended = False
        self._begin()
        self.emit("on_rollback", found)

    def _evaluation_due(self) -> bool:
        """Whether the validation split is to be evaluated at the end of an epoch, of an interval or of training."""
        position, limits = self.state.position, self.limits
        if self._evaluate is None:
            return False
        by_epochs, by_steps = limits.evaluate_every_epochs, limits.evaluate_every_steps
        if by_epochs is None and by_steps is None:
            return False
        return (
            (by_epochs is not None and self.epoch_ended and position.epoch % by_epochs == 0)
            or (by_steps is not None and position.global_step % by_steps == 0)
            or self.finished
        )

    def _boundary(self) -> None:
        """Do what is due at this step, let callbacks save, and obey signals."""
        position = self.state.position
        self.improved = False
        if position.evaluation_due and not self.interrupted():
            self.check_nonfinite()
            try:
                self._run_evaluation()
                position.evaluation_due = False
            except Interrupted:
                pass  # the evaluation stays due, and is made after resuming
            except Exception as error:
                self._save_before(error)
                raise
        # Asked once, so that what the callbacks save and what is done next agree whenever the signal comes.
        self.stopping = self.interrupted()
        for method in self._on_boundary:
            method(self)
        if self.stopping:
            raise Preempted(self.stopping)
        if self.stop_reason and self._evaluated_at != position.global_step and self._evaluation_due():
            # A callback asked for the end after what was due was decided.
            position.evaluation_due = True
            self._boundary()

    def _save_before(self, error: Exception) -> None:
        """Let callbacks save what was trained before reading failed, unless that was inside an accumulation window."""
        position = self.state.position
        if not position.global_step or position.batch % self.plan.accumulate:
            return
        self.stopping = type(error).__name__
        with contextlib.suppress(Exception):  # what failed first is what is to be told
            for method in self._on_boundary:
                method(self)

    def _run_evaluation(self) -> None:
        assert self._evaluate is not None, "an evaluation is due without a validation split"
        state = self.state
        metrics = self._evaluate(lambda: bool(self.interrupted()))
        state.last_metrics, self._evaluated_at = metrics, state.position.global_step
        name, mode = self.monitor
        value = metrics[name]
        beside = loss_beside(name)  # which there is not if a metric of one's own is called ema_something
        loss = metrics[beside if beside in metrics else "val/loss"]
        if math.isfinite(value) and (state.best is None or state.best.beaten_by(value, loss)):
            state.best = Best(name, mode, value, loss, state.position.global_step, state.position.epoch)
            self.improved = True
        state.schedule.observe(value)
        state.set_learning_rate()
        self.collect("on_evaluation", metrics)


@contextlib.contextmanager
def collecting_between_steps() -> Iterator[None]:
    """Leave garbage collection to the loop: no pause falls into a step, and what exists now is never looked through again."""
    was_enabled = gc.isenabled()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def _problem_in(metrics: dict[str, Any]) -> str:
    """What is wrong with the first metric that cannot be logged, or an empty string."""
    for name, value in metrics.items():
        if not isinstance(name, str) or name.removeprefix("val/") in _RESERVED:
            return f"the metric cannot be named {name!r}\n    allowed: text other than {', '.join(_RESERVED)}"
        try:
            if isinstance(value, str | bytes):
                raise TypeError
            float(value)
        except (TypeError, ValueError, RuntimeError):
            shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
            return f"metric {name!r} is a {type(value).__name__}{shape}, not a number\n    allowed: a float"
    return ""
