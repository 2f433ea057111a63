"""What ranks of this process's kind tell each other, written to `RANK.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from runner.distributed.world import joined


class Holding(Exception):
    """An error that cannot be sent."""

    def __init__(self, path: Path) -> None:
        super().__init__("no room")
        self.file = path.open("w")


class Demanding(Exception):
    """An error that can be sent, and not be made again."""

    def __init__(self, reason: str, *, code: int) -> None:
        super().__init__(f"{reason} {code}")


def errors(folder: Path) -> None:
    """Write what a rank catches of each error that the first one raises."""
    torch.set_num_threads(1)
    found = []

    def fail(make: Any) -> None:
        raise make()

    with joined(20, torch.device("cpu")) as ranks:
        for make in (lambda: Holding(folder / "held"), lambda: Demanding("code", code=7), lambda: KeyError("gone")):
            try:
                ranks.decide(lambda make=make: fail(make))
            except Exception as error:
                found.append(f"{type(error).__name__}: {error}")
        (folder / f"{ranks.rank}.json").write_text(json.dumps(found))
