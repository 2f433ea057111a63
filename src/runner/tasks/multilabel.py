"""Any number of labels per sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from runner.engine.metrics import AveragePrecision, LabelCounts, LabelScore
from runner.engine.protocols import Metric
from runner.tasks.task import at_least_float32, first_wrong, value_count


class MultiLabel:
    """Any number of labels per sample; logits (B, L), targets float (B, L), 0 or 1, or between for blended samples.

    Args:
        num_classes: L, the number of labels.
        threshold: probability above which a label is predicted.
    """

    monitor = "val/map"
    mode: Literal["min", "max"] = "max"
    activation = "sigmoid"
    expected = "a vector with 0 or 1 for each label; task=classification for one class number per sample"

    def __init__(self, num_classes: int, threshold: float = 0.5) -> None:
        if num_classes < 1:
            raise ValueError(f"num_classes, the number of labels, must be at least 1, got {num_classes}")
        if not 0 < threshold < 1:
            raise ValueError(f"threshold must be a probability between 0 and 1, got {threshold}")
        self.num_classes, self.threshold = num_classes, threshold

    def outputs(self, classes: Sequence[str]) -> int:
        """One logit per label."""
        return self.num_classes

    def targets(self, targets: Tensor) -> Tensor:
        """Zeros and ones as at least float32."""
        return at_least_float32(targets)

    def wrong_target(self, targets: Tensor, training: bool) -> tuple[int, str] | None:
        """The first target that is not a vector of 0 and 1, in training of numbers from 0 to 1; None if all are valid."""
        if targets.ndim != 2 or targets.shape[1] != self.num_classes:
            return 0, f"has {value_count(targets)}, and a vector for {self.num_classes} labels is expected"
        if training and targets.is_floating_point():
            return first_wrong(targets, ~((targets >= 0) & (targets <= 1)).all(1), "which are not all from 0 to 1")
        return first_wrong(targets, ~((targets == 0) | (targets == 1)).all(1), "which are not all 0 or 1")

    def metric_names(self) -> list[str]:
        """Mean over the labels of F1 and of the average precision."""
        return ["f1", "map"]

    def metrics(self, device: torch.device) -> dict[str, Metric]:
        """Macro F1 at the threshold, and the mean average precision, which needs none."""
        return {"f1": LabelCounts(self.num_classes, device, self.threshold), "map": AveragePrecision()}

    def tables(self, device: torch.device) -> dict[str, Metric]:
        """F1, precision, recall, average precision and the number of samples of each label."""
        scores: tuple[LabelScore, ...] = ("f1", "precision", "recall", "positives")
        counts: dict[str, Metric] = {
            f"label_{score}": LabelCounts(self.num_classes, device, self.threshold, score, each=True)
            for score in scores
        }
        return counts | {"label_average_precision": AveragePrecision(each=True)}

    def for_metrics(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities float (B, L), and labels int64 (B, L)."""
        return outputs.sigmoid(), (targets > 0.5).long()
