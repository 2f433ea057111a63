"""Checkpoints of format 1: a zip archive of `torch.save`, with the SHA-256 of everything before it in the archive's comment.

They and weights from elsewhere are all that is ever unpickled, see `runner.checkpoint.pickles`.
"""

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


def is_archive(file: BinaryIO) -> bool:
    """Whether a file begins as a zip archive does."""
    file.seek(0)
    return file.read(4) == b"PK\3\4"


def is_checkpoint(file: BinaryIO) -> bool:
    """Whether a file ends as these checkpoints do, whole or damaged."""
    file.seek(max(0, file.seek(0, os.SEEK_END) - _TRAILER))
    return file.read(len(_MARK)) == _MARK


def read(file: BinaryIO) -> Any:
    """Verify and unpickle a file: tensors and plain containers alone.

    Raises:
        Damaged: if it is altered, none of `torch.save`, or holds anything else.
        Exception: of any kind, if it is made by hand.
    """
    verify(file)
    size = file.seek(0, os.SEEK_END)
    try:
        contents = pickles.load(file, size)
    except pickles.NotSaved as error:
        raise Damaged(f"is not a checkpoint of runner's: {error}") from error
    except pickle.UnpicklingError as error:
        reason = _reason(str(error))
        raise Damaged(
            f"refused, as it holds more than tensors and plain containers ({reason}); nothing in it was run"
        ) from error
    if isinstance(contents, dict) and (reason := pickles.wrong_extent(contents, size)):
        raise Damaged(f"is not a checkpoint of runner's: {reason}")
    return contents


def _reason(message: str) -> str:
    lines = [line.strip() for line in message.splitlines()]
    return next((line for line in lines if "GLOBAL" in line or "Unsupported" in line), lines[0])[:200]


def verify(file: BinaryIO) -> None:
    """Check a file's SHA-256.

    Raises:
        Damaged: if it is missing or does not fit.
    """
    size = file.seek(0, os.SEEK_END)
    # An older zip or a bare pickle has no comment of ours; neither is unpickled, not even under restrictions.
    file.seek(max(0, size - _TRAILER))
    trailer = file.read(_TRAILER)
    if len(trailer) < _TRAILER or not trailer.startswith(_MARK):
        raise Damaged("has no checksum at its end: truncated, or not a checkpoint of runner's")
    digest = hashlib.sha256()
    remaining = size - _TRAILER - 2
    file.seek(0)
    while remaining > 0 and (block := file.read(min(_BLOCK, remaining))):
        digest.update(block)
        remaining -= len(block)
    length = file.read(2)
    digest.update(b"\0\0")
    if length != _TRAILER.to_bytes(2, "little") or digest.hexdigest().encode() != trailer[len(_MARK) :]:
        raise Damaged("its contents do not fit its checksum: the file is damaged")
