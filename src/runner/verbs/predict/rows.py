"""Rows of predictions: made of a model's outputs, and written as they come into a file that appears complete or not at all."""

from __future__ import annotations

import codecs
import contextlib
import csv
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from runner.base.errors import UserError, nearest
from runner.base.files import finite, make_folder, replacing, writing
from runner.instrument.nested import mapped_items
from runner.tracking.formats import harmless

Row = dict[str, Any]
"""Column -> a text, a number, a list of numbers, or what a task gives for a sample."""
_FORMATS = (".csv", ".jsonl")
# Label i has the colour that torchvision.utils gives object i by default.
_PALETTE = [label * step % 255 for label in range(256) for step in (2**25 - 1, 2**15 - 1, 2**21 - 1)]


def check_ending(path: Path) -> None:
    """Raise a `UserError` for a file whose ending names no format."""
    if (ending := path.suffix.lower()) not in _FORMATS:
        allowed = f"a file that ends in {', '.join(_FORMATS)}"
        raise UserError("output", f"cannot be '{path.name}'", allowed, nearest(ending, _FORMATS))


@contextlib.contextmanager
def open_table(path: Path, lists: Mapping[str, Sequence[str]]) -> Iterator[Callable[[Sequence[Row]], list[Row]]]:
    """A table, as a function that adds rows and returns them as they are written; after an error nothing is left.

    It is written as `runner.base.files.replacing` does for a path of the user's. The ending of `path` selects the format. All
    rows have the same columns. Tensors become lists; those of bytes, uint8 (H, W), (1, H, W) or (3, H, W), become PNG files in a
    folder beside the table, and their cells the paths of these. `lists` are columns that hold lists, each with a name for every
    item; CSV gives each item a column, and has other nested values as JSON.

    CSV is as RFC 4180 defines it; a text that a spreadsheet would take for a formula begins with an apostrophe. Lines end with
    CR LF because Python before 3.11.9 quotes no other control characters than those of the line end: a bare CR in a name would
    end the line, and what follows it would begin a cell.
    """
    make_folder(path.parent)
    as_json, columns, count = path.suffix.lower() == ".jsonl", list[str](), itertools.count()
    with replacing(path, named=True) as file:
        lines = csv.writer(codecs.getwriter("utf-8")(file), lineterminator="\r\n")

        def plain(name: str, value: Any, number: int) -> Any:
            if name not in lists and not isinstance(value, str | int | float):
                value = _without_tensors(name, value, number, path)
                if isinstance(value, list | tuple | dict) and not as_json:
                    value = json.dumps(finite(value), ensure_ascii=False)
            return encodable(value)

        def write(rows: Sequence[Row]) -> list[Row]:
            made = list[Row]()
            for fields in rows:
                number = next(count)
                made.append(row := {name: plain(name, value, number) for name, value in fields.items()})
                if not number:
                    columns.extend(row)
                if row.keys() != {*columns}:
                    problem = f"its predict_step gives {', '.join(row)} for a sample, and other names for another"
                    raise UserError("task", problem, ", ".join(columns))
                with writing(path):
                    if as_json:
                        file.write(json.dumps(finite(row), ensure_ascii=False, allow_nan=False).encode() + b"\n")
                        continue
                    cells: Row = {}
                    for name in columns:
                        names = [f"{name}:{item}" for item in lists[name]] if name in lists else [name]
                        cells |= zip(names, row[name] if name in lists else [row[name]], strict=True)
                    if not number:
                        lines.writerow([harmless(encodable(name)) for name in cells])
                    lines.writerow(map(harmless, cells.values()))
            return made

        yield write


def _without_tensors(name: str, value: Any, number: int, table: Path) -> Any:
    """What a task gives for a sample as plain values; an image is written, and its path relative to the table returned."""
    if not (isinstance(value, Tensor) and value.dtype == torch.uint8 and value.ndim in (2, 3)):
        return mapped_items(value, Tensor, lambda tensor: tensor.tolist())
    if value.ndim == 3 and len(value) not in (1, 3):
        problem = f"its predict_step gives bytes of shape {tuple(value.shape)} as {name}"
        raise UserError("task", problem, "(H, W), or 1 or 3 channels")
    image = Image.fromarray((value if value.ndim == 2 else value.permute(1, 2, 0).squeeze(2)).numpy())
    if value.ndim == 2:
        image.putpalette(_PALETTE)
    plain = re.sub(r"[^\w.-]", "_", name)
    picture = table.with_name(f"{table.stem}_images") / f"{number:06}_{plain}.png"
    with writing(picture):
        picture.parent.mkdir(exist_ok=True)
        image.save(picture)
    return f"{picture.parent.name}/{picture.name}"


def encodable(value: Any) -> Any:
    """A text that every format can hold: a file's name may have bytes that are not UTF-8."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


@dataclass
class RowBuilder:
    """Makes a row of a model's outputs for an image."""

    classes: tuple[str, ...]  # names of the classes or labels, one for each output; empty for regression
    top_k: int  # number of classes in a row
    probabilities: bool  # whether to add the probability of every class
    logits: bool  # whether to add the outputs themselves
    threshold: float | None = None  # probability above which a label is predicted; None for one class per image

    def __post_init__(self) -> None:
        count = len(self.classes)
        for name, given in (("top_k", self.top_k > 1), ("probabilities", self.probabilities)):
            if given and not count:
                raise UserError(name, "this model was trained for numbers, not classes", "its default")
        if count and self.threshold is not None and self.top_k > 1:
            problem = "this model was trained for several labels per image, and every label has its probability"
            raise UserError("top_k", problem, "its default")
        if count and self.top_k > count:
            raise UserError("top_k", f"is {self.top_k}, but there are {count} classes", f"1 to {count}")

    @property
    def lists(self) -> dict[str, Sequence[str]]:
        """Columns that hold lists, with a name for each item."""
        return {"probabilities": self.classes, "logits": self.classes}

    def rows(self, outputs: Tensor) -> list[Row]:
        """A row for each image, of outputs of the model, float32 (B, C) on the CPU."""
        numbers, made = outputs.tolist(), list[Row]()
        if not self.classes:
            return [numbered("prediction", each) for each in numbers]
        if self.threshold is not None:
            for each in outputs.sigmoid().tolist():
                made.append({"labels": labels_of(self.classes, each, self.threshold), "probabilities": each})
        else:
            # A stable sort: of equal outputs, the class that comes first ranks first, as in metrics.
            order = torch.sort(outputs, dim=1, descending=True, stable=True).indices[:, : self.top_k].tolist()
            for best, each in zip(order, outputs.softmax(1).tolist(), strict=True):
                made.append(row := Row())
                for suffix, place in zip(["", *(f"_{rank}" for rank in range(2, len(best) + 1))], best, strict=True):
                    row |= {f"prediction{suffix}": self.classes[place], f"probability{suffix}": each[place]}
                row |= {"probabilities": each} if self.probabilities else {}
        return [row | {"logits": each} for row, each in zip(made, numbers, strict=True)] if self.logits else made


def numbered(name: str, numbers: Sequence[float]) -> Row:
    """A cell for each number: `name`, or `name_0`, `name_1`, ... for several."""
    names = [name] if len(numbers) == 1 else [f"{name}_{at}" for at in range(len(numbers))]
    return dict(zip(names, numbers, strict=True))


def target_cells(target: Any, classes: Sequence[str], activation: str | None) -> Row:
    """The cells of a target as its task says it: the names of its labels or its class, or its numbers."""
    if isinstance(target, list):
        if activation == "sigmoid":
            return {"target": labels_of(classes, target, 0.5)}
        if activation is None:
            return numbered("target", target)
        target = max(range(len(target)), key=target.__getitem__)
    is_class = isinstance(target, int) and 0 <= target < len(classes)
    return {"target": classes[target] if is_class else target}


def labels_of(names: Sequence[str], probabilities: Sequence[float], threshold: float) -> str:
    """The names of the labels above a threshold, with semicolons between them."""
    return "; ".join(name for name, each in zip(names, probabilities, strict=True) if each > threshold)
