"""Loops that take turns in one process and on one thread, a few epochs each."""

from __future__ import annotations

import gc
import importlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from peers.cases import Job
from peers.clock import now
from peers.work import work_of


class Turns:
    """A callback of `runner` that lets other loops train between its epochs, and times everyone's turns.

    A turn of `runner` begins with whatever it does after the last step of an epoch (logging and saving among it) and ends
    with the last step of the turn's last epoch.

    Args:
        job: file that describes the measurement.
        contenders: names of the other loops.
        epochs: epochs of a turn.
        warmup: turns that are not counted.
    """

    def __init__(self, job: str, contenders: list[str], epochs: int, warmup: int = 2) -> None:
        self._job, self._epochs, self._warmup = Job.read(job), epochs, warmup
        work = work_of(replace(self._job, epochs=self._job.epochs + epochs))
        self._others = {
            name: importlib.import_module(f"peers.{name}_loop").epochs(work, work.model()) for name in contenders
        }
        self._steps = work.steps * epochs
        self._turns: list[dict[str, float]] = []
        self._since = 0.0

    def on_start(self, loop: Any) -> None:
        """Start the clock."""
        self._since = now()

    def on_step(self, loop: Any) -> None:
        """After the last epoch of a turn, let the others have theirs."""
        if not loop.epoch_ended or loop.state.position.epoch % self._epochs:
            return
        turn = {"runner": now() - self._since}
        gc.enable()  # as it is for everybody but `runner`, which collects by itself
        # Who goes first after `runner` changes, as a turn finds the processor as the turn before left it.
        names = list(self._others)
        shift = len(self._turns) % len(names)
        for name in names[shift:] + names[:shift]:
            since = now()
            for _ in range(self._epochs):
                next(self._others[name])
            turn[name] = now() - since
        gc.disable()
        self._turns.append({name: seconds / self._steps for name, seconds in turn.items()})
        self._since = now()

    def on_end(self, loop: Any) -> None:
        """Write the seconds of a step in every turn that counts."""
        Path(self._job.result).write_text(json.dumps(self._turns[self._warmup :]))
