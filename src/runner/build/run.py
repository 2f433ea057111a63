"""What a run is made of before its first step; `runner.train.build_run` builds it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from runner.build.hardware import Hardware
from runner.build.init_from import InitialWeights
from runner.build.length import RunLength
from runner.build.metrics import Monitor
from runner.build.model import example_input
from runner.config.schema.train import Train
from runner.data.build import DataModule
from runner.engine.plan import EpochPlan
from runner.engine.position import Position
from runner.engine.state import TrainState
from runner.engine.step import StepConfig, StepFunction
from runner.engine.tasks import Task
from runner.instrument.flops import Flops, count_flops
from runner.instrument.no_trace import preserved_buffers
from runner.optim.kernels import Kernels
from runner.runtime.precision import Precision
from runner.runtime.toggles import Toggled


@dataclass
class Run:
    """What a run is made of.

    Attributes:
        config: with what comes from the data (statistics, classes, image shape) and the batch size that was found.
        hardware: device and precision.
        data: the splits.
        task: what the outputs mean.
        loss: (logits, targets) -> scalar mean over the samples.
        length: epochs and steps.
        monitor: the metric that decides which evaluation is best.
        state: model, optimizer, schedule, average of the weights: what training changes and a checkpoint stores.
        parts: what a step consists of.
        step: trains on a batch.
        toggled: compilation and activation checkpointing.
        kernels: how the optimizer updates weights.
        initial: where the weights come from.
        warnings: settings without effect, and what else people should know.
    """

    config: Train
    hardware: Hardware
    data: DataModule
    task: Task
    loss: nn.Module
    length: RunLength
    monitor: Monitor
    state: TrainState
    parts: StepConfig
    step: StepFunction
    toggled: Toggled
    kernels: Kernels
    initial: InitialWeights
    warnings: list[str]

    @property
    def model(self) -> nn.Module:
        """What is trained."""
        return self.state.model

    @property
    def device(self) -> torch.device:
        """Where it is trained."""
        return self.hardware.device

    @property
    def precision(self) -> Precision:
        """What forward passes are computed in."""
        return self.hardware.precision

    @property
    def plan(self) -> EpochPlan:
        """How an epoch divides into batches and steps."""
        return self.length.plan

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.length.total_steps


def training_flops(run: Run, position: Position | None = None, samples: int = 2) -> Flops:
    """Operations of a batch in training, see `count_flops`; everything is left as it is.

    Args:
        run: the run.
        position: of the step, which decides what is frozen; None for everything that is not frozen permanently trained.
        samples: samples of the batch.
    """
    images = example_input(run.data, samples)
    targets = run.task.targets(run.data.example[1].expand(samples, *run.data.example[1].shape[1:]))
    with run.state.freezing.as_at(position), preserved_buffers(run.loss):
        return count_flops(run.model, images, lambda logits: run.loss(logits, targets), run.precision.autocast)
