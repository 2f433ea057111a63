"""What ranks of tests do, and how a test gets what they find."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch

from runner.distributed.world import Agreement, World, joined


def write(job: tuple[Path, Callable[[World], Any]]) -> None:
    """Write what a function of the ranks returns to `RANK.json`."""
    folder, function = job
    torch.set_num_threads(1)
    with joined(60, torch.device("cpu")) as world:
        (folder / f"{world.rank}.json").write_text(json.dumps(function(world)))


def fail(job: tuple[str, int]) -> None:
    """On one of the ranks, fail in some way after the ranks have met, or never come; the others wait for it."""
    how, rank = job
    if how == "never comes" and os.environ["RANK"] == str(rank):
        time.sleep(300)
    with joined(2, torch.device("cpu")) as world:
        if world.rank == rank:
            if how == "raises":
                raise ValueError("a mistake of mine")
            if how == "exits":
                os._exit(3)
            if how == "SIGKILL while the launcher is busy":  # which finds all reports at once
                launcher = psutil.Process().parent().parent()
                launcher.suspend()
                subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {launcher.pid}"], start_new_session=True)
            os.kill(os.getpid(), signal.Signals[how.split()[0]])
        world.gather(0)


def agreed(world: World) -> list[Any]:
    """The times of the common clock of ranks whose clocks differ, and for each cause on one rank the reason to stop."""
    times = (100.0 * world.rank + step for step in range(5, 99))
    found = []
    with mock.patch("runner.distributed.world.time.monotonic", side_effect=times):
        for cause in ("SIGTERM", "max_time=2h"):
            agreement = Agreement(world, lambda cause=cause: cause if world.rank == 1 else "", 60.0)
            found += [agreement.clock(), agreement.reason()]
            agreement.confirm()
            found += [agreement.clock(), agreement.reason()]
    return found


class Holding(Exception):
    """An error that cannot be sent."""

    def __init__(self) -> None:
        super().__init__("no room")
        self.file = sys.stdout


class Demanding(Exception):
    """An error that can be sent, and not be made again."""

    def __init__(self, reason: str, *, code: int) -> None:
        super().__init__(f"{reason} {code}")


def errors(world: World) -> list[str]:
    """What a rank catches of each error that the first one raises."""
    found = []
    for error in (Holding(), Demanding("code", code=7), KeyError("gone")):
        try:
            world.decide(mock.Mock(side_effect=error))
        except Exception as caught:
            found.append(f"{type(caught).__name__}: {caught}")
    return found
