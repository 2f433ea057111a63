"""The clock that every contender is timed with: each contender reports the end of an epoch."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from peers.cases import Job
from peers.work import Work, work_of


class Clock:
    """Notes when epochs end; the time between the first end and the last is what counts.

    Whatever comes before the end of the first epoch (imports, reading the data, building, starting workers, warm-up) and
    after the end of the last one is excluded for everybody.
    """

    def __init__(self) -> None:
        self._ends: list[float] = []

    def epoch_ended(self) -> None:
        """Note the time."""
        self._ends.append(now())

    def write(self, work: Work, model: nn.Module) -> None:
        """Write times and score to the file that the job names."""
        if len(self._ends) != work.job.epochs:
            raise RuntimeError(f"{work.job.contender} trained {len(self._ends)} epochs of {work.job.epochs}")
        seconds = [after - before for before, after in zip(self._ends, self._ends[1:], strict=False)]
        result = {
            "step_s": sum(seconds) / len(seconds) / work.steps,
            "quickest_s": min(seconds) / work.steps,
            "epochs_s": seconds,
            **work.score(model),
        }
        Path(work.job.result).write_text(json.dumps(result))


def train(loop: Any, work: Work, clock: Clock) -> nn.Module:
    """Train by a module of this package: by its function `train`, or epoch by epoch by its function `epochs`."""
    if hasattr(loop, "train"):
        trained: nn.Module = loop.train(work, clock)
        return trained
    model = work.model()
    for _ in loop.epochs(work, model):
        clock.epoch_ended()
    return model


def now() -> float:
    """Seconds on a clock, once a GPU has finished its work."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


class Callback:
    """The clock as a callback of `runner`: callbacks.clock._target_=peers.clock.Callback.

    Args:
        job: file that describes the measurement.
    """

    def __init__(self, job: str) -> None:
        self._job = Job.read(job)
        self._clock = Clock()

    def on_step(self, loop: Any) -> None:
        """Note the end of an epoch, before what is done there: saving belongs to the next one."""
        if loop.epoch_ended:
            self._clock.epoch_ended()

    def on_end(self, loop: Any) -> None:
        """Score the model."""
        self._clock.write(work_of(self._job), loop.state.model)
