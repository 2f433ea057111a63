"""Rows of predictions written as they come: CSV, JSON lines or Parquet, the file there whole or not at all."""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import json
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from runner.config.errors import UserError, nearest
from runner.tracking.files import finite, writing

Row = dict[str, Any]
"""Column -> a text, a number, or a list of numbers."""

_ENDINGS = (".csv", ".jsonl", ".parquet")
# What makes spreadsheets take the text of a cell for a formula (CWE-1236).
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


class Sink(Protocol):
    """Where rows go."""

    def write(self, rows: Sequence[Row]) -> None:
        """Add rows; all have the same columns in the same order."""
        ...


class Table(Sink, Protocol):
    """A file of rows."""

    def close(self) -> None:
        """Finish the file."""
        ...


def check_ending(path: Path) -> None:
    """Refuse a file whose ending names no format, or one that cannot be written here.

    Raises:
        UserError: with what is allowed.
    """
    ending = path.suffix.lower()
    if ending not in _ENDINGS:
        close = nearest(ending, _ENDINGS)
        hint = f"; did you mean '{close}'?" if close else ""
        raise UserError(
            f"output: cannot be '{path.name}'{hint}\n    allowed: a file that ends in {', '.join(_ENDINGS)}"
        )
    if ending == ".parquet" and importlib.util.find_spec("pyarrow") is None:
        raise UserError(
            "output: .parquet needs pyarrow, which is not installed\n"
            "    allowed: pip install 'runner[parquet]', or a file that ends in .csv or .jsonl"
        )


@contextlib.contextmanager
def table(path: Path, lists: dict[str, Sequence[str]]) -> Iterator[Sink]:
    """A table that is written to a temporary name and takes its own in the end; nothing is left if that never comes.

    Args:
        path: the file; its ending says the format.
        lists: columns that hold lists, each with a name for every item, under which CSV gives it a column of its own.

    Raises:
        UserError: if it cannot be written.
    """
    temporary = path.parent / f".{path.name}.{secrets.token_hex(6)}.tmp"
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = temporary.open("xb")
    try:
        with file:
            made = _made(path.suffix.lower(), file, lists)
            yield _Told(made, path)
            with writing(path):
                made.close()
                file.flush()
                os.fsync(file.fileno())
        with writing(path):
            os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


class _Told:
    """A table whose errors of writing name the file."""

    def __init__(self, made: Table, path: Path) -> None:
        self._made, self._path = made, path

    def write(self, rows: Sequence[Row]) -> None:
        with writing(self._path):
            self._made.write(rows)


def _made(ending: str, file: BinaryIO, lists: dict[str, Sequence[str]]) -> Table:
    if ending == ".csv":
        return _Csv(file, lists)
    return _Parquet(file) if ending == ".parquet" else _JsonLines(file)


def _text(value: Any) -> Any:
    """A text that every format can hold; a file's name may have bytes that are no UTF-8."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


class _Lines:
    """Text encoded line by line into a binary file, for writers that call `write`."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        return self._file.write(text.encode())


class _Csv:
    """As RFC 4180 has it; texts that a spreadsheet would take for formulas begin with an apostrophe.

    The line end is CR LF also because Python before 3.11.9 quotes no other controls than those: a bare CR in a name would
    end the line, and what follows it would begin a cell.
    """

    def __init__(self, file: BinaryIO, lists: dict[str, Sequence[str]]) -> None:
        self._writer = csv.writer(_Lines(file), lineterminator="\r\n")
        self._lists = lists
        self._has_head = False

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            cells = list(self._cells(row))
            if not self._has_head:
                self._writer.writerow([harmless(_text(name)) for name, _ in cells])
                self._has_head = True
            self._writer.writerow([harmless(_text(value)) for _, value in cells])

    def _cells(self, row: Row) -> Iterator[tuple[str, Any]]:
        for name, value in row.items():
            if name in self._lists:
                yield from zip((f"{name}:{item}" for item in self._lists[name]), value, strict=True)
            else:
                yield name, value

    def close(self) -> None:
        """Nothing is left to write."""


def harmless(cell: Any) -> Any:
    """A text with an apostrophe before what a spreadsheet would take for a formula; numbers as they are."""
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell


class _JsonLines:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            values = {name: _text(value) for name, value in row.items()}
            self._file.write(json.dumps(finite(values), ensure_ascii=False, allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        """Nothing is left to write."""


class _Parquet:
    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._writer: Any = None

    def write(self, rows: Sequence[Row]) -> None:
        import pyarrow
        import pyarrow.parquet

        if not rows:
            return
        values = [{name: _text(value) for name, value in row.items()} for row in rows]
        schema = None if self._writer is None else self._writer.schema
        block = pyarrow.Table.from_pylist(values, schema)
        if self._writer is None:
            self._writer = pyarrow.parquet.ParquetWriter(self._file, block.schema)
        self._writer.write_table(block)

    def close(self) -> None:
        import pyarrow
        import pyarrow.parquet

        if self._writer is None:  # a file without rows is a whole one, too
            self._writer = pyarrow.parquet.ParquetWriter(self._file, pyarrow.schema([]))
        self._writer.close()
