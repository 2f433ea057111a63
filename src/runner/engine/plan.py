"""The division of a run into epochs, batches and optimizer steps; where training is, and its end."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property


@dataclass
class Position:
    """The position of training, always at a boundary between optimizer steps."""

    epoch: int = 0  # completed epochs
    batch: int = 0  # completed batches of the current epoch
    global_step: int = 0  # completed optimizer steps
    evaluation_due: bool = False  # whether the validation split must be evaluated before training continues
    turns: list[list[int]] = field(default_factory=list)  # [step, epoch], see `Timeline`


@dataclass
class Best:
    """The best evaluation so far."""

    metric: str
    mode: str
    value: float
    loss: float
    global_step: int
    epoch: int

    def beaten_by(self, value: float, loss: float) -> bool:
        """True if a later evaluation is better: by its value, if equal by the lower loss, and if both are equal it is not.

        On a small split many evaluations have the same accuracy, and the loss still tells them apart.
        """
        if value == self.value:
            return loss < self.loss or (math.isnan(self.loss) and not math.isnan(loss))
        return value > self.value if self.mode == "max" else value < self.value


@dataclass(frozen=True)
class EpochPlan:
    """The batches of an epoch."""

    samples: int  # samples per epoch
    batch_size: int  # samples per batch
    accumulate: int = 1  # batches per optimizer step
    drop_last: bool = False  # skip the last batch if it is smaller
    limit: int | None = None  # batches per epoch; None for all

    @cached_property
    def batches(self) -> int:
        """Batches per epoch."""
        count = self.samples // self.batch_size if self.drop_last else math.ceil(self.samples / self.batch_size)
        return count if self.limit is None else min(count, self.limit)

    @cached_property
    def steps(self) -> int:
        """Optimizer steps per epoch; the last one may accumulate fewer batches."""
        return math.ceil(self.batches / self.accumulate)

    def size(self, batch: int) -> int:
        """Samples in batch number `batch`."""
        return min(self.batch_size, self.samples - batch * self.batch_size)

    def parts(self, start: int) -> Iterator[tuple[int, float, bool]]:
        """(size, share, update) of each batch of an epoch from number `start`, which begins an accumulation window.

        The share is that of the samples in its window, the factor of its mean loss: the gradient of a window is then that of the
        mean over all its samples, even if the last window has fewer batches or a smaller batch. The last batch of a window updates.
        """
        # The usual case, in which nothing is computed for each batch
        if self.accumulate == 1 and start < self.batches:
            yield from itertools.repeat((self.batch_size, 1.0, True), self.batches - 1 - start)
            start = self.batches - 1
        for first in range(start, self.batches, self.accumulate):
            last = min(first + self.accumulate, self.batches) - 1
            total = (last - first) * self.batch_size + self.size(last)
            for batch in range(first, last + 1):
                size = self.size(batch)
                yield size, size / total, batch == last


@dataclass(frozen=True)
class Timeline:
    """Converts between optimizer steps and epochs in a run whose number of steps per epoch may have changed."""

    steps: int  # optimizer steps per epoch since the last change
    turns: tuple[tuple[int, int], ...] = ()  # (step, epoch) at which the number of steps per epoch changed, in order

    @classmethod
    def of(cls, start: Position, plan: EpochPlan) -> Timeline:
        """The timeline of a run that continues from `start` with the epochs of `plan`."""
        turns = [(step, epoch) for step, epoch in start.turns]
        step, epoch = turns[-1] if turns else (0, 0)
        began = start.global_step - math.ceil(start.batch / plan.accumulate)
        if began - step != (start.epoch - epoch) * plan.steps:
            turns.append((began, start.epoch))
        return cls(plan.steps, tuple(turns))

    def scaled(self, step: float) -> float:
        """The number that `step` would have if all earlier epochs had had `steps` steps."""
        for (began, epoch), (turn, later) in itertools.pairwise([(0, 0), *self.turns]):
            if step < turn:
                return (epoch + (step - began) * (later - epoch) / (turn - began)) * self.steps
        began, epoch = self.turns[-1] if self.turns else (0, 0)
        return epoch * self.steps + (step - began)

    def step(self, epoch: float) -> float:
        """The step after which `epoch` epochs have passed; a fraction if they end within a step."""
        for (began, first), (turn, later) in itertools.pairwise([(0, 0), *self.turns]):
            if epoch < later:
                return began + (epoch - first) * (turn - began) / (later - first)
        began, first = self.turns[-1] if self.turns else (0, 0)
        return began + (epoch - first) * self.steps


@dataclass(frozen=True)
class Limits:
    """The end of training and the times of evaluations; None means never."""

    epochs: int | None  # epochs in total
    max_steps: int | None  # optimizer steps in total
    evaluate_every_epochs: int | None = 1  # epochs between evaluations
    evaluate_every_steps: int | None = None  # optimizer steps between evaluations

    def epochs_decide(self, timeline: Timeline) -> bool:
        """True if the number of epochs ends the run, so that shares of the run are shares of its epochs."""
        return self.epochs is not None and (self.max_steps is None or timeline.step(self.epochs) <= self.max_steps)

    def total_steps(self, plan: EpochPlan, start: Position | None = None) -> int:
        """Optimizer steps of the whole run; epochs completed at `start` count with the steps that they had."""
        start = start or Position()
        limits = [] if self.max_steps is None else [self.max_steps]
        if self.epochs is not None:
            before_epoch = start.global_step - math.ceil(start.batch / plan.accumulate)
            limits.append(before_epoch + (self.epochs - start.epoch) * plan.steps)
        return min(limits)
