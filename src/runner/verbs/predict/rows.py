"""From the outputs of a model to a row for each image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from runner.config.errors import UserError
from runner.verbs.predict.tables import Row


@dataclass(frozen=True)
class RowBuilder:
    """Makes a row of a model's outputs for an image.

    Attributes:
        classes: their names, one for each output; empty for regression.
        top_k: number of classes in a row.
        probabilities: whether to add the probability of every class.
        logits: whether to add the outputs themselves.
    """

    classes: tuple[str, ...]
    top_k: int
    probabilities: bool
    logits: bool

    def __post_init__(self) -> None:
        if not self.classes:
            for name, given in (("top_k", self.top_k > 1), ("probabilities", self.probabilities)):
                if given:
                    raise UserError(name, "this model was trained for numbers, not classes", "its default")
        elif self.top_k > (count := len(self.classes)):
            raise UserError("top_k", f"is {self.top_k}, and there are {count} classes", f"1 to {count}")

    @property
    def lists(self) -> dict[str, Sequence[str]]:
        """Columns that hold lists, with a name for each item."""
        return {"probabilities": self.classes, "logits": self.classes}

    def rows(self, outputs: Tensor, first_cells: Sequence[Row]) -> list[Row]:
        """A row for each image.

        Args:
            outputs: of the model, float32 (B, C), on the CPU.
            first_cells: the beginning of each row, such as the path of the image.
        """
        if not self.classes:
            return [cells | _numbers(values) for cells, values in zip(first_cells, outputs.tolist(), strict=True)]
        probabilities = outputs.softmax(1)
        # A stable sort: of equal outputs, the class that comes first ranks first, as in metrics.
        order = torch.sort(outputs, dim=1, descending=True, stable=True).indices[:, : self.top_k]
        likeliest = probabilities.gather(1, order).tolist()
        rows = []
        for index, (cells, best, shares) in enumerate(zip(first_cells, order.tolist(), likeliest, strict=True)):
            row = dict(cells)
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
