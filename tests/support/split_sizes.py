"""Evaluations of splits of many sizes, by one process or by each of several ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner.data.loaders import BatchPlan, Fields, MemoryLoader
from runner.data.transforms.augment import Pipeline
from runner.distributed.sharding import shard
from runner.distributed.world import World
from runner.engine.errors import BadMetric
from runner.engine.evaluation import evaluate
from runner.engine.step import Supervised
from runner.tasks.classification import Classification
from runner.tasks.regression import Regression

# Every remainder by the batches and by 2 to 4 ranks, and some larger sizes.
SIZES, BATCHES = (*range(10), 24, 25, 39), (1, 3, 8)
_CPU = torch.device("cpu")


class Fading:
    """A metric whose parts cannot be joined: later batches count more."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.value = torch.zeros(())

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.value = self.value * 0.7 + (outputs * targets.view(-1, 1)).mean()

    def compute(self) -> Tensor:
        return self.value


class Noting:
    """A source of batches that remembers which samples it gave at first: what is asked for later is to count for nothing."""

    def __init__(self, source: MemoryLoader) -> None:
        self.source, self.samples, self.batch_size = source, source.samples, source.batch_size
        self.ids, self._asked = list[int](), 0

    def batches(self, *which: int) -> Iterator[Any]:
        self._asked += 1
        first = self._asked == 1
        for batch in self.source.batches(*which):
            if first:
                self.ids += batch.indices.tolist()
            yield batch


def all_found(world: World | None = None) -> list[dict[str, Any]]:
    """For each size and batch size the samples that this rank evaluated, and the metrics of each task.

    The models are divided among the ranks of `world`, if there is one. The metrics do not depend on it, so one task has to do.
    """
    torch.manual_seed(0)
    images = torch.randint(256, (41, 1, 2, 2), dtype=torch.uint8)
    prepare = Fields(["0"], Pipeline([], [0.5], [0.3], 0, _CPU))
    targets = {"classes": torch.randint(3, (41,)), "numbers": torch.randn(41)}
    tasks: dict[str, Any] = {"classes": Classification(3), "numbers": Regression()}
    losses: dict[str, Any] = {"classes": F.cross_entropy, "numbers": F.mse_loss}
    models = {name: nn.Sequential(nn.Flatten(), nn.Linear(4, 3 if name == "classes" else 1)) for name in tasks}
    if world is not None:
        del tasks["numbers"]
        shard(models["classes"], [], world, _CPU)
    metrics = {name: {**task.metrics(_CPU), "fading": Fading()} for name, task in tasks.items()}
    every = []
    for size, batch in itertools.product(SIZES, BATCHES):
        every.append(found := dict[str, Any]())
        for name, task in tasks.items():
            loader = MemoryLoader(images, targets[name], BatchPlan(torch.arange(size), batch, prepare=prepare), _CPU)
            source = Noting(loader)
            for metric in metrics[name].values():
                metric.reset()
            step = Supervised(models[name], losses[name], task.targets).evaluated
            try:
                values: Any = evaluate(models[name], source, step, metrics=metrics[name])
            except BadMetric as error:
                values = str(error)
            found[name] = {"ids": source.ids, "values": values}
    return every


def by_strategy(world: World) -> dict[str, Any]:
    """What this rank found, with the whole model and with a part of it."""
    return {"ddp": all_found(), "fsdp": all_found(world)}
