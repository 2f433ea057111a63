"""From what a task gives for a sample, by name, to a row, and to image files beside the table."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from runner.base.errors import UserError
from runner.base.files import finite, writing
from runner.instrument.nested import mapped_items
from runner.verbs.predict.rows import SHOWN
from runner.verbs.predict.tables import Row

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
