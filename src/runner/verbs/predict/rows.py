"""From the outputs of a model to what is said of each image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runner.config.errors import UserError
from runner.verbs.predict.tables import Row


@dataclass(frozen=True)
class Teller:
    """Says in a row what a model's outputs for an image mean.

    Attributes:
        classes: their names, one an output; empty where the outputs are numbers that were learned.
        top_k: classes to name.
        probabilities: whether the probability of every class is added.
        logits: whether the outputs are added as they are.
    """

    classes: tuple[str, ...]
    top_k: int
    probabilities: bool
    logits: bool

    def __post_init__(self) -> None:
        wanted = [name for name, asked in (("top_k", self.top_k > 1), ("probabilities", self.probabilities)) if asked]
        if not self.classes and wanted:
            raise UserError(f"{wanted[0]}: this model was trained for numbers, not classes\n    allowed: its default")
        if self.classes and self.top_k > len(self.classes):
            raise UserError(
                f"top_k: is {self.top_k}, and there are {len(self.classes)} classes\n    allowed: 1 to {len(self.classes)}"
            )

    @property
    def lists(self) -> dict[str, Sequence[str]]:
        """Columns that hold lists, with a name for each item."""
        return {"probabilities": self.classes, "logits": self.classes}

    def rows(self, outputs: Tensor, subjects: Sequence[Row]) -> list[Row]:
        """A row an image.

        Args:
            outputs: of the model, float32 (B, C), on the CPU.
            subjects: what to say first of each, such as the path of its file.
        """
        if not self.classes:
            told = [_numbers(values) for values in outputs.tolist()]
            return [subject | row for subject, row in zip(subjects, told, strict=True)]
        probabilities = outputs.softmax(1)
        # A stable sort: of equal outputs, the class that comes first is named first, as metrics take it.
        order = torch.sort(outputs, dim=1, descending=True, stable=True).indices[:, : self.top_k]
        likeliest = probabilities.gather(1, order).tolist()
        rows = []
        for index, (subject, best, shares) in enumerate(zip(subjects, order.tolist(), likeliest, strict=True)):
            row = dict(subject)
            for rank, (number, share) in enumerate(zip(best, shares, strict=True), 1):
                suffix = "" if rank == 1 else f"_{rank}"
                row |= {f"prediction{suffix}": self.classes[number], f"probability{suffix}": share}
            if self.probabilities:
                row["probabilities"] = probabilities[index].tolist()
            if self.logits:
                row["logits"] = outputs[index].tolist()
            rows.append(row)
        return rows


def _numbers(values: list[float]) -> Row:
    if len(values) == 1:
        return {"prediction": values[0]}
    return {f"prediction_{index}": value for index, value in enumerate(values)}
