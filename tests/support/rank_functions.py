"""What ranks of tests do, and how a test gets what they find."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner.config.schema.train import Fsdp
from runner.data.loaders import BatchPlan, Fields, MemoryLoader
from runner.data.transforms.augment import Pipeline
from runner.distributed.batchnorm import set_rows, synchronize
from runner.distributed.sharding import shard
from runner.distributed.world import Agreement, World, joined, rows
from runner.engine.errors import BadMetric
from runner.engine.evaluation import evaluate
from runner.engine.step import Supervised
from runner.tasks.classification import Classification
from runner.tasks.regression import Regression


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
    # Ranks that wait in vain wait briefly; the others learn of the failure, however busy the machine is
    with joined(2 if how in ("SIGSTOP", "never comes") else 30, torch.device("cpu")) as world:
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


SHAPES = [(7, 3), (6, 3, 5), (5, 3, 2, 4), (1, 3, 4, 4), (2, 3, 2, 2)]  # the last ones have fewer rows than ranks


def batchnorm(ranks: World) -> dict[str, Any]:
    """Of each case, the largest error of BatchNorm over rows of ranks against that of the whole batch, and the buffers."""
    return {f"{case}": _batchnorm(*case, ranks) for case in itertools.product(SHAPES, (0.1, None))}


def _batchnorm(shape: tuple[int, ...], momentum: float | None, ranks: World) -> tuple[float, list[Any]]:
    torch.manual_seed(0)
    kind: Any = nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d
    plain, shared = (kind(3, momentum=momentum).double() for _ in range(2))
    for parameter in plain.parameters():
        nn.init.normal_(parameter)
    shared.load_state_dict(plain.state_dict())
    synchronize(nn.Sequential(shared))
    images, factors = torch.randn(2, *shape, dtype=torch.float64)
    own = rows(len(images), ranks.rank, ranks.size)
    count = own.stop - own.start
    whole, part = (part.clone().requires_grad_() for part in (images, images[own] if count else images[:1]))
    outputs = plain(whole)
    (outputs * factors).sum().backward()
    set_rows([shared], (count, len(images)))
    seen = shared(part)
    (seen[:count] * factors[own]).sum().backward()
    assert whole.grad is not None
    assert part.grad is not None
    pairs = [(seen[:count], outputs[own]), (part.grad[:count], whole.grad[own])]
    for name in ("weight", "bias"):
        pairs.append((ranks.total(getattr(shared, name).grad), getattr(plain, name).grad))
    pairs.append((shared.eval()(images), plain.eval()(images)))
    pairs += zip(shared.buffers(), plain.buffers(), strict=True)
    errors = [float((found - expected).abs().max()) for found, expected in pairs if found.numel()]
    return max(errors), [buffer.tolist() for buffer in shared.buffers()]


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
        self.source, self.ids, self._asked = source, list[int](), 0

    def __len__(self) -> int:
        return len(self.source)

    def batches(self, *which: int) -> Iterator[Any]:
        self._asked += 1
        first = self._asked == 1
        for batch in self.source.batches(*which):
            if first:
                self.ids += batch.indices.tolist()
            yield batch


def evaluated_splits(world: World | None = None) -> list[dict[str, Any]]:
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
        shard(models["classes"], [], _CPU, Fsdp())
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


def evaluated(world: World) -> dict[str, Any]:
    """What this rank found, with the whole model and with a part of it."""
    return {"ddp": evaluated_splits(), "fsdp": evaluated_splits(world)}
