"""Small runs of the engine by itself: no config, no files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from waiting import Waits

from runner.data.loaders import Batch, BatchPlan, MemoryLoader
from runner.engine.evaluation import evaluate
from runner.engine.loop import Loop
from runner.engine.plan import EpochPlan, Limits
from runner.engine.state import RunningMean, TrainState
from runner.engine.step import Step, Supervised, WindowStep, needs_window
from runner.optim.schedules import Constant

CPU = torch.device("cpu")


@dataclass
class Bench:
    """What a test needs to train a few samples."""

    images: Tensor
    targets: Tensor
    batch_size: int = 4
    accumulate: int = 1
    seed: int = 0
    lr: float = 0.1
    parts: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, Any] = field(default_factory=lambda: {"epochs": 2, "max_steps": None})
    build: Callable[[], nn.Module] = lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    validate: bool = True
    scaler: Any = None
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD

    def state(self) -> TrainState:
        torch.manual_seed(self.seed)
        model = self.build()
        optimizer = self.optimizer(model.parameters(), lr=self.lr)
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
        return TrainState(model, optimizer, Constant(1000), self.scaler, RunningMean(CPU))

    def step(self, state: TrainState) -> Step:
        parts = {"loss": nn.CrossEntropyLoss(), "targets": lambda targets: targets} | self.parts
        steps = Supervised(state.model, parts.pop("loss"), parts.pop("targets"))
        return (WindowStep if needs_window(state.optimizer) else Step)(state, steps, **parts)

    def first(self) -> Batch:
        return next(iter(self.source.batches(0, 0, 1)))

    def one_step(self, state: TrainState | None = None) -> TrainState:
        """The state after a step on the first batch."""
        step = self.step(state or self.state())
        step(self.first(), 1.0, min(self.batch_size, len(self.images)), update=True)
        return step.state

    @property
    def source(self) -> MemoryLoader:
        return MemoryLoader(
            self.images, self.targets, BatchPlan(torch.arange(len(self.images)), self.batch_size, self.seed, True), CPU
        )

    @property
    def plan(self) -> EpochPlan:
        return EpochPlan(len(self.images), self.batch_size, self.accumulate)

    def evaluate(self, model: nn.Module, interrupted: Callable[[], bool] = lambda: False) -> dict[str, float]:
        steps = Supervised(model, nn.CrossEntropyLoss(), self.parts.get("targets", lambda targets: targets))
        found = evaluate(model, self.source, steps.evaluated, metrics={}, interrupted=interrupted)
        return {f"val/{name}": value for name, value in found.items()}

    def loop(self, *callbacks: Any, state: TrainState | None = None, signals: Callable[[], str] = lambda: "") -> Loop:
        state = state or self.state()
        return Loop(
            self.step(state),
            self.source,
            self.plan,
            limits=Limits(**self.limits),
            evaluate=(lambda: self.evaluate(state.model, lambda: bool(signals()))) if self.validate else None,
            callbacks=callbacks,
            monitor=("val/loss", "min"),
            directory=Path(),
            interrupted=signals,
        )


@pytest.fixture
def bench() -> Callable[..., Bench]:
    def make(samples: int = 10, **keys: Any) -> Bench:
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(samples, 3, 2, 2, generator=generator)
        return Bench(images, torch.arange(samples) % 3, **keys)

    return make


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def waits() -> Waits:
    return Waits()
