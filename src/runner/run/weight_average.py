"""Averages of the weights: which one is built, and when SWA begins."""

from __future__ import annotations

import torch
from torch import nn

from runner.config.schema.train import Train
from runner.engine.weight_average import AveragedModel
from runner.run.length import RunLength


def build_averaged(
    config: Train, model: nn.Module, loss: nn.Module, optimizer: torch.optim.Optimizer, length: RunLength
) -> AveragedModel | None:
    """The average that `ema` or `swa` asks for, of model and loss; None for neither."""
    # Frozen weights do not change, so their average is what they are
    trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    parameters = [each for each in (*model.parameters(), *loss.parameters()) if id(each) in trained]
    can_skip = config.on_nonfinite == "skip"
    if config.ema is not None:
        return AveragedModel(
            "ema", model, parameters, decay=config.ema, warmup=config.averaging.warmup, can_skip=can_skip, loss=loss
        )
    if config.swa is None:
        return None
    # A resumed run may have epochs of another length, and SWA takes weights once an epoch
    timeline, start = length.timeline, swa_start(config.swa, length)
    turn, epoch = timeline.turns[-1] if timeline.turns else (0, 0)
    if start < turn:
        # The next weights are taken a whole number of epochs after the start, the last ones before the turn.
        part = (timeline.scaled(start) / timeline.steps - epoch) % 1
        start = turn + round(part * timeline.steps) - timeline.steps
    return AveragedModel("swa", model, parameters, start=start, every=timeline.steps, can_skip=can_skip, loss=loss)


def swa_start(swa: float, length: RunLength) -> int:
    """The optimizer step after which SWA begins, given as a share of the run, or from 1 on in epochs."""
    timeline = length.timeline
    if swa >= 1:
        return round(timeline.step(swa))
    if timeline.turns and length.limits.epochs_decide(timeline):
        return round(timeline.step(swa * timeline.scaled(length.total_steps) / timeline.steps))
    return round(swa * length.total_steps)
