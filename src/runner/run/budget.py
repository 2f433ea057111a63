"""The number of steps that fit into `budget`, which is measured in a short run before the one that counts."""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from runner.base.durations import seconds
from runner.base.errors import UserError
from runner.config import stored
from runner.config.keys import with_changes
from runner.config.schema.train import Train
from runner.data.module import SplitData
from runner.distributed.world import world
from runner.engine.errors import Preempted
from runner.engine.loop import Loop
from runner.run.run import Run
from runner.run.run_directory import RunDirectory
from runner.runtime.signals import StopSignals

T = TypeVar("T", bound=Train)
Row = tuple[str, str, str]  # label, value and reason

_USED = 0.985  # of the budget: the end of the process cannot be measured
_SHARE, _MOST_S = 0.05, 60.0  # of the budget, for measuring steps, and again for a part of an evaluation
_WARM, _FEWEST, _ENDLESS = 3, 20, 10**6  # steps


Rehearsal = Callable[[Run, RunDirectory, Any, list[Any]], None]
"""Trains a run to its end in a directory; what is given besides stands in for its signals, and for further callbacks."""


class _Clock:
    """A callback that measures a short run and ends it after `limit` seconds; stands between the run and its signals."""

    def __init__(self, signals: StopSignals, limit: float) -> None:
        self._signals, self._limit = signals, limit
        self.began = self.boundary = self.warm = time.perf_counter()
        self.evaluations, self.steps = list[float](), list[float]()  # seconds
        self._next, self._stepped = 2 * _WARM, 0.0
        self._asked = list[float]()  # when the run asked for signals, which an evaluation does before each batch

    def asked(self) -> str:
        """See `StopSignals`."""
        self._asked.append(time.perf_counter())
        return self._signals.asked()

    def each(self) -> float:
        """Seconds between the batches that were evaluated last."""
        return statistics.median([b - a for a, b in itertools.pairwise(self._asked)] or [0.0])

    def on_step(self, loop: Loop) -> None:
        """Note the time of a step, and end the run once there are enough."""
        done = loop.state.position.global_step
        if done in (_WARM, self._next) and torch.accelerator.is_available():
            torch.accelerator.synchronize()  # steps that are still on their way to the device are not done
        self._stepped = time.perf_counter()
        if done == _WARM:
            self.warm = self._stepped
        if done > _WARM:
            self.steps.append(self._stepped - self.boundary)
        if done == self._next:
            self._next = math.ceil(1.25 * done)
            if world().decide(lambda: self._stepped - self.warm > self._limit):
                loop.request_stop("enough steps were measured")
        self._asked.clear()

    def on_evaluation(self, loop: Loop, metrics: dict[str, float]) -> None:
        """Note the time of an evaluation."""
        self.evaluations.append(time.perf_counter() - self._stepped)

    def on_boundary(self, loop: Loop) -> None:
        """What follows, such as a save, belongs to the next step, or to the end."""
        self.boundary = time.perf_counter()


class _Costs(NamedTuple):
    """Seconds that parts of a run take."""

    start: float  # from its building to its first step
    step: float
    evaluation: float
    end: float  # after the last evaluation: the test, the last save, curves
    epoch: int  # steps of an epoch


def fix_steps(
    config: T, directory: RunDirectory, signals: StopSignals, build: Callable[[T], Run], rehearse: Rehearsal
) -> tuple[T, list[Row]]:
    """The config with the number of steps that fit into `budget`, and a row that says why; without one the config as it was.

    Two short runs are built and trained in a temporary folder, so that no state of theirs is left: after the first nothing is
    loaded, compiled or allocated for the first time, and the second is measured. Ranks take the longest times of all. A run
    that is resumed keeps the number of its checkpoint. A `UserError` says that too few steps fit.
    """
    if config.budget is None:
        return config, []
    if directory.found is not None:
        typed, known = {key for key, _, _ in directory.differences}, stored.load(directory.found.contents["config"], "")
        return with_changes(config, {key: known[key] for key in ("epochs", "max_steps") if key not in typed}), []
    total = seconds(config.budget)
    limit = min(_SHARE * total, _MOST_S)
    measure = functools.partial(_measure, _shortened(config), directory, signals, build, rehearse, limit)
    first = measure(_WARM, 1)
    # Of a long evaluation, a part is measured
    found = measure(_ENDLESS, max(4, int(limit / max(first.evaluation, first.end, 1e-3))))
    left = _USED * total - (world().decide(time.time) - directory.began) - found.start - found.end
    of_epochs, of_steps = config.evaluate.every_epochs, config.evaluate.every_steps
    intervals = [each for each in (of_epochs and of_epochs * found.epoch, of_steps) if each and found.evaluation]

    def needed(steps: int) -> float:
        return steps * found.step + found.evaluation * sum(math.ceil(steps / each) for each in intervals)

    steps = bisect.bisect_right(range(1, _ENDLESS**2), left, key=needed)
    reason = (
        f"{1000 * found.step:.3g} ms a step, {found.evaluation:.3g} s an evaluation, {total - left:.3g} s beside them"
    )
    if steps < _FEWEST:
        raise UserError(
            "budget", f"{config.budget} allows {steps} steps: {reason}", f"a time for {_FEWEST} steps or more"
        )
    if steps < found.epoch:
        directory.warnings.append(f"budget={config.budget} allows less than one epoch: {steps} steps of {found.epoch}")
    fixed = with_changes(config, {"epochs": None, "max_steps": steps})
    return fixed, [("budget", f"{config.budget}, {steps:,} steps", reason)]


def _shortened(config: T) -> T:
    """The config of a run that does not count: without programs of the user, and services that runs are sent to."""
    changes: dict[str, Any] = {"epochs": None}
    for key in ("callbacks", "logger"):
        nodes: dict[str, Any] = getattr(config, key)
        own = ("runner.engine.", "runner.tracking.loggers.")
        changes[key] = {name: node for name, node in nodes.items() if str(node["_target_"]).startswith(own)}
    # A part that is frozen for a time costs the most after it
    parts = [config.freeze] if isinstance(config.freeze, str) else config.freeze or []
    frozen = [part for part in parts if "@" not in part and config.unfreeze_at is None]
    return with_changes(config, changes | {"unfreeze_at": None, "freeze": frozen or None})


def _measure(
    config: T,
    directory: RunDirectory,
    signals: StopSignals,
    build: Callable[[T], Run],
    rehearse: Rehearsal,
    limit: float,
    steps: int,
    batches: int,
) -> _Costs:
    """Train at most `steps` steps or `limit` seconds, and evaluate at most `batches` batches of each split."""
    began, most = time.perf_counter(), config.limit.eval_batches or sys.maxsize
    run = build(with_changes(config, {"max_steps": steps, "limit.eval_batches": min(batches, most)}))
    clock, ranks = _Clock(signals, limit), world()
    with tempfile.TemporaryDirectory(dir=directory.path, prefix=".measured_") as folder:
        scratch = RunDirectory.of_rank(directory.job()._replace(path=Path(folder)), None, 1, Path(folder))
        with contextlib.closing(scratch.ending):
            rehearse(run, scratch, clock, [clock])
    ended = time.perf_counter()
    if any(ranks.gather(reason := signals.asked())):
        raise Preempted(reason or "a signal to another rank")

    def missing(split: SplitData | None) -> float:
        """Seconds of the batches that were not evaluated."""
        there = min(most, math.ceil(split.samples / split.loader.batch_size)) if split else 0
        return max(0, there - batches) * clock.each() * (1 + (run.state.averaged is not None)) / ranks.size

    step = statistics.fmean(clock.steps or [0.0])
    start = clock.warm - began - _WARM * step
    evaluation = statistics.median(clock.evaluations) + missing(run.data.val) if clock.evaluations else 0.0
    end = ended - clock.boundary + missing(run.data.test if config.evaluate.test else None)
    costs = ranks.gather(_Costs(start, step, evaluation, end, run.plan.steps))
    return _Costs(*map(max, zip(*costs, strict=True)))
