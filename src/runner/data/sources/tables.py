"""Image files that a table lists with their labels: CSV or Parquet."""

from __future__ import annotations

import csv
import math
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from runner.base.errors import UserError, nearest, require
from runner.base.reading import bounded, digits
from runner.config.schema.sections import Data
from runner.data.bad_samples import Place
from runner.data.sources.bands import Channels
from runner.data.sources.folders import ImageFolder
from runner.data.sources.image_io import Decoding
from runner.data.sources.listing import absent, is_inside

Kind = Literal["classification", "multilabel", "regression"]

_SPLITS = {"train": "train", "training": "train", "test": "test", "testing": "test"}
_SPLITS |= dict.fromkeys(("val", "valid", "validation", "dev"), "val")
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_PARQUET = (".parquet", ".pq")
_ROWS_A_BYTE = 8  # of a file, at most: each row names another image


@dataclass(frozen=True)
class Table:
    """Columns of a table; a line is that of a CSV file, or the number of the row of a Parquet file from 1 on."""

    path: Path
    columns: dict[str, list[Any]]
    lines: Sequence[int]

    def wrong(self, row: int, column: str, problem: str, allowed: str = "") -> UserError:
        """An error about one entry."""
        problem = f"column '{column}' in line {self.lines[row]} of {self.path} {problem}"
        return UserError("data.dataset", problem, allowed)

    def text(self, column: str, row: int) -> str:
        """An entry as text without spaces around it; raises `UserError` if it is empty or NaN."""
        entry = self.columns[column][row]
        text = "" if entry is None else str(entry).strip()
        if not text or text.lower() == "nan":
            raise self.wrong(row, column, "is NaN" if text else "is empty")
        return text

    def number(self, column: str, row: int) -> float:
        """An entry as a number; raises `UserError` if it is none, or not finite."""
        text = self.text(column, row)
        number = _as_number(text)
        if not math.isfinite(number) or isinstance(self.columns[column][row], bool):
            raise self.wrong(row, column, f"is '{text}', which is not a finite number")
        return number


def _as_number(text: str) -> float:
    try:
        return float(digits(text))
    except ValueError:
        return math.nan


def image_table(
    root: str,
    table: str,
    image_column: str = "image",
    label_columns: str | list[str] = "label",
    kind: Kind | None = None,
    *,
    split_column: str | None = None,
    group_column: str | None = None,
    delimiter: str | None = None,
    image_size: int | None = None,
    channels: Channels = 3,
    crop_share: float = 1.0,
    max_pixels: int = Data.max_pixels,
    on_error: Literal["raise", "skip"] = "raise",
) -> dict[str, ImageFolder]:
    """Data sets of the image files that a table lists, one row for each; `groups` of each sample for `data.split.group`.

    Args:
        root: folder of the data set.
        table: file under `root`, or a whole path: `.csv`, `.tsv` or `.parquet`; a CSV file has a line of names first.
        image_column: paths of the images, relative to the folder of the table, or else to `root`.
        label_columns: one column or several.
        kind: `classification` takes the entries of one column as names of classes, sorted, as numbers if all are;
            `multilabel` takes a 0 or 1 for each of several columns, which are the classes: targets float32 (N, K);
            `regression` takes numbers: targets float32 (N,) of one column, (N, K) of several. None: classification for one
            column; for several, multilabel if all entries are 0 or 1, otherwise regression.
        split_column: train, val or test, or True and False if it is named is_valid; None if all rows are 'train'.
        group_column: becomes the attribute `groups`, for `data.split.group`.
        delimiter: between the entries of a line; None for that of the file's suffix.
        image_size, channels, crop_share, max_pixels: see `runner.data.sources.image_io.Decoding`.
        on_error: `skip` allows files that do not exist, which are then skipped.

    Raises `UserError` if the table, a column or a file is missing, or an entry is empty or of another kind; with the line.
    """
    labels = [label_columns] if isinstance(label_columns, str) else list(label_columns)
    if not labels or len(set(labels)) < len(labels):
        raise UserError("data.dataset.label_columns", f"cannot be {labels}", "one or more columns, each named once")
    keys = dict.fromkeys(labels, "label_columns") | {image_column: "image_column"}
    keys |= {column: key for key, column in (("split_column", split_column), ("group_column", group_column)) if column}
    decoding, base = Decoding(image_size, channels, crop_share, max_pixels), Path(root).expanduser()
    read = _read(base / Path(table).expanduser(), keys, delimiter)
    paths = _paths(read, image_column, base, missing_allowed=on_error == "skip")
    targets, classes = column_targets(read, labels, kind)
    result = {}
    for split, rows in _rows_of_splits(read, split_column, len(paths)).items():
        result[split] = ImageFolder([paths[row] for row in rows], targets[rows], classes, decoding)
        if group_column is not None:
            result[split].groups = [read.text(group_column, row) for row in rows]
    return result


def _read(path: Path, keys: Mapping[str, str], delimiter: str | None) -> Table:
    """The columns of a file that are named in `keys`, each with the key of the config that names it."""
    suffix = path.suffix.lower()
    if not path.is_file():
        problem = f"{path.absolute()} {'is not a file' if path.exists() else 'does not exist'}"
        raise UserError("data.dataset.table", problem, "a file under data.root, or its whole path")
    if suffix not in (*_DELIMITERS, *_PARQUET):
        allowed = ", ".join((*_DELIMITERS, *_PARQUET))
        raise UserError("data.dataset.table", f"cannot be {path.name}: its suffix is unknown", allowed)
    with Place(path, "data.dataset.table") as place:
        if suffix in _PARQUET:
            read = _read_parquet(path, keys)
        else:  # Hydra leaves \t as it is typed
            read = _read_csv(place, path, keys, (delimiter or _DELIMITERS[suffix]).replace("\\t", "\t"))
    if not read.lines:
        raise UserError("data.dataset.table", f"{path} has no rows")
    return read


def _read_csv(place: Place, path: Path, keys: Mapping[str, str], delimiter: str) -> Table:
    lines = []
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter, strict=True)
        names = [name.strip() for name in next(reader, [])]
        _check_columns(path, keys, names)
        columns: dict[str, list[Any]] = {name: [] for name in keys}
        for row in reader:
            line = reader.line_num
            if row and len(row) != len(names):
                problem = f"line {line} of {path} has {len(row)} entries, and there are {len(names)} columns"
                raise UserError("data.dataset.table", problem, "quotes around an entry with the delimiter in it")
            if row:
                place.part = f"what follows line {line} of "
                lines.append(line)
                for name, entries in columns.items():
                    entries.append(row[names.index(name)])
    return Table(path, columns, lines)


def _check_columns(path: Path, keys: Mapping[str, str], names: Sequence[str]) -> None:
    """Raise `UserError` if a table does not have every column exactly once."""
    for column, key in keys.items():
        if names.count(column) == 1:
            continue
        if not names:
            raise UserError("data.dataset.table", f"{path} is empty", "a first line with the names of the columns")
        # As spreadsheets write it where 0,5 is a number, and as others do
        for mark, shown in ((";", ";"), ("\t", "\\t")):
            if len(names) == 1 and column in names[0].split(mark):
                allowed = f"'data.dataset.delimiter=\"{shown}\"'"
                raise UserError("data.dataset.delimiter", f"{path} has '{shown}' between its columns", allowed)
        what = f"twice the column '{column}'" if column in names else f"no column '{column}'"
        raise UserError(f"data.dataset.{key}", f"{path} has {what}", ", ".join(names), nearest(column, names))


def _read_parquet(path: Path, keys: Mapping[str, str]) -> Table:
    require("data.dataset.table", "runner[parquet]", "pyarrow", otherwise=", or a .csv file")
    from pyarrow import parquet

    file, size = parquet.ParquetFile(path, read_dictionary=list(keys)), path.stat().st_size
    _check_columns(path, keys, file.schema_arrow.names)
    # A few kilobytes may stand for gigabytes: of rows, and of texts that a dictionary repeats
    rows = sum(file.metadata.row_group(group).num_rows for group in range(file.num_row_groups))
    bounded(rows, _ROWS_A_BYTE * size, f"rows in {size:,} bytes")
    table = file.read(list(keys))
    columns = {name: _entries(table[name]) for name in keys}
    return Table(path, columns, range(1, 1 + len(next(iter(columns.values())))))


def _entries(column: Any) -> list[Any]:
    """The values of a column; equal texts of a dictionary are one object."""
    if not hasattr(column.type, "index_type"):
        return list(column.to_pylist())
    column = column.unify_dictionaries()
    values = [*column.chunk(0).dictionary.to_pylist(), None] if column.num_chunks else []
    return [values[place] for chunk in column.chunks for place in chunk.indices.fill_null(-1).to_pylist()]


def _paths(table: Table, column: str, root: Path, missing_allowed: bool) -> list[Path]:
    """The image files, all relative to the same folder, that of the table or `root`: where the first one is."""
    names = [table.text(column, row) for row in range(len(table.columns[column]))]
    folders = list(dict.fromkeys((table.path.parent, root)))
    base = next((folder for folder in folders if not absent(folder / names[0])), folders[0])
    if (out := next((row for row, name in enumerate(names) if not is_inside(name, base, *folders)), None)) is not None:
        allowed = "data.root=FOLDER with a folder above all images, and data.dataset.table with its whole path"
        raise table.wrong(out, column, f"names a file outside of {root.absolute()}: {names[out]}", allowed)
    paths = [base / name for name in names]
    missing = [] if missing_allowed else [row for row, path in enumerate(paths) if absent(path)]
    if missing:
        others = f" (and {len(missing) - 1:,} more)" if len(missing) > 1 else ""
        problem = f"names a file that does not exist: {absent(paths[missing[0]].absolute())}{others}"
        where = " or ".join(str(folder.absolute()) for folder in folders)
        raise table.wrong(missing[0], column, problem, f"paths relative to {where}, or data.on_error=skip")
    return paths


def column_targets(table: Table, labels: list[str], kind: Kind | None) -> tuple[Tensor, tuple[str, ...]]:
    """Targets (N, ...) of the columns `labels` and the names of the classes, see `image_table`."""
    count = len(table.columns[labels[0]])
    if kind == "classification" and len(labels) > 1:
        problem = f"is classification, which has one column of classes, and label_columns names {len(labels)}"
        raise UserError("data.dataset.kind", problem, "multilabel or regression, or one column")
    if kind == "classification" or (kind is None and len(labels) == 1):
        return _classes(table, labels[0], [table.text(labels[0], row) for row in range(count)])
    numbers = torch.tensor([[table.number(label, row) for label in labels] for row in range(count)])
    binary = (numbers == 0) | (numbers == 1)
    if kind == "multilabel" and not bool(binary.all()):
        row, place = (int(number) for number in (~binary).nonzero()[0])
        allowed = "0 or 1 in every column, or data.dataset.kind=regression"
        raise table.wrong(row, labels[place], f"is {float(numbers[row, place]):g}", allowed)
    if kind == "multilabel" or (kind is None and bool(binary.all())):
        return numbers, tuple(labels)
    return (numbers[:, 0] if len(labels) == 1 else numbers), ()


def _classes(table: Table, column: str, names: list[str]) -> tuple[Tensor, tuple[str, ...]]:
    # Numbers are sorted as numbers, so that class 10 comes after class 9.
    numbers: dict[str, Any] = {name: _as_number(name) for name in dict.fromkeys(names)}
    if not any(map(math.isnan, numbers.values())):
        for name, number in numbers.items():
            if not number.is_integer():  # nor is what is infinite
                allowed = "names or whole numbers of classes, or data.dataset.kind=regression task=regression loss=mse"
                raise table.wrong(names.index(name), column, f"is {name}, which is not a class", allowed)
        ordered = sorted(numbers, key=lambda name: (numbers[name], name))
    else:
        ordered = sorted(numbers)
        numbers = {name: unicodedata.normalize("NFC", name) for name in numbers}
    spellings = dict[Any, str]()
    for name, meant in numbers.items():  # 1 and 1.0, or é as macOS and Linux write it
        if (one := spellings.setdefault(meant, name)) != name:
            problem = f"is {name!a}, and in line {table.lines[names.index(one)]} {one!a}, which look like one class"
            raise table.wrong(names.index(name), column, problem)
    places = {name: place for place, name in enumerate(ordered)}
    return torch.tensor([places[name] for name in names]), tuple(ordered)


def _rows_of_splits(table: Table, column: str | None, count: int) -> dict[str, list[int]]:
    if column is None:
        return {"train": list(range(count))}
    known = _SPLITS | ({"false": "train", "true": "val"} if column == "is_valid" else {})  # fastai's convention
    found: dict[str, list[int]] = {}
    for row in range(count):
        name = table.text(column, row)
        if (split := known.get(name.lower())) is None:
            raise table.wrong(row, column, f"is '{name}', which is not a split", "train, val or test")
        found.setdefault(split, []).append(row)
    return found
