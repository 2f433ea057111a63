"""Reads untrusted files: regular files only, of a bounded size, opened without blocking."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from datetime import UTC, datetime
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeGuard

_LARGEST = 2**20  # bytes; the files of a run that a scan reads have a few thousand
LARGEST_TEXT = 2**24  # bytes of a list of names
LARGEST_DATA = 2**32  # bytes of annotations, or of an index
MOST_NAMES = 2**18  # that a pattern stands for
_MOST_VALUES, _DEEPEST = 100_000, 100  # of YAML
_LARGEST_OVERRIDES = 2**17  # bytes; reading YAML takes about half a second for as much


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Open a regular file for reading; a named pipe, socket or device never blocks.

    Raises:
        OSError: if it cannot be opened, or is not a regular file.
    """
    # Opening a device can have effects of its own, so the kind is known before, and again once the file is open.
    _require_regular(os.stat(path).st_mode)  # noqa: PTH116  called for every image of a data set
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        _require_regular(os.fstat(descriptor).st_mode)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def is_url(place: str) -> bool:
    """Tell whether data are in a store, such as `s3://bucket/photos`, and not in a folder."""
    return "://" in place


def _require_regular(mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise OSError("it is not a regular file")


def read_regular(path: Path, largest: int = _LARGEST) -> bytes:
    """The content of a regular file.

    Raises:
        OSError: if it cannot be read, is not a regular file, or has more than `largest` bytes.
    """
    with open_regular(path) as file:
        # As much as it has, as memory is reserved for what is asked for; files that the system makes up have a size of 0
        content = file.read(min(largest, os.fstat(file.fileno()).st_size + _LARGEST) + 1)
    if len(content) > largest:
        raise OSError(f"it is larger than {largest:,} bytes")
    return content


def bounded(count: int, most: int, what: str) -> int:
    """A number that a file gives, before memory is reserved for as much; raises `ValueError` if it is above `most`."""
    if count > most:
        raise ValueError(f"{count:,} {what}, and at most {most:,} are read")
    return count


def read_text(path: Path, largest: int = LARGEST_TEXT) -> str:
    """The UTF-8 text of a regular file, lines ended by line feeds; raises as `read_regular`, and `ValueError` for other bytes."""
    return read_regular(path, largest).decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")


def read_yaml(path: Path, largest: int = _LARGEST, plain: bool = False) -> Any:
    """The content of a small YAML file; every scalar as text if it is `plain`.

    Raises:
        OSError: as `read_regular`.
        ValueError: if it is not YAML, nested deeply, or has too many values: a few lines of aliases can stand for gigabytes.
    """
    import yaml

    text, begun, sizes, count = read_text(path, largest), list[tuple[Any, int]](), dict[Any, int](), 0
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.CollectionStartEvent):
                begun.append((event.anchor, count))
            elif isinstance(event, yaml.CollectionEndEvent):
                anchor, before = begun.pop()
                sizes[anchor] = count - before + 1
            count += sizes.get(event.anchor, 1) if isinstance(event, yaml.AliasEvent) else 1
            bounded(count, _MOST_VALUES, "values with those that aliases stand for")
            bounded(len(begun), _DEEPEST, "levels of nesting")
        return yaml.load(text, Loader=yaml.BaseLoader if plain else yaml.SafeLoader)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{path} is not plain YAML: {' '.join(str(error).split())}") from error


def digits(text: str) -> str:
    """The text of a number; raises `ValueError` for `1_0`, which Python takes for 10."""
    if "_" in text:
        raise ValueError(f"not a number: {text!r}")
    return text


def is_true(value: Any) -> bool:
    """Tell whether a value of a config is true, also as a text, which quotes and environment variables make of it."""
    return str(value).lower() in ("true", "t", "yes", "y", "on", "1", "1.0")


def is_number(value: Any) -> TypeGuard[float]:
    """Tell whether a value of a file is a finite number, and no boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**63


def number_or_none(value: Any) -> float | None:
    """A finite number of a file, or None for anything else."""
    return value if is_number(value) else None


def read_summary(folder: Path) -> dict[str, Any] | None:
    """The content of `folder/summary.json`, or None if there is none that can be read."""
    return read_json(folder / "summary.json")


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file, or None if it cannot be read."""
    try:
        found = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def read_overrides(folder: Path) -> list[str]:
    """The content of `folder/overrides.yaml`: the overrides that a run was started with.

    Raises:
        OSError: if it cannot be read, or is not a small regular file.
        ValueError: if it is not a list of strings.
    """
    # Every scalar as text, so no date or number in a file can fail.
    content = read_yaml(folder / "overrides.yaml", _LARGEST_OVERRIDES, plain=True)
    if not isinstance(content, list) or not all(isinstance(word, str) for word in content):
        raise ValueError("it is not a list of strings")
    return content


def start_time(folder: Path) -> datetime | None:
    """When the run in a folder was started last, as its summary says, else when the summary was written; None without one."""
    with contextlib.suppress(KeyError, TypeError, ValueError):
        if (found := datetime.fromisoformat((read_summary(folder) or {})["started"])).tzinfo:
            return found
    return modified(folder / "summary.json")


def modified(path: Path) -> datetime | None:
    """When a file was modified; None if it is not there."""
    try:
        return datetime.fromtimestamp(path.stat().st_mtime, UTC)
    except (OSError, OverflowError, ValueError):
        return None
