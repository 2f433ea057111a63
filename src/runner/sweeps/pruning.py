"""A trial of a search reports each evaluation, and stops where the pruner of the search says so.

Each trial decides by itself, from the evaluations that all trials of the sweep store in their run directories, so that no process
has to answer it, on any machine. A decision is stored with its evaluation: a run that is killed and resumed repeats it.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runner.base.errors import UserError
from runner.base.files import write_json
from runner.base.reading import read_json

VARIABLE = "RUNNER_TRIAL"
"""Variable of the environment of a job that is a trial: its number, direction and pruner, as JSON."""
FILE = "pruning.json"


class Pruning:
    """A callback of the training loop.

    Args:
        trial: its `number`, the `mode` of the monitored metric, and arguments of `runner.sweeps.study.pruner_of`.
        folder: the run directory, inside that of the sweep.
        decide: asks rank 0 a question, and gives its answer on every rank.
    """

    def __init__(self, trial: dict[str, Any], folder: Path, decide: Callable[[Callable[[], Any]], Any]) -> None:
        self._trial, self._folder, self._decide = trial, folder, decide

    def on_start(self, loop: Any) -> None:
        """Stop again if the resumed run had been stopped, but was killed before its end."""
        if (mode := loop.monitor[1]) != self._trial["mode"]:
            raise UserError("checkpoint.mode", f"of {loop.monitor[0]} is {mode}, which the search did not know", mode)
        at = self._decide(lambda: self._own["stopped_at"])
        if at is not None and at <= _evaluation(loop):
            self._stop(loop, at)

    def on_evaluation(self, loop: Any, metrics: dict[str, float]) -> None:
        """Report the monitored metric."""
        value, at = metrics[loop.monitor[0]], _evaluation(loop)
        if loop.finished or not math.isfinite(value):
            return  # the end comes anyway
        if self._decide(lambda: self._stops(at, value)):
            self._stop(loop, at)

    def _stop(self, loop: Any, evaluation: int) -> None:
        loop.prune(f"the search stopped this trial after evaluation {evaluation}")

    @functools.cached_property
    def _own(self) -> dict[str, Any]:
        """The reports of this trial; on rank 0 alone, which is asked."""
        new = {"number": self._trial["number"], "curve": [], "notes": {}, "stopped_at": None}
        found = read_json(self._folder / FILE)
        return found if found.keys() == new.keys() else new

    def _stops(self, evaluation: int, value: float) -> bool:
        own = self._own
        if evaluation not in dict(own["curve"]):
            from runner.sweeps.study import decision

            own["curve"].append([evaluation, value])
            stops, own["notes"] = decision(self._trial, own, self._folder.parent.glob(f"*/{FILE}"))
            own["stopped_at"] = evaluation if stops else None
            write_json(self._folder / FILE, own)
        return bool(own["stopped_at"] == evaluation)


def _evaluation(loop: Any) -> int:
    """The number of the evaluation at the position, from 1: the same in every trial, and after resuming."""
    position, limits = loop.state.position, loop.limits
    done: int = position.epoch + (position.batch > 0)
    every: int = limits.evaluate_every_epochs or 1
    if limits.evaluate_every_steps is not None:
        done, every = position.global_step, limits.evaluate_every_steps
    return -(-done // every)


def pruning(folder: Path, decide: Callable[[Callable[[], Any]], Any]) -> list[Any]:
    """The callbacks of a trial of a search."""
    return [Pruning(json.loads(os.environ[VARIABLE]), folder, decide)]
