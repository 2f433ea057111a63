"""A trial of a search reports each evaluation to the study, and stops where the pruner says so."""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from runner.base.errors import UserError

if TYPE_CHECKING:
    from runner.sweeps.study import Reports

VARIABLE = "RUNNER_TRIAL"
"""Variable of the environment of a job that is a trial: `mode`, and arguments of `runner.sweeps.study.Reports`, as JSON."""


class Pruning:
    """A callback of the training loop; `decide` asks rank 0 a question, and gives its answer on every rank."""

    def __init__(self, decide: Callable[[Callable[[], Any]], Any]) -> None:
        self._decide, self._settings = decide, json.loads(os.environ[VARIABLE])

    @functools.cached_property
    def _reports(self) -> Reports:
        """On rank 0 alone, which is asked: the other processes need no Optuna."""
        from runner.sweeps.study import Reports

        return Reports(**self._settings["reports"])

    def on_start(self, loop: Any) -> None:
        """Stop again if the resumed run had been stopped, but was killed before its end."""
        if (mode := loop.monitor[1]) != self._settings["mode"]:
            raise UserError("checkpoint.mode", f"of {loop.monitor[0]} is {mode}, which the search did not know", mode)
        at = self._decide(lambda: self._reports.stopped_at)
        if at is not None and at <= _evaluation(loop):
            loop.prune(f"pruned after evaluation {at}")

    def on_evaluation(self, loop: Any, metrics: dict[str, float]) -> None:
        """Report the monitored metric."""
        value, at = metrics[loop.monitor[0]], _evaluation(loop)
        if loop.finished or not math.isfinite(value):
            return  # the end comes anyway
        if self._decide(lambda: self._reports.stops(at, value)):
            loop.prune(f"pruned after evaluation {at}")


def _evaluation(loop: Any) -> int:
    """The number of the evaluation at the position, from 1: the same in every trial, and after resuming."""
    position, limits = loop.state.position, loop.limits
    done: int = position.epoch + (position.batch > 0)
    every: int = limits.evaluate_every_epochs or 1
    if limits.evaluate_every_steps is not None:
        done, every = position.global_step, limits.evaluate_every_steps
    return -(-done // every)
