"""Metrics of the shipped tasks, as sums over the samples.

Own code instead of torchmetrics, whose import takes longer than a short run; where torchmetrics has the metric, the values are
the same bits. Each takes (logits, targets) batch by batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

LabelScore = Literal["f1", "precision", "recall", "positives"]
PixelScore = Literal["miou", "accuracy", "iou", "recall", "matrix"]


class Additive:
    """Base of metrics whose states are added up over batches: tensors, or lists of what the batches had.

    `states` holds the value of each at the start; the states themselves are attributes of the same names.
    """

    higher_is_better = True

    def __init__(self, states: Mapping[str, Tensor | list[Any]]) -> None:
        self.states = dict(states)
        self.reset()

    def reset(self) -> None:
        """Forget all batches."""
        for name, start in self.states.items():
            setattr(self, name, [] if isinstance(start, list) else start.clone())


class Accuracy(Additive):
    """Share of the samples whose largest logit (B, C) is that of the target: class numbers (B,), or probabilities (B, C)."""

    right: Tensor
    count: Tensor

    def __init__(self, device: torch.device) -> None:
        zero = torch.zeros((), dtype=torch.int64, device=device)
        super().__init__({"right": zero, "count": zero})

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add a batch."""
        self.right = self.right + (outputs.argmax(1) == class_numbers(targets)).sum()
        self.count = self.count + len(targets)

    def compute(self) -> Tensor:
        """Float32 ()."""
        return self.right.float() / self.count.float()


class Errors(Additive):
    """Mean absolute error, or root of the mean squared error, of outputs and targets (B, K), in the unit of the targets.

    Args:
        outputs: K.
        squared: whether the errors are squared.
        each: whether to give the error of each output, (K,), instead of one over all of them, ().
    """

    higher_is_better = False
    total: Tensor
    count: Tensor

    def __init__(self, outputs: int, device: torch.device, squared: bool, each: bool = False) -> None:
        self._squared, self._each = squared, each
        zero = torch.zeros((), dtype=torch.int64, device=device)
        super().__init__({"total": torch.zeros(outputs, device=device), "count": zero})

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add a batch."""
        if len(self.total) == 1:  # a vector is summed in another order than a column
            outputs, targets = outputs.view(-1), targets.view(-1)
        apart = outputs - targets
        sums = (apart * apart if self._squared else apart.abs()).sum(0)
        self.total = self.total + sums.to(self.total.dtype)
        self.count = self.count + len(targets)

    def compute(self) -> Tensor:
        """Float32 () or (K,)."""
        means = self.total / self.count
        if not self._each:
            means = means.mean() if len(means) > 1 else means.squeeze(0)
        return means.sqrt() if self._squared else means


class LabelCounts(Additive):
    """A score of each of L labels, from how often it was predicted and true; logits (B, L), targets (B, L) above 0.5 are true.

    Args:
        labels: L.
        threshold: probability above which a label is predicted.
        score: F1, precision or recall, which are 0 where nothing was to divide by; or the number of samples with the label.
        each: whether to give the score of each label, (L,), instead of their mean, ().
    """

    both: Tensor
    predicted: Tensor
    true: Tensor

    def __init__(
        self, labels: int, device: torch.device, threshold: float, score: LabelScore = "f1", each: bool = False
    ) -> None:
        self._threshold, self._score, self._each = threshold, score, each
        zeros = torch.zeros(labels, dtype=torch.int64, device=device)
        super().__init__({"both": zeros, "predicted": zeros, "true": zeros})

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add a batch."""
        predicted, true = outputs.sigmoid() > self._threshold, targets > 0.5
        self.both = self.both + (predicted & true).sum(0)
        self.predicted = self.predicted + predicted.sum(0)
        self.true = self.true + true.sum(0)

    def compute(self) -> Tensor:
        """Float32 () or (L,); int64 for the number of samples."""
        if self._score == "positives":
            return self.true
        of = {"f1": self.predicted + self.true, "precision": self.predicted, "recall": self.true}[self._score]
        scores = (2 if self._score == "f1" else 1) * self.both.float() / of.clamp_min(1).float()
        return scores if self._each else scores.mean()


class AveragePrecision(Additive):
    """Average precision of each of L labels: the mean of the precision at each sample that has the label, by falling logit.

    Samples with equal logits count together. A label that no sample has is NaN, and does not count in the mean. Logits (B, L) and
    targets (B, L), of which those above 0.5 are true, are kept until the end.

    Args:
        each: whether to give the value of each label, (L,), instead of their mean, ().
    """

    outputs: list[Tensor]
    true: list[Tensor]

    def __init__(self, each: bool = False) -> None:
        self._each = each
        super().__init__({"outputs": [], "true": []})

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add a batch."""
        self.outputs = [*self.outputs, outputs.detach().float().clone()]
        self.true = [*self.true, targets > 0.5]

    def compute(self) -> Tensor:
        """Float32 () or (L,)."""
        outputs, true = torch.cat(self.outputs), torch.cat(self.true)
        found = torch.stack([_average_precision(*pair) for pair in zip(outputs.T, true.T, strict=True)]).float()
        return found if self._each else found.nanmean()


def _average_precision(scores: Tensor, true: Tensor) -> Tensor:
    ordered, order = scores.sort(descending=True, stable=True)
    last = torch.ones_like(true)  # of equal scores
    last[:-1] = ordered[:-1] != ordered[1:]
    hits = true[order].double().cumsum(0)
    precision = (hits / torch.arange(1, len(hits) + 1, device=hits.device))[last]
    hits = hits[last]
    return (hits.diff(prepend=hits.new_zeros(1)) * precision).sum() / hits[-1]


class PixelCounts(Additive):
    """A score of the confusion matrix of all pixels: predicted and true classes, int64 (B, H, W).

    Args:
        classes: C; pixels whose true class is not one of them do not count.
        ignore_index: true class of further pixels that do not count.
        score: the mean IoU over the classes that are predicted or true somewhere; the share of the pixels with the right class;
            the IoU or the share of its pixels that are found, of each class (C,), NaN where there is nothing to divide by; or
            the matrix, true classes by predicted ones, int64 (C, C).
    """

    matrix: Tensor

    def __init__(self, classes: int, ignore_index: int, device: torch.device, score: PixelScore) -> None:
        self._classes, self._ignored, self._score = classes, ignore_index, score
        super().__init__({"matrix": torch.zeros(classes, classes, dtype=torch.int64, device=device)})

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Add a batch."""
        counts = (targets != self._ignored) & (targets >= 0) & (targets < self._classes)
        pairs = targets[counts] * self._classes + outputs[counts]
        self.matrix = self.matrix + pairs.bincount(minlength=self._classes**2).view_as(self.matrix)

    def compute(self) -> Tensor:
        """Float64 () or (C,), or int64 (C, C), on the CPU."""
        matrix = self.matrix.cpu()
        if self._score == "matrix":
            return matrix
        right, true, predicted = matrix.diagonal().double(), matrix.sum(1), matrix.sum(0)
        if self._score == "accuracy":
            return right.sum() / matrix.sum()
        shares = right / (true if self._score == "recall" else true + predicted - right)
        return shares.nanmean() if self._score == "miou" else shares


def class_numbers(targets: Tensor) -> Tensor:
    """Class numbers (B,) as they are; of probabilities (B, C) the class of the largest."""
    return targets.argmax(1) if targets.ndim == 2 else targets
