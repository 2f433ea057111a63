"""Callbacks, data and a model of runs on several ranks, some of which fail or are slow."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.data import Dataset

from runner.data.sources.synthetic import synthetic
from runner.distributed.sharding import local
from runner.distributed.world import world
from runner.instrument.nested import tensors_in

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


class Held:
    """Writes the bytes of this rank's weights and optimizer state to `rank_<number>.json` in a folder."""

    def __init__(self, folder: str) -> None:
        self._path = Path(folder) / f"rank_{world().rank}.json"

    def on_end(self, loop: Any) -> None:
        state = [dict(each) for each in loop.state.optimizer.state.values()]
        held = [loop.state.model.parameters(), tensors_in(state)]
        self._path.write_text(json.dumps([sum(local(tensor).nbytes for tensor in tensors) for tensors in held]))


class Off:
    """Turns the gradients of the last parameter off after the second step."""

    def on_step(self, loop: Any) -> None:
        if loop.state.position.global_step == 2:
            [*loop.state.model.parameters()][-1].requires_grad_(False)


class Block(nn.Module):
    """Three layers and a shortcut."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.second(self.first(self.norm(inputs)).relu())
        return inputs + hidden


class Tied(nn.Module):
    """Blocks of which some have a weight of another block or of a layer outside, and one is called twice."""

    def __init__(self, num_classes: int, image_size: tuple[int, int], in_channels: int, dim: int = 8) -> None:
        super().__init__()
        self.stem = nn.Linear(image_size[0] * image_size[1] * in_channels, dim)
        self.outside = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(5))
        one, two, three, four, _ = self.blocks
        one.first.weight = two.second.weight  # of two blocks
        three.first.weight = self.outside.weight  # of a block and a layer
        four.first.weight = four.second.weight  # of one block
        self.head = nn.Linear(dim, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of shape (B, classes)."""
        hidden = self.outside(self.stem(images.flatten(1)))
        for block in (*self.blocks, self.blocks[-1]):
            hidden = block(hidden)
        logits: Tensor = self.head(hidden)
        return logits
