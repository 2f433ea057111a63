"""Whether there is room for a checkpoint, asked before it is written."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from runner.checkpoint.structure import identity
from runner.config.errors import UserError
from runner.instrument.nested import tensors_in

_MIB = 2**20


def size_of(value: Any) -> int:
    """Bytes of the tensors in nested containers, tied ones once."""
    tensors = {identity(leaf): leaf for leaf in tensors_in(value)}
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def require_space(folder: Path, size: int) -> None:
    """See that a file of `size` bytes fits beside what is there.

    Raises:
        UserError: if it does not.
    """
    free = _free(folder)
    if free is not None and free < size:
        raise UserError(
            "checkpoint",
            f"the disk that holds {folder} has {free / _MIB:,.0f} MiB free, and the next one takes "
            f"{size / _MIB:,.0f} MiB; earlier checkpoints are untouched",
            "free some space, a smaller checkpoint.keep, or another output_root",
        )


def scarce(folder: Path, size: int, keep: int) -> str:
    """A warning if the checkpoints that a run keeps may not fit, or an empty string.

    Args:
        folder: where they go.
        size: bytes of one, at most.
        keep: how many of the newest are kept; the best one and the one being written come on top.
    """
    free = _free(folder)
    if free is None or free >= size * (keep + 2):
        return ""
    return (
        f"checkpoints may not fit: the disk that holds {folder} has {free / _MIB:,.0f} MiB free, and up to "
        f"{keep + 2} of {size / _MIB:,.0f} MiB are there at a time; free some space, or set a smaller checkpoint.keep"
    )


def _free(folder: Path) -> int | None:
    """Bytes free on the disk that holds a folder; None where the file system does not tell, as writing will."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None
