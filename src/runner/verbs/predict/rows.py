"""From the outputs of a model to a row for each image."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from runner.base.errors import UserError
from runner.base.files import finite, writing
from runner.instrument.nested import mapped_items
from runner.verbs.predict.tables import Row

SHOWN = 10  # rows, and unreadable images, that are shown


@dataclass
class RowBuilder:
    """Makes a row of a model's outputs for an image."""

    classes: tuple[str, ...]  # names of the classes or labels, one for each output; empty for regression
    top_k: int  # number of classes in a row
    probabilities: bool  # whether to add the probability of every class
    logits: bool  # whether to add the outputs themselves
    threshold: float | None = None  # probability above which a label is predicted; None for one class per image
    first: list[Row] = field(default_factory=list, init=False)  # the first rows that were made, to be shown
    count: int = field(default=0, init=False)  # the number of all

    def __post_init__(self) -> None:
        if not self.classes:
            for name, given in (("top_k", self.top_k > 1), ("probabilities", self.probabilities)):
                if given:
                    raise UserError(name, "this model was trained for numbers, not classes", "its default")
        elif self.threshold is not None:
            if self.top_k > 1:
                problem = "this model was trained for several labels per image, and every label has its probability"
                raise UserError("top_k", problem, "its default")
        elif self.top_k > (count := len(self.classes)):
            raise UserError("top_k", f"is {self.top_k}, but there are {count} classes", f"1 to {count}")

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
        rows = [dict(cells) for cells in first_cells]
        if not self.classes:
            for row, numbers in zip(rows, outputs.tolist(), strict=True):
                row |= numbered("prediction", numbers)
        elif self.threshold is not None:
            for row, probabilities in zip(rows, outputs.sigmoid().tolist(), strict=True):
                row["labels"] = labels_of(self.classes, probabilities, self.threshold)
                row["probabilities"] = probabilities
        else:
            # A stable sort: of equal outputs, the class that comes first ranks first, as in metrics.
            order = torch.sort(outputs, dim=1, descending=True, stable=True).indices[:, : self.top_k].tolist()
            for row, best, probabilities in zip(rows, order, outputs.softmax(1).tolist(), strict=True):
                for rank, number in enumerate(best, 1):
                    suffix = "" if rank == 1 else f"_{rank}"
                    row[f"prediction{suffix}"] = self.classes[number]
                    row[f"probability{suffix}"] = probabilities[number]
                if self.probabilities:
                    row["probabilities"] = probabilities
        if self.logits and self.classes:
            for row, logits in zip(rows, outputs.tolist(), strict=True):
                row["logits"] = logits
        self.count += len(rows)
        self.first += rows[: SHOWN - len(self.first)]
        return rows


def numbered(name: str, numbers: Sequence[float]) -> Row:
    """A cell for each number: `name`, or `name_0`, `name_1`, ... for several."""
    names = [name] if len(numbers) == 1 else [f"{name}_{at}" for at in range(len(numbers))]
    return dict(zip(names, numbers, strict=True))


def labels_of(names: Sequence[str], probabilities: Sequence[float], threshold: float) -> str:
    """The names of the labels above a threshold, with semicolons between them."""
    return "; ".join(name for name, each in zip(names, probabilities, strict=True) if each > threshold)


# Label i has the colour that torchvision.utils gives object i by default.
_PALETTE = [label * step % 255 for label in range(256) for step in (2**25 - 1, 2**15 - 1, 2**21 - 1)]


class FieldRows:
    """Makes rows for the table at `path`; bytes of shape (H, W), (1, H, W) or (3, H, W) become PNG files."""

    def __init__(self) -> None:
        self.path, self.first, self.count, self.lists = Path(), list[Row](), 0, dict[str, Sequence[str]]()

    def rows(self, outputs: Sequence[dict[str, Any]], first_cells: Sequence[Row]) -> list[Row]:
        """A row for each sample: its first cells, then a cell for each field."""
        rows = []
        for cells, fields in zip(first_cells, outputs, strict=True):
            rows.append(dict(cells) | {name: self._cell(name, value) for name, value in fields.items()})
            self.count += 1
        self.first += rows[: SHOWN - len(self.first)]
        if names := [list(row) for row in rows if row.keys() != self.first[0].keys()]:
            problem = f"its predict_step gives {', '.join(names[0])} for a sample, and other names for another"
            raise UserError("task", problem, ", ".join(self.first[0]))
        if self.path.suffix.lower() == ".jsonl":
            return rows
        return [{name: _flat(value) for name, value in row.items()} for row in rows]

    def _cell(self, name: str, value: Any) -> Any:
        """The value of a field, or the path of its image, relative to the folder of the table."""
        if not (isinstance(value, Tensor) and value.dtype == torch.uint8 and value.ndim in (2, 3)):
            return mapped_items(value, Tensor, lambda tensor: tensor.tolist())
        if value.ndim == 3 and len(value) not in (1, 3):
            problem = f"its predict_step gives bytes of shape {tuple(value.shape)} as {name}"
            raise UserError("task", problem, "(H, W), or 1 or 3 channels")
        image = Image.fromarray((value if value.ndim == 2 else value.permute(1, 2, 0).squeeze(2)).numpy())
        if value.ndim == 2:
            image.putpalette(_PALETTE)
        plain = re.sub(r"[^\w.-]", "_", name)
        file = self.path.with_name(f"{self.path.stem}_images") / f"{self.count:06}_{plain}.png"
        with writing(file):
            file.parent.mkdir(exist_ok=True)
            image.save(file)
        return f"{file.parent.name}/{file.name}"


def _flat(value: Any) -> Any:
    """A cell of a format without nested values: lists and dicts are JSON."""
    return json.dumps(finite(value), ensure_ascii=False) if isinstance(value, list | tuple | dict) else value
