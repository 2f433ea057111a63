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
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from runner.config.errors import UserError
from runner.tracking.files import writing

Arrays = Mapping[str, np.ndarray[Any, Any]]


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
    files: dict[str, IO[bytes]] = {}
    empty: dict[str, np.ndarray[Any, Any]] = {}  # an array without rows for each file: dtype and shape of a row
    counts: dict[str, int] = {}
    with writing(path), contextlib.ExitStack() as stack:
        scratch.mkdir(parents=True)
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        for batch in batches:
            for name, tensor in batch.items():
                dtype = torch.float32 if tensor.is_floating_point() else torch.int64
                rows = tensor.detach().to("cpu", dtype).contiguous().numpy()
                if name not in files:
                    files[name] = stack.enter_context((scratch / str(len(files))).open("w+b"))
                    empty[name], counts[name] = rows[:0].copy(), 0
                if rows.shape[1:] != empty[name].shape[1:]:
                    shapes = f"{rows.shape[1:]} in one batch and of {empty[name].shape[1:]} in another"
                    raise UserError("features", f"{name} has rows of {shapes}", "layers whose outputs have one shape")
                files[name].write(rows.data)
                counts[name] += len(rows)
        arrays = dict(empty)
        for name, file in files.items():
            file.flush()
            if file.tell():  # an empty file cannot be mapped
                arrays[name] = np.memmap(file, empty[name].dtype, "r", shape=(counts[name], *empty[name].shape[1:]))
        whole = scratch / "whole"
        with whole.open("wb") as target:
            (_write_npz if path.suffix == ".npz" else _write_safetensors)(target, arrays)
            target.flush()
            os.fsync(target.fileno())
        os.replace(whole, path)
    return {name: array.shape for name, array in arrays.items()}


def _write_npz(file: IO[bytes], arrays: Arrays) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, array)


def _write_safetensors(file: IO[bytes], arrays: Arrays) -> None:
    """Length of the header, header in JSON, rows: https://github.com/huggingface/safetensors#format."""
    header, end = {}, 0
    for name, array in arrays.items():
        begin, end = end, end + array.nbytes
        dtype = {"f": "F32", "i": "I64"}[array.dtype.kind]
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for array in arrays.values():
        file.write(array.data)
