"""Times steps and batches with the program's own loop."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch

from runner.build.run import Run
from runner.data.loaders import Batch
from runner.engine.loop import Loop
from runner.engine.plan import EpochPlan, Limits
from runner.engine.position import Position
from runner.engine.protocols import Source


class Timed(NamedTuple):
    """A measurement: samples, and the seconds that they took."""

    samples: int
    seconds: float

    @property
    def per_sample(self) -> float:
        """Seconds a sample."""
        return self.seconds / self.samples


class Clock:
    """Times a loop as its callback, and waits for the device only where it takes the time.

    Args:
        device: what to wait for.
        marks: numbers of steps after which to take the time, each with a function to call then, or None.
    """

    def __init__(self, device: torch.device, marks: Mapping[int, Callable[[Clock], None] | None]) -> None:
        self._device, self._marks = device, dict(marks)
        self._taken: dict[int, tuple[float, int]] = {}
        self._done = 0

    def take(self, loop: Loop) -> None:
        """Take the time after the steps that are done."""
        wait(self._device)
        self._taken[self._done] = (time.perf_counter(), loop.samples_seen)

    def on_step(self, loop: Loop) -> None:
        """Count a step, and take the time if it is one of the marks."""
        self._done += 1
        if self._done in self._marks:
            self.take(loop)
            if (then := self._marks[self._done]) is not None:
                then(self)

    def seconds(self, step: int) -> float:
        """Seconds from the start to the end of a step whose time was taken."""
        return self._taken[step][0] - self._taken[0][0]

    def since(self, step: int) -> Timed:
        """What came after a step whose time was taken."""
        (began, before), (ended, after) = self._taken[step], self._taken[self._done]
        return Timed(after - before, ended - began)


def run(
    training: Run,
    source: Source,
    steps: int,
    marks: Mapping[int, Callable[[Clock], None] | None] | None = None,
    epoch: int = 0,
) -> Clock:
    """Train from the beginning of an epoch, without evaluation, checkpoints or logging.

    Args:
        training: what is trained.
        source: the batches.
        steps: optimizer steps.
        marks: steps after which to take the time, besides the start and the end; see `Clock`.
        epoch: number of the epoch.
    """
    state, plan = training.state, training.plan
    state.position = Position(epoch=epoch)
    # Only batches that are used: workers would make others while another candidate is measured.
    plan = dataclasses.replace(plan, limit=min(plan.batches, steps * plan.accumulate))
    clock = Clock(training.device, marks or {})
    loop = Loop(state, source, plan, training.parts, Limits(None, steps), None, [clock], training.monitor)
    clock.take(loop)
    loop.run()
    clock.take(loop)
    return clock


class Repeated:
    """A source that repeats one batch, cut to the plan's sizes: computing without input."""

    def __init__(self, batch: Batch, plan: EpochPlan) -> None:
        self._batch, self._plan = batch, plan
        self.samples, self.batch_size = plan.samples, plan.batch_size

    def batches(self, epoch: int, start: int, stop: int) -> Iterator[Batch]:
        """The batch, `stop` - `start` times."""
        for number in range(start, stop):
            size = self._plan.size(number)
            yield self._batch if size == len(self._batch.targets) else Batch(*(part[:size] for part in self._batch))


def read(training: Run, batches: int, warmup: int, epoch: int) -> Timed:
    """Take batches from the loader without using them."""
    plan, device = training.plan, training.device
    samples, done, began = 0, 0, time.perf_counter()
    while done < warmup + batches:
        count = min(plan.batches, warmup + batches - done)
        for batch in training.data.train.loader.batches(epoch, 0, count):
            done += 1
            samples += len(batch.targets)
            if done == warmup:
                wait(device)
                samples, began = 0, time.perf_counter()
        epoch += 1
    wait(device)
    return Timed(samples, time.perf_counter() - began)


def wait(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
