"""The decisions that the ranks of a run make together at every step: whether to stop, and what time it is."""

from __future__ import annotations

import datetime
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from runner.distributed.world import World

_LIMIT = 1000.0  # stands for a reason that is not a signal


class Agreement:
    """Lets all ranks stop at the same step, and delay checkpoints by the clock of rank 0.

    A callback: after each step every rank sends what it knows, and reads what was sent after the step before, so that nobody
    waits. Once a rank is asked to stop, all ranks learn of it one or two steps later. A single process sends nothing.

    Args:
        world: the ranks.
        asked: what asks this rank to stop, or an empty string, see `runner.runtime.signals.StopSignals`.
        timeout_s: seconds to wait for the other ranks.
    """

    def __init__(self, world: World, asked: Callable[[], str], timeout_s: float) -> None:
        self._world, self._asked = world, asked
        self._group: Any = None
        if world.size > 1:  # messages of a group of its own do not queue behind gradients
            self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout_s))
        self._sent: tuple[Any, torch.Tensor] | None = None
        self._reason, self._time = "", world.decide(time.monotonic)

    def on_step(self, loop: Any) -> None:
        """Read what was sent after the step before, and send what this rank knows."""
        self.on_end(loop)
        if self._group is None:
            return
        reason = self._asked()
        number = signal.Signals[reason] if reason in signal.Signals.__members__ else _LIMIT * bool(reason)
        message = torch.tensor([number, time.monotonic() if self._world.first else 0.0], dtype=torch.float64)
        self._sent = dist.all_reduce(message, dist.ReduceOp.MAX, group=self._group, async_op=True), message

    def on_end(self, loop: Any) -> None:
        """Read the last message."""
        if self._sent is None:
            return
        work, message = self._sent
        work.wait()
        self._sent = None
        number, self._time = message.tolist()
        if number and not self._reason:
            self._reason = "a time limit" if number == _LIMIT else signal.Signals(int(number)).name

    def confirm(self) -> None:
        """Exchange at once, after all ranks have left an evaluation."""
        self.on_step(None)
        self.on_end(None)

    def reason(self) -> str:
        """The reason for which all ranks stop, or an empty string."""
        return self._asked() if self._group is None else self._reason

    def clock(self) -> float:
        """Seconds on the clock of rank 0, the same number on every rank at a step."""
        return time.monotonic() if self._group is None else self._time
