"""Reads the files of offline runs of Weights & Biases, with its own messages: a log of LevelDB's format."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK = 2**15
_HEADER = 7  # of the file, and of each record: checksum, length, kind


def records(path: Path) -> Iterator[Any]:
    """The messages of one file."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = path.read_bytes(), _HEADER, b""
    while at + _HEADER <= len(data):
        if _BLOCK - at % _BLOCK < _HEADER:
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + _HEADER])
        whole += data[at + _HEADER : at + _HEADER + length]
        at += _HEADER + length
        if kind in (1, 4):  # a whole one, or the last part
            record = Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def _of_kind(directory: Path, kind: str) -> Iterator[Any]:
    """The messages of a kind in all files of a run directory, in the order of the files."""
    for path in sorted(directory.glob("wandb/offline-run-*/*.wandb")):
        yield from (getattr(each, kind) for each in records(path) if each.WhichOneof("record_type") == kind)


def history(directory: Path) -> list[dict[str, Any]]:
    """The rows that were logged."""
    rows = _of_kind(directory, "history")
    return [{"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in row.item} for row in rows]


def exit_codes(directory: Path) -> list[int]:
    """How each file says that its process ended."""
    return [each.exit_code for each in _of_kind(directory, "exit")]
