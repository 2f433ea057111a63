"""Averaged weights: what is averaged, evaluated beside the weights themselves, and with which learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from runner.build.batch_size import memory_told
from runner.checkpoint.weights import weights_of
from runner.config.errors import UserError
from runner.config.schema.train import Train
from runner.engine.errors import Interrupted
from runner.engine.loop import Limits
from runner.engine.plan import Timeline
from runner.engine.state import Schedule, load_weights
from runner.engine.weight_average import AveragedModel, prefix
from runner.instrument.no_trace import preserved_rng
from runner.optim.schedules import Annealed

if TYPE_CHECKING:
    from runner.build.run import Training

_LESS = "a smaller data.batch_size or evaluate.batch_size, or amp=true"


def build_averaged(
    config: Train,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    timeline: Timeline,
    limits: Limits,
    total_steps: int,
) -> AveragedModel | None:
    """The average that `ema` or `swa` asks for; None for neither."""
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    parameters = [parameter for parameter in model.parameters() if id(parameter) in trained]
    leaves_out = config.on_nonfinite == "skip"
    if config.ema is not None:
        warmup = config.averaging.warmup
        return AveragedModel("ema", model, parameters, config.ema, warmup, leaves_out=leaves_out)
    if config.swa is None:
        return None
    start = swa_start(config.swa, timeline, limits, total_steps)
    turn, epoch = timeline.turns[-1] if timeline.turns else (0, 0)
    if start < turn:
        # The next weights are taken a whole number of epochs after the start, the last ones before the turn.
        part = (timeline.scaled(start) / timeline.steps - epoch) % 1
        start = turn + round(part * timeline.steps) - timeline.steps
    return AveragedModel("swa", model, parameters, start=start, every=timeline.steps, leaves_out=leaves_out)


def check_average(config: Train, training: Training) -> None:
    """See that the run of a training averages weights at all, and that their average can be used.

    Raises:
        UserError: if it ends before SWA takes its first weights, or never computes BatchNorm's statistics for their mean.
    """
    averaged = training.state.averaged
    if averaged is None or config.swa is None:
        return
    timeline, total_steps = training.timeline, training.total_steps
    start = swa_start(config.swa, timeline, training.limits, total_steps)
    first = round(timeline.step(timeline.scaled(start) / timeline.steps + 1))
    if first > total_steps:
        raise UserError(
            f"swa: {config.swa:g} begins after step {start:,} and takes weights {first - start:,} steps later, an epoch, but "
            f"the run ends at step {total_steps:,}\n    allowed: a smaller swa, or more epochs"
        )
    with training.state.freezing.as_at(None):
        norms = averaged.norms()
    if norms and training.splits.val is None:
        raise UserError(
            "swa: computes BatchNorm's statistics at evaluations, but there is no validation split\n"
            "    allowed: data.split.val=0.1, ema in place of swa, or a model without BatchNorm"
        )


def swa_start(swa: float, timeline: Timeline, limits: Limits, total_steps: int) -> int:
    """The optimizer step after which SWA begins, given as a share of the run, or from 1 on in epochs."""
    if swa >= 1:
        return round(timeline.step(swa))
    if timeline.turns and limits.epochs_decide(timeline):
        return round(timeline.step(swa * timeline.scaled(total_steps) / timeline.steps))
    return round(swa * total_steps)


def with_swa_rate(schedule: Schedule, config: Train, timeline: Timeline, limits: Limits, total_steps: int) -> Schedule:
    """The schedule, going over to SWA's rate where SWA begins."""
    if config.swa is None or config.averaging.lr_factor is None:
        return schedule
    start = swa_start(config.swa, timeline, limits, total_steps)
    steps = config.averaging.anneal_epochs * timeline.steps
    return Annealed(schedule, start, steps, config.averaging.lr_factor, timeline.scaled)


def evaluate_both(
    training: Training,
    config: Train,
    evaluate: Callable[[], dict[str, float]],
    interrupted: Callable[[], bool] = lambda: False,
) -> dict[str, float]:
    """Evaluate the weights, and their average where there is one: `val/loss` and `val/ema_loss`, and so on.

    Before SWA begins, what would be averaged are the weights themselves, so their metrics stand for both.

    Args:
        training: the objects of the run.
        config: the config.
        evaluate: evaluates the model as it is; gives metrics as {"val/loss": 0.1, ...}.
        interrupted: asked before every batch that BatchNorm's statistics are computed from; True ends that.

    Raises:
        Interrupted: if `interrupted` said so.
        UserError: if memory does not suffice for these batches.
    """
    found, averaged = evaluate(), training.state.averaged
    if averaged is None:
        return found
    others = found
    if averaged.begun:
        with averaged.applied():
            if averaged.kind == "swa":
                with memory_told("data.batch_size", training.plan.batch_size, _LESS):
                    averaged.recalibrate(lambda: _feed(training, config.averaging.recalibrate_batches, interrupted))
            others = evaluate()
    start = f"/{prefix(averaged.kind)}"
    return found | {name.replace("/", start, 1): value for name, value in others.items()}


def _feed(training: Training, limit: int | None, interrupted: Callable[[], bool]) -> None:
    """Send the training split, as it is evaluated, through the model, in batches of the size that it is trained with.

    The statistics depend on that size, and must not on how many samples an evaluation takes at once.
    """
    loader, size = training.splits.train_for_eval.loader, training.plan.batch_size
    samples = loader.samples if limit is None else min(loader.samples, limit * size)
    if samples > size and samples % size == 1:
        samples -= 1  # a single sample has no variance
    read = loader.batches(0, 0, math.ceil(samples / loader.batch_size))
    with preserved_rng(), torch.no_grad():
        for images in _in_batches_of(size, (batch.images for batch in read), samples):
            if interrupted():
                raise Interrupted
            with training.precision.autocast():
                training.model(images)


def _in_batches_of(size: int, batches: Iterable[Tensor], samples: int) -> Iterator[Tensor]:
    """The first `samples` samples of batches (B, ...), in other batches, of which only the last may be smaller."""
    rest: Tensor | None = None
    for batch in batches:
        left = batch[:samples]
        samples -= len(left)
        left = left if rest is None else torch.cat([rest, left])
        while len(left) >= size or (len(left) and not samples):
            yield left[:size].clone()  # as kernels may round differently where memory begins elsewhere
            left = left[size:]
        rest = left


def load_best(training: Training, contents: dict[str, Any]) -> str:
    """Load the weights of a checkpoint that its best evaluation was of; gives what they are, see `weights_of`."""
    weights, kind = weights_of(contents)
    load_weights(training.model, weights)
    return kind
