"""What a run is made of before its first step: where it computes, how long it is, and what `runner.train.build_run` builds."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from runner.base.errors import UserError
from runner.config.schema.sections import components_of
from runner.config.schema.train import Train
from runner.data.module import DataModule
from runner.engine.plan import EpochPlan, Limits, Position, Timeline
from runner.engine.state import TrainState
from runner.engine.step import Step, Supervised
from runner.instrument.flops import Flops, count_flops
from runner.instrument.no_trace import preserved_buffers
from runner.optim.kernels import Kernels
from runner.run.finetune import InitialWeights
from runner.run.metrics import Monitor, stops_early
from runner.run.model import model_of
from runner.runtime.device import choose_device, configure_torch, prepare_repeating
from runner.runtime.hardware_metrics import HardwareMetrics, asks_driver, choose_hardware_metrics, kind_of
from runner.runtime.precision import Precision, choose_precision
from runner.runtime.toggles import Toggled
from runner.tasks.task import Task


@dataclass(frozen=True)
class Hardware:
    """Where a run computes, and how precisely."""

    device: torch.device
    reason: str  # why it was chosen
    precision: Precision  # of forward passes
    warnings: list[str]  # settings without effect here


def choose_hardware(config: Train) -> Hardware:
    """Choose device and precision, and set torch's switches."""
    prepare_repeating(config.deterministic)  # before the device is used for the first time
    device, reason = choose_device(config.device)
    warnings = configure_torch(config, device)
    return Hardware(device, reason, choose_precision(config.amp, device, config.dtype), warnings)


@dataclass(frozen=True)
class RunLength:
    """How long a run is."""

    plan: EpochPlan  # how an epoch divides into batches and steps
    timeline: Timeline  # where epochs begin, also those of a resumed run that had another number of steps
    limits: Limits  # when training ends, and when it is evaluated
    total_steps: int  # optimizer steps of the whole run

    def swa_start(self, swa: float) -> int:
        """The optimizer step after which SWA begins, given as a share of the run, or from 1 on in epochs."""
        if swa >= 1:
            return round(self.timeline.step(swa))
        if self.timeline.turns and self.limits.epochs_decide(self.timeline):
            return round(self.timeline.step(swa * self.timeline.scaled(self.total_steps) / self.timeline.steps))
        return round(swa * self.total_steps)


def plan_length(config: Train, data: DataModule, start: Position | None) -> RunLength:
    """Plan the epochs and steps of a run that starts at `start`, or at its beginning; the last epochs of `data` follow from it."""
    size = config.data.samples_a_batch
    plan = EpochPlan(
        samples=data.train.samples,
        batch_size=size,
        accumulate=config.accumulate,
        drop_last=config.data.drop_last,
        limit=config.limit.train_batches,
    )
    # An epoch of other data may be shorter than the position, which would be outside it
    if start is not None and start.batch >= max(1, plan.batches):
        problem = f"the checkpoint is at batch {start.batch} of an epoch, and an epoch of this data has {plan.batches}"
        allowed = "the data that the run was trained on, or a checkpoint from the end of an epoch"
        raise UserError("ckpt_path", problem, allowed)
    if plan.batches == 0:
        problem = f"{size} is more than the {plan.samples} training samples, and data.drop_last=true leaves no batch"
        raise UserError("data.batch_size", problem, "a smaller data.batch_size, or data.drop_last=false")
    # The whole length is known before the first step: schedules and the progress bar need it
    limits = Limits(config.epochs, config.max_steps, config.evaluate.every_epochs, config.evaluate.every_steps)
    total = limits.total_steps(plan, start)
    if total < 1 and start is not None:
        problem = f"is {config.epochs}, and the checkpoint has completed {start.epoch} epochs of {plan.steps} steps"
        raise UserError("epochs", problem, f"epochs={start.epoch + 1} or more to train on")
    timeline = Timeline.of(start or Position(), plan)
    data.close_others(math.ceil(timeline.scaled(total) / timeline.steps))
    return RunLength(plan, timeline, limits, total)


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
    scalars: list[str]  # what an evaluation gives beside the metrics
    state: TrainState  # what training changes and a checkpoint stores: model, optimizer, schedule, averages
    step: Step  # trains on a batch
    toggled: Toggled  # compilation and activation checkpointing
    kernels: Kernels  # how the optimizer updates weights
    initial: InitialWeights  # where the weights come from
    warnings: list[str]  # settings without effect, and what else people should know

    # Parts of these that are used often
    model: nn.Module = field(init=False)  # what is trained
    steps: Any = field(init=False)  # computes loss and outputs of a batch: `Supervised` or `TaskSteps`
    device: torch.device = field(init=False)
    precision: Precision = field(init=False)  # of forward passes
    plan: EpochPlan = field(init=False)  # how an epoch divides into batches and steps
    total_steps: int = field(init=False)  # optimizer steps of the whole run

    def __post_init__(self) -> None:
        self.model, self.steps = self.state.model, self.step.objective
        self.device, self.precision = self.hardware.device, self.hardware.precision
        self.plan, self.total_steps = self.length.plan, self.length.total_steps


def hardware_metrics_of(run: Run) -> HardwareMetrics:
    """The figures about the machine that go into log lines of training, as `log.utilization` and `log.device` ask for them."""
    # Peaks are known in float32, and operations where a loss is computed from the outputs of the model
    counted = run.config.dtype == "float32" and run.data.pairs and isinstance(run.steps, Supervised)
    wanted = run.config.log.utilization if counted else False
    kind = kind_of(run.precision.dtype, run.device)
    found = choose_hardware_metrics(wanted, run.device, kind, lambda: training_flops(run), run.warnings)
    found.ask_driver = asks_driver(run.config.log.device, run.device)
    return found


def training_flops(run: Run, position: Position | None = None, samples: int = 2) -> Flops:
    """Operations of a batch in training, see `count_flops`; everything is left as it is.

    `position` decides what is frozen; None means only what is frozen permanently.
    """
    data = run.data.example_batch(samples).data
    with run.state.freezing.as_at(position), preserved_buffers(run.loss):
        steps = functools.partial(run.steps, data)
        return count_flops(model_of(run.model), samples, steps, run.precision.autocast, run.model)


def validate_limits(run: Run) -> list[str]:
    """Warnings about what is never trained, and what the whole run never comes to; not for a few steps only.

    Raises `UserError` if the weights cannot be averaged as `swa` says, or something waits for evaluations that never happen.
    """
    config, timeline, total_steps, warnings = run.config, run.length.timeline, run.total_steps, []
    samples, batch_size = run.data.train.samples, run.plan.batch_size
    if batch_size > samples:
        warnings.append(f"data.batch_size={batch_size} has no effect above {samples:,}, the size of the training split")
    of_numbers = ("MeanSquaredError", "MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss")
    # A loss for numbers on classes is unusual but runs, so it is worth a warning only
    if str(config.task["_target_"]).endswith(".Classification") and str(config.loss["_target_"]).endswith(of_numbers):
        warnings.append("loss: is one for numbers, on classes: loss=cross_entropy is the usual one for these")
    sizes = config.model.get("size"), (config.model.get("options") or {}).get("min_size")
    if str(config.task["_target_"]).endswith(".Detection") and config.data.image_size not in (None, *sizes):
        problem = "is the edge of mosaics alone: a detector resizes images itself, as"
        warnings.append(f"data.image_size={config.data.image_size} {problem} model.size or model.options.min_size says")
    # Early stopping and Plateau would wait forever without evaluations
    waiting = [f"callbacks.{name}" for name, node in config.callbacks.items() if stops_early(node)]
    schedules = components_of("scheduler", config.scheduler)
    waiting += [key for key, node in schedules.items() if str(node["_target_"]).endswith("Plateau")]
    for key, node in schedules.items():
        if isinstance(warmup := node.get("warmup"), int | float) and warmup > total_steps:
            problem = f"is longer than the run of {total_steps:,} steps; below 1 it is a share of them"
            warnings.append(f"{key}.warmup={warmup:g} {problem}, such as 0.05")
    if run.data.val is None and waiting:
        allowed = "data.split.val=0.1, or a data set with a validation split"
        raise UserError(waiting[0], "waits for evaluations, but there is no validation split", allowed)
    # An average that begins too late is never computed, and the run would end without it
    if run.state.averaged is not None and config.swa is not None:
        start = run.length.swa_start(config.swa)
        first = round(timeline.step(timeline.scaled(start) / timeline.steps + 1))
        if first > total_steps:
            problem = (
                f"{config.swa:g} begins after step {start:,} and first averages weights {first - start:,} steps later, an "
                f"epoch, but the run ends at step {total_steps:,}"
            )
            raise UserError("swa", problem, "a smaller swa, or more epochs")
        # Layers that are frozen at first may train by then, so their BatchNorm counts too
        with run.state.freezing.as_at(None):
            norms = run.state.averaged.norms()
        if norms and run.data.val is None:
            problem = "computes BatchNorm's statistics at evaluations, but there is no validation split"
            raise UserError("swa", problem, "data.split.val=0.1, ema instead of swa, or a model without BatchNorm")
    # A part that is never trained is allowed, but rarely what was meant
    for part in run.state.freezing.parts:
        end = timeline.step(part.epochs or 0) if part.steps is None else part.steps
        if not part.permanent and end >= total_steps:
            warnings.append(f"freeze: {part.name} is never trained: the run ends after {total_steps:,} steps")
    return warnings
