"""Checkpoints as somebody makes them who has read the source and means harm."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {self.canary}",))


class _Storage:
    """Stands for bytes elsewhere in the archive, of which the pickle only claims how many there are."""

    def __init__(self, key: str, claimed: int) -> None:
        self.key, self.claimed = key, claimed


class Claim:
    """Unpickled, it is a tensor of any size, shape and stride over 16 bytes."""

    def __init__(self, size: tuple[int, ...], stride: tuple[int, ...], claimed: int = 4, offset: int = 0) -> None:
        self.size, self.stride, self.claimed, self.offset = size, stride, claimed, offset

    def __reduce__(self) -> tuple[Any, ...]:
        storage = _Storage("forged", self.claimed)
        arguments = (storage, self.offset, self.size, self.stride, False, OrderedDict())
        return (torch._utils._rebuild_tensor_v2, arguments)


class _Forger(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=2)
        self.stored: dict[str, bytes] = {"forged": b"\0" * 16}

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, _Storage):
            return ("storage", torch.FloatStorage, value.key, "cpu", value.claimed)
        if isinstance(value, torch.storage.TypedStorage):
            key = str(len(self.stored))
            self.stored[key] = bytes(value._untyped_storage.tolist())
            return ("storage", getattr(torch, value._pickle_storage_type()), key, "cpu", value._size())
        return None


def sealed(archive: bytes) -> bytes:
    """An archive with a checksum that fits."""
    comment = b"runner-sha256:" + hashlib.sha256(archive).hexdigest().encode()
    assert archive[-2:] == b"\0\0", "the archive has a comment already"
    return archive[:-2] + len(comment).to_bytes(2, "little") + comment


def records(contents: Any) -> dict[str, bytes]:
    """The records of a checkpoint with these contents, without any check of them."""
    file = io.BytesIO()
    forger = _Forger(file)
    forger.dump(contents)
    found = {"archive/data.pkl": file.getvalue(), "archive/byteorder": b"little", "archive/version": b"3\n"}
    return found | {f"archive/data/{key}": data for key, data in forger.stored.items()}


def archive(parts: dict[str, bytes] | list[tuple[str, bytes]], compression: int = zipfile.ZIP_STORED) -> bytes:
    """A sealed archive of records, which may have one name twice."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        for name, data in parts.items() if isinstance(parts, dict) else parts:
            file.writestr(name, data)
    return sealed(buffer.getvalue())


def pickled(contents: dict[str, Any]) -> bytes:
    """A sealed checkpoint of format 1, with any contents."""
    return archive(records(contents | {"format": 1}))


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


def changed(contents: dict[str, Any], *place: str, value: Any, of_format_1: bool = False) -> bytes:
    """A checkpoint with another value at a place."""
    made = copy.deepcopy(contents)
    inner = made
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    return pickled(made) if of_format_1 else forged(made)
