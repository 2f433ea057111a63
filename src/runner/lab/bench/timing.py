"""Times steps with the program's own loop."""

from __future__ import annotations

import dataclasses
import math
import time

import torch

from runner.base.errors import UserError
from runner.engine.loop import Loop
from runner.engine.plan import Limits
from runner.engine.position import Position
from runner.engine.protocols import Source
from runner.run.run import Run

# A candidate that is slower in its first steps than this would only take time from the others.
_TOO_SLOW = 5
_SHORT_S = 0.1  # steps that take less are never too slow: on a busy machine, waiting for a core takes as long


class Clock:
    """A callback that waits for the device and takes the time at the start, after the warm-up and at the end.

    Args:
        device: what to wait for.
        warmup: steps after which to take the time; 0 for none.
        usual_s: seconds that the steps after those take usually.
    """

    def __init__(self, device: torch.device, warmup: int, usual_s: float) -> None:
        self._device, self._warmup, self._limit_s = device, warmup, max(_SHORT_S, _TOO_SLOW * usual_s)
        self._taken: list[tuple[float, int]] = []
        self._done = 0

    def on_start(self, loop: Loop) -> None:
        """Take the time."""
        wait(self._device)
        self._taken.append((time.perf_counter(), loop.samples_seen))

    on_end = on_start

    def on_step(self, loop: Loop) -> None:
        """Count a step, and take the time after the warm-up."""
        self._done += 1
        if self._done == self._warmup:
            self.on_start(loop)
        elif self._done > self._warmup and time.perf_counter() - self._taken[-1][0] > self._limit_s:
            raise UserError(f"more than {_TOO_SLOW} times slower than the baseline in its first steps")

    @property
    def warmup_s(self) -> float:
        """Seconds of the warm-up."""
        return self._taken[1][0] - self._taken[0][0]

    @property
    def per_sample(self) -> float:
        """Seconds a sample after the warm-up."""
        (began, before), (ended, after) = self._taken[-2:]
        return (ended - began) / (after - before)


def run(training: Run, source: Source, steps: int, warmup: int = 0, usual_s: float = math.inf) -> Clock:
    """Do some optimizer steps from the beginning of the first epoch, without evaluation, checkpoints or logging.

    `source` gives the batches; `steps` includes the `warmup`, and `usual_s` is that of `Clock`.
    """
    # Every candidate trains on the same batches
    training.state.position = Position()
    # Only batches that are used: workers would make others while another candidate is measured.
    plan = dataclasses.replace(training.plan, limit=min(training.plan.batches, steps * training.plan.accumulate))
    clock = Clock(training.device, warmup, usual_s)
    limits = Limits(None, steps)
    loop = Loop(
        training.state,
        source,
        plan,
        parts=training.parts,
        limits=limits,
        evaluate=None,
        callbacks=[clock],
        monitor=training.monitor,
    )
    loop.run()
    return clock


def wait(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
