"""Rows of predictions written as they come: CSV or JSON lines; the file appears complete or not at all."""

from __future__ import annotations

import codecs
import contextlib
import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from runner.base.errors import UserError, nearest
from runner.base.files import finite, make_folder, replacing, writing
from runner.tracking.formats import harmless

Row = dict[str, Any]
"""Column -> a text, a number, or a list of numbers."""
Write = Callable[[Sequence[Row]], None]
"""Adds rows; all have the same columns in the same order."""


def check_ending(path: Path) -> None:
    """Raise a `UserError` for a file whose ending names no format."""
    ending = path.suffix.lower()
    if ending not in _FORMATS:
        allowed = f"a file that ends in {', '.join(_FORMATS)}"
        raise UserError("output", f"cannot be '{path.name}'", allowed, nearest(ending, _FORMATS))


@contextlib.contextmanager
def open_table(path: Path, lists: Mapping[str, Sequence[str]]) -> Iterator[Write]:
    """A table that is written as `runner.base.files.replacing` does, for a path of the user's; after an error nothing is left.

    The ending of `path` selects the format. `lists` are the columns that hold lists, each with a name for every item; CSV
    gives each item a column.
    """
    make_folder(path.parent)
    with replacing(path, named=True) as file:
        table = _FORMATS[path.suffix.lower()](file, lists)

        def write(rows: Sequence[Row]) -> None:
            with writing(path):
                table.write([{name: _encodable(value) for name, value in row.items()} for row in rows])

        yield write


def _encodable(value: Any) -> Any:
    """A text that every format can hold: a file's name may have bytes that are not UTF-8."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


class _Csv:
    """As RFC 4180 defines it; a text that a spreadsheet would take for a formula begins with an apostrophe.

    Lines end with CR LF because Python before 3.11.9 quotes no other control characters than those of the line end: a bare
    CR in a name would end the line, and what follows it would begin a cell.
    """

    def __init__(self, file: BinaryIO, lists: Mapping[str, Sequence[str]]) -> None:
        self._writer = csv.writer(codecs.getwriter("utf-8")(file), lineterminator="\r\n")
        self._lists, self._empty = lists, True

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            cells: dict[str, Any] = {}
            for name, value in row.items():
                if name in self._lists:
                    cells |= zip((f"{name}:{item}" for item in self._lists[name]), value, strict=True)
                else:
                    cells[name] = value
            if self._empty:
                self._writer.writerow([harmless(_encodable(name)) for name in cells])
                self._empty = False
            self._writer.writerow(map(harmless, cells.values()))


class _JsonLines:
    def __init__(self, file: BinaryIO, lists: Mapping[str, Sequence[str]]) -> None:
        self._file = file

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._file.write(json.dumps(finite(row), ensure_ascii=False, allow_nan=False).encode() + b"\n")


_FORMATS: dict[str, type[_Csv | _JsonLines]] = {".csv": _Csv, ".jsonl": _JsonLines}
