"""Features of a whole split in one file, `.npz` or `.safetensors`, with no more than a batch of them in memory."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from runner.config.errors import UserError
from runner.tracking.files import writing

_KINDS = {"float32": ("<f4", "F32"), "int64": ("<i8", "I64")}


@dataclass
class _Spool:
    """An array that grows along its first axis, on disk: its rows so far, one after the other.

    Attributes:
        file: open for writing.
        kind: `float32` or `int64`.
        row: shape of a row.
        rows: how many there are.
    """

    file: IO[bytes]
    kind: str
    row: tuple[int, ...]
    rows: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.rows, *self.row)

    @property
    def size(self) -> int:
        """Bytes of all rows."""
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(_KINDS[self.kind][0]).itemsize


def write_features(batches: Iterator[Mapping[str, Tensor]], path: Path) -> dict[str, tuple[int, ...]]:
    """Write batches of named tensors as one array each, (samples, ...): float32, or int64 for whole numbers.

    The file appears whole or not at all. Until then its folder holds the arrays one by one, so that twice their size is
    needed there.

    Args:
        batches: tensors by name, the same names and row shapes in each.
        path: ends in `.npz` or `.safetensors`.

    Returns:
        The shapes by name.

    Raises:
        UserError: if it cannot be written, or a batch has rows of another shape than those before.
    """
    scratch = path.parent / f".{path.name}.{secrets.token_hex(6)}.tmp"
    with writing(path), contextlib.ExitStack() as leaving:
        scratch.mkdir(parents=True)
        leaving.callback(shutil.rmtree, scratch, ignore_errors=True)
        spools: dict[str, _Spool] = {}
        for batch in batches:
            for name, tensor in batch.items():
                _append(spools, scratch, leaving, name, tensor)
        for spool in spools.values():
            spool.file.flush()
        whole = scratch / "whole"
        with whole.open("wb") as file:
            (_as_npz if path.suffix == ".npz" else _as_safetensors)(file, spools)
            file.flush()
            os.fsync(file.fileno())
        os.replace(whole, path)
    return {name: spool.shape for name, spool in spools.items()}


def _append(spools: dict[str, _Spool], scratch: Path, leaving: contextlib.ExitStack, name: str, tensor: Tensor) -> None:
    tensor = tensor.detach().to("cpu", torch.float32 if tensor.is_floating_point() else torch.int64).contiguous()
    row = tuple(tensor.shape[1:])
    if name not in spools:
        file = leaving.enter_context((scratch / str(len(spools))).open("w+b"))
        spools[name] = _Spool(file, str(tensor.dtype).removeprefix("torch."), row)
    spool = spools[name]
    if spool.row != row:
        raise UserError(
            "features",
            f"{name} has rows of {row} in one batch and of {spool.row} in another",
            "layers whose outputs have one shape",
        )
    spool.file.write(tensor.numpy().data)
    spool.rows += len(tensor)


def _as_npz(file: IO[bytes], spools: Mapping[str, _Spool]) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, spool in spools.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                head = {"descr": _KINDS[spool.kind][0], "fortran_order": False, "shape": spool.shape}
                np.lib.format.write_array_header_1_0(entry, head)
                _copy_rows(spool, entry)


def _as_safetensors(file: IO[bytes], spools: Mapping[str, _Spool]) -> None:
    """Length of the header, header in JSON, rows: https://github.com/huggingface/safetensors#format."""
    head: dict[str, Any] = {}
    place = 0
    for name, spool in spools.items():
        head[name] = {
            "dtype": _KINDS[spool.kind][1],
            "shape": list(spool.shape),
            "data_offsets": [place, place + spool.size],
        }
        place += spool.size
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for spool in spools.values():
        _copy_rows(spool, file)


def _copy_rows(spool: _Spool, file: IO[bytes]) -> None:
    spool.file.seek(0)
    shutil.copyfileobj(spool.file, file, 2**20)
