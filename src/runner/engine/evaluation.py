"""Evaluation of a split in inference mode, which changes nothing about training."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from runner.engine.errors import Interrupted
from runner.engine.protocols import Batch, Metric, Source
from runner.instrument.no_trace import evaluating


def evaluate(
    model: nn.Module,
    source: Source,
    targets_of: Callable[[Tensor], Tensor],
    loss: Callable[[Tensor, Tensor], Tensor],
    metrics: Mapping[str, Metric],
    autocast: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    limit: int | None = None,
    interrupted: Callable[[], bool] = lambda: False,
) -> dict[str, float]:
    """Evaluate a split; modes and buffers of model and loss do not change.

    Args:
        model: the model.
        source: the split.
        targets_of: converts targets of the data set to targets of the loss and the metrics.
        loss: (logits, targets) -> scalar mean over the samples.
        metrics: fresh metrics by name, on the model's device; afterwards they contain the whole split.
        autocast: context manager for the forward pass.
        limit: batches to use; None for all.
        interrupted: called before every batch; True raises `Interrupted`.

    Returns:
        `loss` and every metric with a scalar value, as floats.
    """
    batches = math.ceil(source.samples / source.batch_size)
    batches = batches if limit is None else min(batches, limit)
    total: Tensor | None = None
    samples = 0
    with evaluating(model, loss):
        batch: Batch
        for batch in source.batches(0, 0, batches):
            if interrupted():
                raise Interrupted
            targets = targets_of(batch.targets)
            with autocast():
                logits = model(batch.images)
                value = loss(logits, targets)
            size = len(targets)
            wide = value.double() if value.device.type != "mps" else value.float()
            total = wide * size if total is None else total + wide * size
            samples += size
            # A copy, because a metric may keep it, and a CUDA graph reuses the memory of its output.
            outputs = logits.float() if logits.dtype != torch.float32 else logits.clone()
            for metric in metrics.values():
                metric.update(outputs, targets)
        values = {name: metric.compute() for name, metric in metrics.items()}
    if total is None:
        raise ValueError("there is no sample to evaluate")
    scalars = {name: float(value) for name, value in values.items() if value.numel() == 1}
    return {"loss": float(total) / samples, **scalars}
