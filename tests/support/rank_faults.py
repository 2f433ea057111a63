"""Callbacks and data of ranks that fail or are slow."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from runner.data.sources.synthetic import synthetic

WORDS = (
    "data=synthetic", "data.dataset.samples=90", "data.image_size=8", "data.batch_size=8", "model=mlp", "model.hidden=[16]",
    "threads=1", "logger=none", "log.curves=false", "log.progress=false",
)  # fmt: skip


def data(**given: Any) -> Any:
    """Other images on each rank."""
    return synthetic(**given | {"seed": int(os.environ.get("RANK", "0"))})


class Unreadable(Dataset[Any]):
    """Images, of which one in fifteen cannot be read."""

    def __init__(self, images: Any) -> None:
        self.images, self.targets, self.classes = images, images.targets, images.classes

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Any:
        if index % 15 == 4:
            raise ValueError("not this one")
        return self.images[index]


def unreadable(**given: Any) -> Any:
    """The usual images, of which some cannot be read."""
    return {name: Unreadable(split) for name, split in synthetic(**given).items()}


class Fault:
    """On rank 1, raises an error at a step, or kills the rank, for the first time that the ranks start."""

    def __init__(self, step: int = 5, kill: bool = False) -> None:
        self.step, self.kill = step, kill

    def on_step(self, loop: Any) -> None:
        if os.environ["RANK"] != "1" or loop.state.position.global_step != self.step:
            return
        if not self.kill:
            raise ValueError("a mistake of mine")
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)


class Late:
    """Rank 0 asks the launcher to stop, and does not save for long."""

    def on_step(self, loop: Any) -> None:
        if os.environ["RANK"] == "0" and loop.state.position.global_step == 3:
            os.kill(int(os.environ["LAUNCHER"]), signal.SIGTERM)
            time.sleep(60)


class Slow:
    """Notes how workers would be started, and makes steps last as long as a variable of the environment says."""

    def on_start(self, loop: Any) -> None:
        Path(f"workers_of_rank_{os.environ['RANK']}").write_text(multiprocessing.get_start_method())

    def on_step(self, loop: Any) -> None:
        time.sleep(float(os.environ.get("SECONDS_A_STEP", "0")))
