"""Features of a whole split in one file, `.npz` or `.safetensors`, with no more than a batch of them in memory.

Neither `np.savez` nor `safetensors.numpy.save_file` can append, so the rows are collected in separate files first.
"""

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
from typing import IO

import numpy as np
import torch
from torch import Tensor

from runner.config.errors import UserError
from runner.tracking.files import writing

_DTYPES = {torch.float32: ("<f4", "F32"), torch.int64: ("<i8", "I64")}


@dataclass
class _Rows:
    """An array that grows along its first axis: its rows so far, in a file that is open for writing."""

    file: IO[bytes]
    dtype: torch.dtype
    row: torch.Size
    count: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.count, *self.row)

    def copy_to(self, target: IO[bytes]) -> None:
        self.file.seek(0)
        shutil.copyfileobj(self.file, target, 2**20)


def write_features(batches: Iterator[Mapping[str, Tensor]], path: Path) -> dict[str, tuple[int, ...]]:
    """Write batches of named tensors as one array each, (samples, ...): float32, or int64 for whole numbers.

    The file appears whole or not at all. Until then its folder holds the arrays one by one, which takes the same space
    again.

    Args:
        batches: tensors by name, the same names and row shapes in each.
        path: ends in `.npz` or `.safetensors`.

    Returns:
        The shapes by name.

    Raises:
        UserError: if it cannot be written, or a batch has rows of another shape than those before.
    """
    scratch = path.parent / f".{path.name}.{secrets.token_hex(6)}.tmp"
    arrays: dict[str, _Rows] = {}
    with writing(path), contextlib.ExitStack() as stack:
        scratch.mkdir(parents=True)
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        for batch in batches:
            for name, tensor in batch.items():
                dtype = torch.float32 if tensor.is_floating_point() else torch.int64
                if name not in arrays:
                    file = stack.enter_context((scratch / str(len(arrays))).open("w+b"))
                    arrays[name] = _Rows(file, dtype, tensor.shape[1:])
                rows = arrays[name]
                if rows.row != tensor.shape[1:]:
                    shapes = f"{tuple(tensor.shape[1:])} in one batch and of {tuple(rows.row)} in another"
                    raise UserError("features", f"{name} has rows of {shapes}", "layers whose outputs have one shape")
                rows.file.write(tensor.detach().to("cpu", dtype).contiguous().numpy().data)
                rows.count += len(tensor)
        whole = scratch / "whole"
        with whole.open("wb") as target:
            (_write_npz if path.suffix == ".npz" else _write_safetensors)(target, arrays)
            target.flush()
            os.fsync(target.fileno())
        os.replace(whole, path)
    return {name: rows.shape for name, rows in arrays.items()}


def _write_npz(file: IO[bytes], arrays: Mapping[str, _Rows]) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, rows in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                header = {"descr": _DTYPES[rows.dtype][0], "fortran_order": False, "shape": rows.shape}
                np.lib.format.write_array_header_1_0(entry, header)
                rows.copy_to(entry)


def _write_safetensors(file: IO[bytes], arrays: Mapping[str, _Rows]) -> None:
    """Length of the header, header in JSON, rows: https://github.com/huggingface/safetensors#format."""
    header, end = {}, 0
    for name, rows in arrays.items():
        begin, end = end, end + rows.file.tell()
        header[name] = {"dtype": _DTYPES[rows.dtype][1], "shape": rows.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for rows in arrays.values():
        rows.copy_to(file)
