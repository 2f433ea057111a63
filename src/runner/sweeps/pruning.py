"""A trial of a search tells its study about each evaluation, and stops where the study says so.

Works alike in the process of the search and in one of its own, as the study is opened from its storage.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable
from typing import Any

from runner.config.errors import UserError

VARIABLE = "RUNNER_TRIAL"
"""Variable of the environment that a job of a search has: its study and its number there, as JSON."""


class Pruning:
    """A callback of the training loop.

    Args:
        study: the fields of `runner.sweeps.study.StudySpec`.
        number: of the trial.
        decide: asks rank 0 a question, and gives its answer on every rank.
    """

    def __init__(self, study: dict[str, Any], number: int, decide: Callable[[Callable[[], Any]], Any]) -> None:
        self._spec, self._number, self._decide = study, number, decide

    def on_start(self, loop: Any) -> None:
        """Stop again if the resumed run had been stopped, but was killed before its end."""
        if (mode := loop.monitor[1]) != self._spec["directions"][0]:
            raise UserError("checkpoint.mode", f"of {loop.monitor[0]} is {mode}, which the search did not know", mode)
        at = self._decide(lambda: self._study.stops_again(self._number, _evaluation(loop)))
        if at is not None:
            self._stop(loop, at)

    def on_evaluation(self, loop: Any, metrics: dict[str, float]) -> None:
        """Report the monitored metric."""
        value, at = metrics[loop.monitor[0]], _evaluation(loop)
        if loop.finished or not math.isfinite(value):
            return  # the end comes anyway
        if self._decide(lambda: self._study.prunes(self._number, at, value)):
            self._stop(loop, at)

    def _stop(self, loop: Any, evaluation: int) -> None:
        loop.prune(f"the search stopped this trial after evaluation {evaluation}")

    @functools.cached_property
    def _study(self) -> Any:
        """On rank 0 alone, which is asked."""
        from runner.sweeps.study import Study, StudySpec

        return Study(StudySpec(**self._spec))


def _evaluation(loop: Any) -> int:
    """The number of the evaluation at the position, from 1: the same in every trial, and after resuming."""
    position, limits = loop.state.position, loop.limits
    done: int = position.epoch + (position.batch > 0)
    every: int = limits.evaluate_every_epochs or 1
    if limits.evaluate_every_steps is not None:
        done, every = position.global_step, limits.evaluate_every_steps
    return -(-done // every)


def pruning(decide: Callable[[Callable[[], Any]], Any]) -> list[Any]:
    """The callbacks of a run that is a trial of a search; none for any other run."""
    if not (text := os.environ.get(VARIABLE)):
        return []
    found = json.loads(text)
    return [Pruning(found["study"], found["number"], decide)]
