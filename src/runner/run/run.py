"""What a run is made of before its first step; `runner.train.build_run` builds it."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from runner.config.schema.train import Train
from runner.data.module import DataModule
from runner.engine.plan import EpochPlan
from runner.engine.position import Position
from runner.engine.state import TrainState
from runner.engine.step import StepConfig, StepFunction, Supervised
from runner.instrument.flops import Flops, count_flops
from runner.instrument.no_trace import preserved_buffers
from runner.optim.kernels import Kernels
from runner.run.hardware import Hardware
from runner.run.init_from import InitialWeights
from runner.run.length import RunLength
from runner.run.metrics import Monitor
from runner.run.model import model_of
from runner.runtime.hardware_metrics import HardwareMetrics, choose_hardware_metrics
from runner.runtime.peak_flops import kind_of
from runner.runtime.precision import Precision
from runner.runtime.toggles import Toggled
from runner.tasks.task import Task


@dataclass
class Run:
    """What a run is made of."""

    config: Train  # with what comes from the data (statistics, classes, image shape) and the batch size that was found
    hardware: Hardware  # device and precision
    data: DataModule
    task: Task  # what the outputs mean
    loss: nn.Module  # (logits, targets) -> scalar mean over the samples
    length: RunLength  # epochs and steps
    monitor: Monitor  # the metric that decides which evaluation is best
    state: TrainState  # what training changes and a checkpoint stores: model, optimizer, schedule, averages
    parts: StepConfig  # what a step consists of
    step: StepFunction
    toggled: Toggled  # compilation and activation checkpointing
    kernels: Kernels  # how the optimizer updates weights
    initial: InitialWeights  # where the weights come from
    warnings: list[str]  # settings without effect, and what else people should know

    @property
    def model(self) -> nn.Module:
        """What is trained."""
        return self.state.model

    @property
    def steps(self) -> Any:
        """How the loss and the outputs of a batch are computed: `runner.engine.step.Supervised` or `runner.run.step.TaskSteps`."""
        return self.parts.objective

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


def hardware_metrics_of(run: Run) -> HardwareMetrics:
    """The figures about the machine that go into log lines of training, as `log.utilization` asks for them."""
    # Peaks are known in float32, and operations where a loss is computed from the outputs of the model
    counted = run.config.dtype == "float32" and run.data.pairs and isinstance(run.steps, Supervised)
    wanted = run.config.log.utilization if counted else False
    kind = kind_of(run.precision.dtype, run.device)
    return choose_hardware_metrics(wanted, run.device, kind, lambda: training_flops(run), run.warnings)


def training_flops(run: Run, position: Position | None = None, samples: int = 2) -> Flops:
    """Operations of a batch in training, see `count_flops`; everything is left as it is.

    `position` decides what is frozen; None means only what is frozen permanently.
    """
    data = run.data.example_batch(samples).data
    with run.state.freezing.as_at(position), preserved_buffers(run.loss):
        steps = functools.partial(run.steps, data)
        return count_flops(model_of(run.model), samples, steps, run.precision.autocast, run.model)
