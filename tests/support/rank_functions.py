"""What ranks of tests do, and how a test gets what they find."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from runner.distributed.world import Agreement, World, joined


def write(job: tuple[Path, Callable[[World], Any]]) -> None:
    """Write what a function of the ranks returns to `RANK.json`."""
    folder, function = job
    torch.set_num_threads(1)
    with joined(60, torch.device("cpu")) as world:
        (folder / f"{world.rank}.json").write_text(json.dumps(function(world)))


def meet_without_one(folder: Path) -> None:
    """Join the others for 2 s, but for rank 1, which sleeps before."""
    if os.environ["RANK"] == "1":
        time.sleep(300)
    with joined(2, torch.device("cpu")):
        (folder / "met").touch()


def agreed(world: World) -> list[Any]:
    """The times of the common clock of ranks whose clocks differ, and the reason to stop."""
    times = (100.0 * world.rank + step for step in range(5, 99))
    with mock.patch("runner.distributed.world.time.monotonic", side_effect=times):
        agreement = Agreement(world, lambda: "SIGTERM" if world.rank == 1 else "", 60.0)
        found = [agreement.clock(), agreement.reason()]
        agreement.confirm()
    return [*found, agreement.clock(), agreement.reason()]


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
