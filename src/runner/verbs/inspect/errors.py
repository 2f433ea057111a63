"""The wrong predictions of a model: the most confident ones, and how often classes are confused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from runner.build.run import Run
from runner.data.build import SplitData
from runner.data.loaders import Batch
from runner.engine.metrics import class_numbers
from runner.instrument.no_trace import evaluating


@dataclass(frozen=True)
class Mistake:
    """A sample whose largest logit is not that of its class."""

    probability: float  # softmax of that logit
    index: int  # of the sample in its data set
    true: int  # its class
    predicted: int  # the class that it was taken for
    image: Tensor  # (C, H, W), as the model was given it, on the CPU


def batches_of(split: SplitData, limit: int | None) -> Iterator[Batch]:
    """The batches of a split as it is evaluated."""
    count = math.ceil(split.samples / split.loader.batch_size)
    return split.loader.batches(0, 0, count if limit is None else min(count, limit))


def mistakes_in(
    training: Run, split: SplitData, classes: int, *, limit: int | None, most: int
) -> tuple[Tensor, list[Mistake]]:
    """Evaluate a split, with no more than a batch of images in memory.

    Returns:
        The number of samples by class and predicted class, int64 (C, C); and at most `most` mistakes, the surest first.
    """
    confusion = torch.zeros(classes, classes, dtype=torch.int64)
    surest: list[Mistake] = []
    with evaluating(training.model):
        for batch in batches_of(split, limit):
            with training.precision.autocast():
                logits = training.model(batch.images)
            probabilities, predicted = (largest.cpu() for largest in logits.float().softmax(dim=1).max(dim=1))
            true = class_numbers(training.task.targets(batch.targets)).cpu()
            confusion += torch.bincount(true * classes + predicted, minlength=classes * classes).view(classes, classes)
            for place in (predicted != true).nonzero().flatten().tolist():
                sure = float(probabilities[place])
                # Images are copied only of mistakes that are among the surest so far.
                if len(surest) < most or sure > surest[-1].probability:
                    image = batch.images[place].float().cpu().clone()
                    mistake = Mistake(sure, int(batch.indices[place]), int(true[place]), int(predicted[place]), image)
                    surest = sorted([*surest, mistake], key=lambda each: -each.probability)[:most]
    return confusion, surest
