"""Checkpoints as somebody makes them who has read the source and means harm."""

from __future__ import annotations

import copy
import hashlib
import io
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def forged(contents: Any) -> bytes:
    """A sealed checkpoint with any contents."""
    return archive(records(contents))


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
