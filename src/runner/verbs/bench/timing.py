"""Times steps with the program's own loop."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping

import torch

from runner.build.run import Run
from runner.engine.loop import Loop
from runner.engine.plan import Limits
from runner.engine.position import Position
from runner.engine.protocols import Source


class Clock:
    """A callback that times a loop, and waits for the device only where it takes the time.

    Args:
        device: what to wait for.
        marks: numbers of steps after which to take the time, besides the start and the end, each with a function to call
            then, or None.
    """

    def __init__(self, device: torch.device, marks: Mapping[int, Callable[[Clock], None] | None]) -> None:
        self._device, self._marks = device, marks
        self._taken: dict[int, tuple[float, int]] = {}
        self._done = 0

    def on_start(self, loop: Loop) -> None:
        """Take the time after the steps that are done."""
        wait(self._device)
        self._taken[self._done] = (time.perf_counter(), loop.samples_seen)

    on_end = on_start

    def on_step(self, loop: Loop) -> None:
        """Count a step, and take the time if it is one of the marks."""
        self._done += 1
        if self._done in self._marks:
            self.on_start(loop)
            if (then := self._marks[self._done]) is not None:
                then(self)

    def seconds(self, step: int) -> float:
        """Seconds from the start to the end of a step whose time was taken."""
        return self._taken[step][0] - self._taken[0][0]

    def per_sample(self, since: int) -> float:
        """Seconds a sample after a step whose time was taken."""
        (began, before), (ended, after) = self._taken[since], self._taken[self._done]
        return (ended - began) / (after - before)


def run(
    training: Run,
    source: Source,
    steps: int,
    marks: Mapping[int, Callable[[Clock], None] | None] | None = None,
) -> Clock:
    """Do some optimizer steps from the beginning of the first epoch, without evaluation, checkpoints or logging.

    `source` gives the batches, and `marks` are those of `Clock`.
    """
    training.state.position = Position()
    # Only batches that are used: workers would make others while another candidate is measured.
    plan = dataclasses.replace(training.plan, limit=min(training.plan.batches, steps * training.plan.accumulate))
    clock = Clock(training.device, marks or {})
    limits = Limits(None, steps)
    Loop(training.state, source, plan, training.parts, limits, None, [clock], training.monitor).run()
    return clock


def wait(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
