"""Features of a whole split in one file, `.npz` or `.safetensors`, with no more than a batch of them in memory."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from safetensors.numpy import save_file
from torch import Tensor

from runner.base.errors import UserError
from runner.base.files import writing


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
    arrays: dict[str, np.ndarray[Any, Any]] = {}  # without rows until all are written: dtype and shape of a row
    files: dict[str, IO[bytes]] = {}
    with writing(path), contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.")))
        # Neither format can be appended to, so each array grows in a file of its own, which is mapped at the end.
        for batch in batches:
            for name, tensor in batch.items():
                rows = tensor.detach().to("cpu", torch.float32 if tensor.is_floating_point() else torch.int64).numpy()
                if name not in files:
                    files[name] = stack.enter_context((scratch / str(len(files))).open("w+b"))
                    arrays[name] = rows[:0].copy()
                if rows.shape[1:] != arrays[name].shape[1:]:
                    shapes = f"{rows.shape[1:]} in one batch and of {arrays[name].shape[1:]} in another"
                    raise UserError("features", f"{name} has rows of {shapes}", "layers whose outputs have one shape")
                files[name].write(np.ascontiguousarray(rows).data)
        # Arrays are mapped, so that features larger than the memory can be written
        for name, file in files.items():
            file.flush()
            if file.tell():  # an empty file cannot be mapped
                shape = arrays[name].shape[1:]
                arrays[name] = np.memmap(file, arrays[name].dtype, "r").reshape(-1, *shape)
        # The file gets its name when it is on the disk
        whole = scratch / "whole.npz"
        if path.suffix == ".npz":
            np.savez(whole, **arrays)  # type: ignore[arg-type]
        else:
            save_file(arrays, whole)
        with whole.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(whole, path)
    return {name: array.shape for name, array in arrays.items()}
