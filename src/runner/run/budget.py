"""The number of steps that fit into `budget`, measured in short runs before the one that counts."""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import math
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from runner.base.durations import seconds
from runner.base.errors import UserError
from runner.config import stored
from runner.config.keys import with_changes
from runner.config.schema.train import Train
from runner.distributed.world import world
from runner.engine.errors import Preempted
from runner.engine.loop import Loop
from runner.run.metrics import stops_early
from runner.run.run import Run
from runner.run.run_directory import RunDirectory
from runner.runtime.signals import StopSignals

_USED, _PROCESS_S = 0.995, 0.6  # share of the budget; seconds of starting and leaving the process
_SHARE, _MOST_S = 0.05, 60.0  # of the budget, for measuring steps, and again for evaluations
_EVALUATIONS, _BATCHES = 4, 4  # that are measured, and the fewest batches of each
_WARM, _FEWEST, _ENDLESS = 3, 20, 10**6  # steps
_OWN = ("runner.engine.", "runner.tracking.loggers.")


class Clock(StopSignals):
    """A callback that measures a run, and ends it after `limit` seconds; it also passes `signals` on to the run."""

    def __init__(self, signals: StopSignals, limit: float) -> None:
        super().__init__()
        self._signals, self._longest, self._next, self._evaluated = signals, limit, 2 * _WARM, False
        self.began = self.boundary = self.warm = self._stepped = time.perf_counter()
        self.evaluation = 0.0  # seconds of the last one
        # Seconds from the end of a step to that of the next, without and with an evaluation between them
        self.steps, self.evaluations = list[float](), list[float]()
        self.questions = list[float]()  # times since the last step: an evaluation asks for signals before each batch

    def asked(self) -> str:
        """See `StopSignals`."""
        self.questions.append(time.perf_counter())
        return self._signals.asked()

    def on_step(self, loop: Loop) -> None:
        """Note the time of a step, and end the run once there are enough."""
        done, every = loop.state.position.global_step, loop.limits.evaluate_every_steps or _ENDLESS
        ends = done in (_WARM, self._next) or loop.epoch_ended or done % every == 0
        if ends and torch.accelerator.is_available():
            torch.accelerator.synchronize()  # steps that are still on their way to the device are not done
        now = time.perf_counter()
        if done == _WARM:
            self.warm = now
        elif done > _WARM:
            (self.evaluations if self._evaluated else self.steps).append(now - self._stepped)
        self._stepped, self._evaluated = now, False
        if done == self._next:
            self._next = math.ceil(1.25 * done)
            if world().decide(lambda: max(math.fsum(self.steps), math.fsum(self.evaluations)) > self._longest):
                loop.request_stop("enough steps were measured")
        self.questions.clear()

    def on_evaluation(self, loop: Loop, metrics: dict[str, float]) -> None:
        """Note the time of an evaluation."""
        self.evaluation, self._evaluated = time.perf_counter() - self._stepped, True

    def on_boundary(self, loop: Loop) -> None:
        """Note when the last evaluation ended."""
        self.boundary = time.perf_counter()


class _Costs(NamedTuple):
    start: float  # seconds from building the run to its first step, and those that only the first evaluation takes
    step: float  # seconds
    evaluation: float  # seconds
    batch: float  # seconds of one batch of an evaluation
    end: float  # seconds after the last evaluation: the test, the last save, curves
    epoch: int  # steps


Rehearsal = Callable[[Train, RunDirectory, Clock], Run]
"""Builds a run, trains it to its end in a directory, and returns it."""


def fix_steps(
    config: Train, directory: RunDirectory, signals: StopSignals, rehearse: Rehearsal
) -> tuple[Train, list[tuple[str, str, str]]]:
    """The config with the number of steps that fit into `budget`, and a row that says why; without one the config as it was.

    Two runs in a temporary folder are built and trained for it, so that no state of theirs is left: after the first nothing is
    loaded or compiled for the first time, and the second is measured. A resumed run keeps the number of its checkpoint.
    Raises `UserError` if too few steps fit, and `Preempted` if a signal comes.
    """
    if config.budget is None:
        return config, []
    # The config of a checkpoint has the number; that of ranks that are started again is the one before the measurement
    if directory.found is not None:
        typed, known = {key for key, _, _ in directory.differences}, stored.load(directory.found.contents["config"], "")
        return with_changes(config, {key: known[key] for key in ("epochs", "max_steps") if key not in typed}), []
    directory.console.line(f"measuring how many steps fit into budget={config.budget}")
    total = seconds(config.budget)
    limit = min(_SHARE * total, _MOST_S)
    measure = functools.partial(_measure, config, directory, rehearse=rehearse)
    first = measure(Clock(signals, limit), steps=_WARM + 1, every=_ENDLESS, batches=_BATCHES)
    # Several evaluations are measured, of long ones a part, and steps without one
    every = max(2, int(limit / (first.step or limit) / _EVALUATIONS))
    batches = max(_BATCHES, int(limit / (first.batch or limit) / _EVALUATIONS))
    cost = measure(Clock(signals, limit), steps=_ENDLESS, every=every, batches=batches)
    left = _USED * total - _PROCESS_S - world().decide(time.time) + directory.began - cost.start - cost.end
    intervals = (config.evaluate.every_epochs or 0) * cost.epoch, config.evaluate.every_steps or 0
    lengths = [length for length in intervals if length]

    def needed(steps: int) -> float:
        both = steps // math.lcm(*lengths) if all(intervals) else 0  # evaluated once
        last = bool(lengths) and all(steps % length for length in lengths)
        return steps * cost.step + cost.evaluation * (sum(steps // length for length in lengths) - both + last)

    steps = bisect.bisect_right(range(1, _ENDLESS**2), left, key=needed)
    reason = f"{cost.step:.3g} s a step, {cost.evaluation:.3g} s an evaluation, {total - left:.3g} s beside them"
    if steps < _FEWEST:
        raise UserError("budget", f"{config.budget} allows {steps} steps: {reason}", f"{_FEWEST} steps or more")
    if steps < cost.epoch:
        directory.warnings.append(f"budget={config.budget} allows less than one epoch: {steps} steps of {cost.epoch}")
    fixed = with_changes(config, {"epochs": None, "max_steps": steps})
    return fixed, [("budget", f"{config.budget}, {steps:,} steps", reason)]


def _measure(
    config: Train, directory: RunDirectory, clock: Clock, *, rehearse: Rehearsal, steps: int, every: int, batches: int
) -> _Costs:
    """Train at most `steps` steps, and give the longest times of all ranks.

    Evaluations come as the config says, and at least once in `every` steps; each takes at most `batches` batches.
    """
    most, ranks = config.limit.eval_batches or sys.maxsize, world()
    changes: dict[str, Any] = {"epochs": None, "max_steps": steps, "limit.eval_batches": min(batches, most)}
    if config.evaluate.every_epochs or config.evaluate.every_steps:
        changes["evaluate.every_steps"] = min(config.evaluate.every_steps or every, every)
    # Programs of the user, services that runs are sent to, and early stopping are not for a run that does not count
    for key in ("callbacks", "logger"):
        nodes = {name: node for name, node in getattr(config, key).items() if not stops_early(node)}
        changes[key] = {name: node for name, node in nodes.items() if str(node["_target_"]).startswith(_OWN)}
    # A part that is frozen for a time costs the most after it
    if config.unfreeze_at is not None or "@" in str(config.freeze):
        changes |= {"unfreeze_at": None, "freeze": None}
    shutil.rmtree(own := directory.path / ".measured", ignore_errors=True)  # of a killed process
    with contextlib.ExitStack() as ending:
        ending.callback(shutil.rmtree, own, ignore_errors=True)
        job = directory.job()._replace(path=ranks.decide(lambda: own))
        scratch = RunDirectory.of_rank(job, None, ranks.rank + 1, own)
        with contextlib.closing(scratch.ending):
            run = rehearse(with_changes(config, changes), scratch, clock)
        ended = time.perf_counter()
        if any(ranks.gather(reason := clock.asked())):
            raise Preempted(reason or "a signal to another rank")
    pauses = [later - earlier for earlier, later in itertools.pairwise(clock.questions)]
    each = statistics.median(pauses or [0.0]) * (1 if run.state.averaged is None else 2) / ranks.size
    val, test = (  # batches that were not evaluated
        max(0, min(most, len(split.loader)) - batches) if split else 0
        for split in (run.data.val, run.data.test if config.evaluate.test else None)
    )
    step = statistics.fmean(clock.steps or [0.0])
    # What an evaluation makes the next step slower, such as a save, is a part of its time
    first, *later = [seconds - step for seconds in clock.evaluations] or [clock.evaluation]
    evaluation = statistics.fmean(later or [first])
    start, end = clock.warm - clock.began - _WARM * step, ended - clock.boundary + test * each
    start, evaluation = start + max(0.0, first - evaluation), max(0.0, evaluation + val * each)
    found = ranks.gather(_Costs(start, step, evaluation, each, end, run.plan.steps))
    return _Costs(*map(max, zip(*found, strict=True)))
