"""Checkpoints as somebody makes them who has read the source and means harm."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import yaml


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {self.canary}",))


def forged(contents: dict[str, Any], **texts: str) -> bytes:
    """A checkpoint of the current format, with other texts in its metadata, of which checksums fit and nothing is checked."""
    from runner.checkpoint import layout
    from runner.checkpoint.file import KEYS, _text
    from runner.checkpoint.structure import Tensors

    tensors, buffer = Tensors(), io.BytesIO()
    metadata = {key: _text(key, contents[key], tensors) for key in KEYS[1:]} | texts
    with mock.patch.object(layout, "_too_dense", return_value=False):
        layout.write(buffer, str(contents["format"]), metadata, tensors.by_name)
    return buffer.getvalue()


def with_header(change: Callable[[dict[str, Any]], object], contents: dict[str, Any], more: bytes = b"") -> bytes:
    """A checkpoint whose header was changed, with a checksum that fits, and bytes after its end."""
    data = forged(contents)
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["__metadata__"]["sha256"] = "0" * 64
    change(header)
    return sealed_header(json.dumps(header, separators=(",", ":")).encode()) + data[end:] + more


def sealed_header(header: bytes, claimed: int | None = None) -> bytes:
    """A header with its length and a checksum that fits, where it has a place for one."""
    made = (len(header) if claimed is None else claimed).to_bytes(8, "little") + header
    return made.replace(b"0" * 64, hashlib.sha256(made).hexdigest().encode(), 1)


def with_config(contents: dict[str, Any], change: Callable[[dict[str, Any]], object]) -> bytes:
    """A checkpoint whose config was changed."""
    config = yaml.safe_load(contents["config"])
    change(config)
    return forged(contents | {"config": yaml.safe_dump(config)})


def changed(contents: dict[str, Any], *place: str, value: Any) -> bytes:
    """A checkpoint with another value at a place."""
    made = copy.deepcopy(contents)
    inner = made
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    return forged(made)
