"""How an epoch divides into batches, and batches into optimizer steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runner.engine.state import Position


@dataclass(frozen=True)
class EpochPlan:
    """The batches of an epoch.

    Attributes:
        samples: samples of an epoch.
        batch_size: samples of a batch.
        accumulate: batches of an optimizer step.
        drop_last: leave out the last, smaller batch.
        limit: batches to use of an epoch; None for all.
    """

    samples: int
    batch_size: int
    accumulate: int = 1
    drop_last: bool = False
    limit: int | None = None

    @cached_property
    def batches(self) -> int:
        """Batches of an epoch."""
        count = self.samples // self.batch_size if self.drop_last else math.ceil(self.samples / self.batch_size)
        return count if self.limit is None else min(count, self.limit)

    @cached_property
    def steps(self) -> int:
        """Optimizer steps of an epoch; the last one may accumulate fewer batches."""
        return math.ceil(self.batches / self.accumulate)

    def size(self, batch: int) -> int:
        """Samples of batch number `batch`."""
        return min(self.batch_size, self.samples - batch * self.batch_size)

    def ends_window(self, batch: int) -> bool:
        """Whether the optimizer steps after this batch."""
        return (batch + 1) % self.accumulate == 0 or batch + 1 == self.batches

    def parts(self, start: int) -> Iterator[tuple[int, float, bool]]:
        """Size, weight and whether the optimizer steps after it, for every batch of an epoch from number `start` on."""
        if self.accumulate > 1:
            for batch in range(start, self.batches):
                yield self.size(batch), self.weight(batch), self.ends_window(batch)
            return
        # A batch is a window of its own: nothing to compute for each.
        yield from itertools.repeat((self.batch_size, 1.0, True), max(0, self.batches - 1 - start))
        if start < self.batches:
            yield self.size(self.batches - 1), 1.0, True

    def weight(self, batch: int) -> float:
        """Share of this batch's samples in its accumulation window: what its mean loss is multiplied by.

        So the gradient of a window is that of the mean over all its samples, also in a last window with fewer batches
        or a smaller batch.
        """
        first = batch - batch % self.accumulate
        last = min(first + self.accumulate, self.batches) - 1
        total = (last - first) * self.batch_size + self.size(last)
        return self.size(batch) / total


@dataclass(frozen=True)
class Timeline:
    """Converts between optimizer steps and epochs in a run whose epochs may have had other numbers of steps before.

    Attributes:
        steps: optimizer steps of an epoch from the last turn on.
        turns: (step, epoch) pairs at which epochs of another number of steps began, in order.
    """

    steps: int
    turns: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, start: Position, plan: EpochPlan) -> Timeline:
        """The timeline of a run that goes on from `start` with epochs as `plan` has them."""
        turns = [(step, epoch) for step, epoch in start.turns]
        step, epoch = turns[-1] if turns else (0, 0)
        began = start.global_step - math.ceil(start.batch / plan.accumulate)
        if began - step != (start.epoch - epoch) * plan.steps:
            turns.append((began, start.epoch))
        return cls(plan.steps, tuple(turns))

    def scaled(self, step: float) -> float:
        """The step that `step` would be if all epochs before it had had `steps` steps."""
        here = (0, 0)
        for turn in self.turns:
            if step < turn[0]:
                passed = here[1] + (step - here[0]) * (turn[1] - here[1]) / (turn[0] - here[0])
                return passed * self.steps
            here = turn
        return here[1] * self.steps + (step - here[0])

    def step(self, epoch: float) -> float:
        """The step after which `epoch` epochs have passed; not whole where these end inside a step."""
        here = (0, 0)
        for turn in self.turns:
            if epoch < turn[1]:
                return here[0] + (epoch - here[1]) * (turn[0] - here[0]) / (turn[1] - here[1])
            here = turn
        return here[0] + (epoch - here[1]) * self.steps
