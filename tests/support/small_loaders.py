"""Loaders of sixty small images, from memory or through workers, and what compares their batches."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.config.schema.sections import Data
from runner.data.bad_samples import ReplacementSampler
from runner.data.loaders import Batch, BatchPlan, Fields, Loader, MemoryLoader
from runner.data.sampler import EpochOrder
from runner.data.samples import SeededDataset, as_tensor
from runner.data.sources.synthetic import synthetic
from runner.data.workers import WorkerLoader
from runner.distributed.world import World

CPU = torch.device("cpu")
ARRAYS = synthetic(samples=60, image_size=6, classes=5)["train"]
PART = torch.arange(60)[torch.arange(60) % 4 != 0]  # 45 samples: five batches of 8 and one of 5
BATCHES = 6


def noisy(image: Any) -> Tensor:
    """A sample transform that draws from every library."""
    pixels = as_tensor(image).float() / 255 + random.random() + float(np.random.rand())
    return pixels + torch.rand(pixels.shape)


class Listed(Dataset[Any]):
    """A data set made of a list; an exception in it is raised where it is read."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        item = self.items[index]
        if isinstance(item, Exception):
            raise item
        return item


def small_loader(
    workers: int | None = None,
    dataset: Dataset[Any] = ARRAYS,
    indices: Tensor = PART,
    *,
    transforms: Sequence[Callable[[Any], Any]] = (),
    draws: Callable[[int], EpochOrder] | None = None,
    prepare: Any = None,
    replacements: ReplacementSampler | None = None,
    rank: int = 0,
    ranks: int = 1,
    shuffle: bool = True,
    **options: Any,
) -> Any:
    """A loader of batches of 8; with `workers` None one of `ARRAYS` in memory. `options` are those of the loader, or of `data`."""
    fields = None if prepare is None else Fields(["0"], prepare)
    plan = BatchPlan(indices, options.pop("batch_size", 8), 3, shuffle, fields, options.pop("mix", None))
    made: Loader
    if workers is None:
        made = MemoryLoader(ARRAYS.images, ARRAYS.targets, plan, CPU, **options)
    else:
        named = {name: options.pop(name) for name in ("on_skipped",) if name in options}
        settings = Data(dataset={}, **{"persistent_workers": False, **options})
        made = WorkerLoader(
            SeededDataset(dataset, 3, transforms, replacements), plan, CPU, settings, workers=workers, **named
        )
    made.draws, made.world = draws, World(rank=rank, size=ranks)
    return made


def read(loader: Loader, epoch: int = 0, start: int = 0, stop: int = BATCHES) -> list[Batch]:
    """Batches of an epoch; afterwards the loader is closed."""
    with contextlib.closing(loader):
        return list(loader.batches(epoch, start, stop))


def joined(batches: list[Batch]) -> Batch:
    """The samples of batches as one batch."""
    images, targets, indices = (
        torch.cat(parts) for parts in zip(*((*batch.data, batch.indices) for batch in batches), strict=True)
    )
    return Batch((images, targets), indices)


def same(first: list[Batch], second: list[Batch]) -> bool:
    """Whether batches have the same images, targets and samples of the same types, bit for bit."""
    return len(first) == len(second) and all(
        torch.equal(a, b) and a.dtype == b.dtype
        for one, other in zip(first, second, strict=True)
        for a, b in zip((*one.data, one.indices), (*other.data, other.indices), strict=True)
    )
