"""Checkpoints of format 1: a zip archive of `torch.save`, with the SHA-256 of everything before it in the archive's comment."""

from __future__ import annotations

import hashlib
import os
import pickle
from typing import Any, BinaryIO

from runner.checkpoint import pickles
from runner.checkpoint.layout import Damaged

_MARK = b"runner-sha256:"
_TRAILER = len(_MARK) + 64
_BLOCK = 1 << 20
_VALUES = 2**20  # that contents may stand for beyond one a byte of the file


def is_checkpoint(file: BinaryIO) -> bool:
    """Whether a file ends as these checkpoints do, whole or damaged."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - _TRAILER))
    return file.read(len(_MARK)) == _MARK


def read(file: BinaryIO) -> Any:
    """Verify and unpickle a file, see `runner.checkpoint.pickles`.

    Raises:
        Damaged: if it is altered, none of `torch.save`, or holds more than tensors and plain containers.
        Exception: of any kind, if it is made by hand.
    """
    verify(file)
    try:
        contents = pickles.load(file)
        pickles.check_extent(contents, file.seek(0, os.SEEK_END) + _VALUES)
    except pickles.NotSaved as error:
        raise Damaged(f"is not a checkpoint of runner's: {error}") from error
    except pickle.UnpicklingError as error:
        reason = (
            f"refused, as it holds more than tensors and plain containers ({str(error)[:200]}); nothing in it was run"
        )
        raise Damaged(reason) from error
    return contents


_FOREIGN = (
    "has no checksum at its end: truncated, or a file of another program; init_from= starts a run from weights of Lightning, "
    "timm and others"
)


def verify(file: BinaryIO) -> None:
    """Check a file's SHA-256.

    Raises:
        Damaged: if it is missing or does not fit.
    """
    size = file.seek(0, os.SEEK_END)
    # An older zip or a bare pickle has no comment of ours, and is not unpickled at all.
    file.seek(max(0, size - _TRAILER))
    trailer = file.read(_TRAILER)
    if len(trailer) < _TRAILER or not trailer.startswith(_MARK):
        raise Damaged(_FOREIGN)
    digest, left = hashlib.sha256(), size - _TRAILER - 2
    file.seek(0)
    while left > 0 and (block := file.read(min(_BLOCK, left))):
        digest.update(block)
        left -= len(block)
    length = file.read(2)
    digest.update(b"\0\0")
    if length != _TRAILER.to_bytes(2, "little") or digest.hexdigest().encode() != trailer[len(_MARK) :]:
        raise Damaged("its contents do not match its checksum: the file is damaged")
