"""Evaluation: a split through the model in inference mode, with nothing about training changed by it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from runner.engine.errors import Interrupted
from runner.engine.step import Batch
from runner.instrument.no_trace import evaluating


class Metric(Protocol):
    """The part of a torchmetrics metric that is used."""

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        """Take a batch into account."""

    def compute(self) -> Tensor:
        """The value over all batches, a scalar unless it is used for tables."""


class Source(Protocol):
    """A loader, see `runner.data.loaders.Loader`."""

    @property
    def samples(self) -> int:
        """Samples of an epoch."""

    @property
    def batch_size(self) -> int:
        """Samples of a batch."""

    def batches(self, epoch: int, start: int, stop: int) -> Iterator[Any]:
        """Batches of an epoch."""


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
    """Evaluate a split.

    Args:
        model: the model; its modes and buffers are left as they are, and so are buffers of the loss.
        source: the split.
        targets_of: targets of the data set -> targets of the loss and the metrics.
        loss: (logits, targets) -> scalar mean over the samples.
        metrics: fresh metrics by name, on the model's device; afterwards they hold the whole split.
        autocast: gives the context that the forward pass runs in.
        limit: batches to use; None for all.
        interrupted: asked before every batch; True ends the evaluation.

    Returns:
        `loss` and every metric with a scalar value, as floats.

    Raises:
        Interrupted: if `interrupted` said so.
    """
    batches = math.ceil(source.samples / source.batch_size)
    if limit is not None:
        batches = min(batches, limit)
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
            # A copy, as a metric may keep it, and the output of a CUDA graph lies where the next one will.
            outputs = logits.float() if logits.dtype != torch.float32 else logits.clone()
            for metric in metrics.values():
                metric.update(outputs, targets)
        values = {name: metric.compute() for name, metric in metrics.items()}
    if total is None:
        raise ValueError("there is no sample to evaluate")
    scalars = {name: float(value) for name, value in values.items() if value.numel() == 1}
    return {"loss": float(total) / samples, **scalars}
