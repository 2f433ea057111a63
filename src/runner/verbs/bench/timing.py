"""Times steps with the program's own loop."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping

import torch

from runner.build.run import Run
from runner.data.loaders import Batch
from runner.engine.loop import Loop
from runner.engine.plan import EpochPlan, Limits
from runner.engine.position import Position
from runner.engine.protocols import Source
from runner.engine.step import StepFunction, train_step


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
    epoch: int = 0,
    step: StepFunction = train_step,
) -> Clock:
    """Do some optimizer steps from the beginning of an epoch, without evaluation, checkpoints or logging.

    `source` gives the batches, `marks` are those of `Clock`, and `step` is what is done with a batch.
    """
    training.state.position = Position(epoch=epoch)
    # Only batches that are used: workers would make others while another candidate is measured.
    plan = dataclasses.replace(training.plan, limit=min(training.plan.batches, steps * training.plan.accumulate))
    clock = Clock(training.device, marks or {})
    limits = Limits(None, steps)
    Loop(training.state, source, plan, training.parts, limits, None, [clock], training.monitor, step=step).run()
    return clock


def only_read(*_: object) -> None:
    """A step that does nothing with its batch: reading without computing."""


class Repeated:
    """A source that repeats one batch, cut to the plan's sizes: computing without reading."""

    def __init__(self, batch: Batch, plan: EpochPlan) -> None:
        self._batch, self._plan = batch, plan
        self.samples, self.batch_size = plan.samples, plan.batch_size

    def batches(self, epoch: int, start: int, stop: int) -> Iterator[Batch]:
        """The batch, `stop` - `start` times."""
        for number in range(start, stop):
            size = self._plan.size(number)
            yield self._batch if size == len(self._batch.targets) else Batch(*(part[:size] for part in self._batch))


def wait(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
