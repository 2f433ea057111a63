"""Other loops that train between the epochs of a run of `runner`, in the same process; or alone, epoch by epoch.

`python -m peers.turns LOOP EPOCHS RESULT` is the second: `LOOP` is JSON, as a value of `Turns.loops`.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from peers.cases import Job
from peers.clock import now


def opened(loop: str, job: str | None = None, **given: Any) -> Iterator[None]:
    """A loop that trains an epoch each time it is asked for the next.

    Args:
        loop: module with a function `epochs`.
        job: file that describes the work; only for the loops of this package.
        given: arguments of the function; only for other loops.
    """
    epochs = importlib.import_module(loop).epochs
    if job is not None:
        from peers.work import work_of

        work = work_of(Job.read(job))
        given = {"work": work, "model": work.model()}
    found: Iterator[None] = epochs(**given)
    return found


class Turns:
    """A callback of `runner` that lets other loops train between its epochs, and times everyone's turns.

    A turn of `runner` begins with whatever it does after the last step of an epoch (logging and saving among it) and ends
    with the last step of the turn's last epoch. The epochs of all loops have the same number of steps.

    Args:
        result: file for the seconds of a step in every turn that counts, by contender.
        loops: the other loops by name, each as arguments of `opened`.
        epochs: epochs of a turn.
        warmup: turns that are not counted.
    """

    def __init__(self, result: str, loops: dict[str, dict[str, Any]], epochs: int = 1, warmup: int = 2) -> None:
        self._result, self._epochs, self._warmup = Path(result), epochs, warmup
        self._others = {name: opened(**given) for name, given in loops.items()}
        self._turns: list[dict[str, float]] = []
        self._since, self._step = 0.0, 0

    def on_start(self, loop: Any) -> None:
        """Start the clock."""
        self._since = now()

    def on_step(self, loop: Any) -> None:
        """After the last epoch of a turn, let the others have theirs."""
        position = loop.state.position
        if not loop.epoch_ended or position.epoch % self._epochs:
            return
        turn = {"runner": now() - self._since}
        gc.enable()  # as it is for everybody but `runner`, which collects by itself
        # Who goes first after `runner` changes, as a turn finds the processor as the turn before left it.
        names = list(self._others)
        shift = len(self._turns) % max(1, len(names))
        for name in names[shift:] + names[:shift]:
            since = now()
            for _ in range(self._epochs):
                next(self._others[name])
            turn[name] = now() - since
        gc.disable()
        steps, self._step = position.global_step - self._step, position.global_step
        self._turns.append({name: seconds / steps for name, seconds in turn.items()})
        self._since = now()

    def on_end(self, loop: Any) -> None:
        """Write the turns that count."""
        self._result.write_text(json.dumps(self._turns[self._warmup :]))


def main() -> None:
    """Write the seconds of each epoch of a loop that trains alone."""
    loop, ends = opened(**json.loads(sys.argv[1])), [now()]
    for _ in range(int(sys.argv[2])):
        next(loop)
        ends.append(now())
    Path(sys.argv[3]).write_text(json.dumps([end - start for start, end in pairwise(ends)]))


if __name__ == "__main__":
    main()
