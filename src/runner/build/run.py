"""The objects of a run, built in the order in which one thing needs another."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from runner.build.batch_size import settle_batch_size
from runner.build.determinism import named
from runner.build.finetune import freeze, initialise, known_head, never_thawed
from runner.build.init_from import Started, start_from
from runner.build.metrics import monitored, stops_early
from runner.build.model import as_given, build_learner, check_batches_of_one, place, probe
from runner.build.optimizer import build_optimizer, build_schedule
from runner.build.weight_average import build_averaged, check_average, with_swa_rate
from runner.checkpoint.rng import seed_everything
from runner.config.errors import UserError
from runner.config.schema.train import Train
from runner.data.build import DataModule, build_data
from runner.engine.clipping import AdaptiveClip
from runner.engine.loop import Limits
from runner.engine.nonfinite import NonFiniteGuard
from runner.engine.oom_retry import OOMRetryStep
from runner.engine.plan import EpochPlan, Timeline
from runner.engine.state import FiniteMean, RunningMean, Position, TrainState
from runner.engine.step import StepConfig, train_step
from runner.engine.tasks import Task
from runner.instrument.flops import Flops, count_flops
from runner.instrument.no_trace import preserved_buffers
from runner.optim.kernels import Kernels, plain_step
from runner.runtime.device import choose_device, configure_torch, prepare_repeating
from runner.runtime.precision import Precision, choose_precision
from runner.runtime.toggles import Toggled, toggle


@dataclass
class Training:
    """The objects of a run before it starts: what is trained, on what, and how."""

    device: torch.device
    device_reason: str
    precision: Precision
    splits: DataModule
    plan: EpochPlan
    timeline: Timeline
    task: Task
    loss: nn.Module
    limits: Limits
    total_steps: int
    monitor: str
    mode: str
    state: TrainState
    parts: StepConfig
    step: Callable[[TrainState, StepConfig, Any, float, int, bool], None]
    toggled: Toggled
    kernels: Kernels
    started: Started | None
    rows: list[tuple[str, str, str]]
    warnings: list[str]

    @property
    def model(self) -> nn.Module:
        """What is trained."""
        return self.state.model


def build_training(
    config: Train,
    values: dict[str, Any],
    start: Position | None = None,
    splits: DataModule | None = None,
    make_cache: bool = True,
    fresh: bool = True,
) -> Training:
    """Build what a run trains, in the order in which one thing needs another.

    Args:
        config: the validated config.
        values: the same as plain containers; what was taken from the data is written into them.
        start: where training starts, if not at its beginning.
        splits: the data, where it was assembled before from the same settings.
        make_cache: whether a cache of `data.cache` that is not there may be made.
        fresh: whether weights begin here; where a checkpoint brings them, here or at `start`, no others are read or drawn.

    Raises:
        UserError: if settings, data, model, loss and optimizer do not fit together.
    """
    fitting = None
    if config.data.batch_size == "auto":
        fitting = settle_batch_size(
            config, values, functools.partial(build_training, make_cache=make_cache, fresh=fresh)
        )

    # Device and precision
    prepare_repeating(config.deterministic)
    device, device_reason = choose_device(config.device)
    warnings = set_switches(config, device)
    precision = choose_precision(config.amp, device)

    # Data
    splits = splits or build_data(
        config.data, config.transform, config.seed, device, config.evaluate.batch_size, config.channels_last, make_cache
    )
    if fitting is not None:
        splits.choices.append(("batch", f"{fitting.size:,} samples", fitting.reason))
    values["data"]["normalize"] = {"mean": list(splits.mean), "std": list(splits.std)}
    data = config.data
    size = data.samples_a_batch
    plan = EpochPlan(splits.train.samples, size, config.accumulate, data.drop_last, config.limit.train_batches)
    if start is not None and start.batch >= max(1, plan.batches):
        raise UserError(
            f"ckpt_path: the checkpoint is at batch {start.batch} of an epoch, and an epoch of this data has {plan.batches}\n"
            "    allowed: the data that the run was trained on, or a checkpoint from the end of an epoch"
        )
    if plan.batches == 0:
        raise UserError(
            f"data.batch_size: {size} is more than the {plan.samples} training samples, and "
            "data.drop_last=true leaves no batch\n    allowed: a smaller data.batch_size, or data.drop_last=false"
        )

    # Task, model, loss
    seed_everything(config.seed)
    fresh = fresh and start is None
    task, model, loss = build_learner(values, config, splits, fetch_weights=fresh)
    place(model, loss, device, config.channels_last)
    single = probe(task, model, loss, splits)
    image = as_given(splits)
    monitor, mode = monitored(config, task, splits)
    limits = Limits(config.epochs, config.max_steps, config.evaluate.every_epochs, config.evaluate.every_steps)
    total_steps = limits.total_steps(plan, start)

    # Initial weights, which a checkpoint to resume brings along, and what is not trained
    rows: list[tuple[str, str, str]] = []
    started: Started | None = None
    if fresh:
        rows += initialise(config, model, image, splits.class_counts)
        if config.init_from is not None:
            started = start_from(config, model, known_head(model, image), splits.classes)
    freezing = freeze(config, model, image)
    check_batches_of_one(model, single, plan)
    toggled = toggle(config, model, loss, precision, image)

    # Optimizer and schedule
    optimizer, kernels = build_optimizer(config, model)
    toggled.compile_step_of(optimizer)
    timeline = Timeline.of(start or Position(), plan)
    schedule = build_schedule(config, limits, timeline, total_steps, mode)
    schedule = with_swa_rate(schedule, config, timeline, limits, total_steps)
    scaled = precision.scaler is not None
    guard = NonFiniteGuard(model, optimizer, config.on_nonfinite, scaled)
    if guard.waits and device.type != "cpu":
        warnings.append(
            f"every step waits for the {device.type} device, as {type(optimizer).__name__} without a fused kernel has to be "
            "kept from steps whose gradients are not finite"
        )
    meter = FiniteMean(device) if config.on_nonfinite == "skip" else RunningMean(device)
    averaged = build_averaged(config, model, optimizer, timeline, limits, total_steps)
    state = TrainState(model, optimizer, schedule, precision.scaler, meter, averaged=averaged)
    state.freezing = freezing
    state.position.turns = [list(turn) for turn in timeline.turns]
    parts = StepConfig(
        targets=task.targets,
        loss=loss,
        autocast=precision.autocast,
        clip_norm=config.grad_clip.norm,
        clip_value=config.grad_clip.value,
        clip_adaptive=AdaptiveClip.of(model, config.grad_clip.agc) if config.grad_clip.agc is not None else None,
        compiled_loss=toggled.objective,
        guard=guard,
        optimizer_step=plain_step(optimizer),
    )
    step = OOMRetryStep(plan.batch_size) if config.on_oom == "split" else train_step
    return Training(
        device=device,
        device_reason=device_reason,
        precision=precision,
        splits=splits,
        plan=plan,
        timeline=timeline,
        task=task,
        loss=loss,
        limits=limits,
        total_steps=total_steps,
        monitor=monitor,
        mode=mode,
        state=state,
        parts=parts,
        step=named(step) if config.deterministic is True else step,
        toggled=toggled,
        kernels=kernels,
        started=started,
        rows=rows,
        warnings=[*warnings, *(started.warnings if started else []), *toggled.warnings, *splits.warnings],
    )


def set_switches(config: Train, device: torch.device) -> list[str]:
    """Set torch's process-wide switches as the config says; gives warnings about those without effect."""
    switches = (config.cudnn_benchmark, config.tf32, config.detect_anomaly, config.matmul_precision)
    return configure_torch(device, config.threads, config.deterministic, *switches)


def look_ahead(config: Train, training: Training) -> list[str]:
    """Warnings about what the config asks for and the whole run never comes to; of no use where fewer steps are taken.

    Raises:
        UserError: if it cannot average weights as `swa` says, or waits for evaluations that there will not be.
    """
    check_evaluated(config, training)
    check_average(config, training)
    return never_thawed(training.state.freezing, training.total_steps, training.timeline)


def check_evaluated(config: Train, training: Training) -> None:
    """Refuse what follows evaluations in a run without a validation split; keys that ask for none were refused before.

    Raises:
        UserError: if there is something.
    """
    if training.splits.val is not None:
        return
    waiting = [f"callbacks.{name}" for name, node in config.callbacks.items() if stops_early(node)]
    if str(config.scheduler.get("_target_", "")).endswith("Plateau"):
        waiting.append("scheduler")
    for key in waiting:
        raise UserError(
            f"{key}: waits for evaluations, but there is no validation split\n"
            f"    allowed: data.split.val=0.1, a data set with a validation split, or no {key}"
        )


def training_flops(training: Training, position: Position | None = None, samples: int = 2) -> Flops:
    """Operations of a batch in training, see `count_flops`; everything is left as it is.

    Args:
        training: the objects of the run.
        position: of the step, which says what is frozen; None for where all that is frozen for a while is trained.
        samples: samples of the batch.
    """
    splits = training.splits
    images = as_given(splits, samples)
    targets = training.task.targets(splits.example[1].expand(samples, *splits.example[1].shape[1:]))
    with training.state.freezing.as_at(position), preserved_buffers(training.loss):
        return count_flops(
            training.model, images, lambda logits: training.loss(logits, targets), training.precision.autocast
        )
