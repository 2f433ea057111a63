"""One checkpoint is one file that verifies itself.

The file is what `torch.save` writes, a zip archive, with the SHA-256 of everything before it in the archive's comment. So
torch and any zip tool read it as usual, and a flipped bit or a missing end is found before anything is unpickled. Loading
is restricted to tensors and plain containers.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import pickle
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any, BinaryIO

import torch

from runner.checkpoint import pickles
from runner.checkpoint.scan import wrong_contents
from runner.config.errors import UserError, first_line
from runner.config.reading import open_regular

FORMAT = 1
KEYS = (
    "format",
    "model",
    "optimizer",
    "scheduler",
    "scaler",
    "averaged",
    "rng",
    "position",
    "config",
    "classes",
    "metrics",
    "versions",
)
_MARK = b"runner-sha256:"
_TRAILER = len(_MARK) + 64
_BLOCK = 1 << 20
# What the restricted loader takes back; exact types, since a subclass such as np.float64 is refused.
_CONTAINERS = (dict, OrderedDict, Counter, list, tuple, set)
_LEAVES = (type(None), bool, int, float, complex, str, bytes, bytearray, torch.Size, torch.dtype, torch.device)


class DamagedCheckpoint(UserError):
    """The file is not a whole checkpoint: truncated, altered, or something else."""


class _Hashing:
    """A file that hashes what is written to it.

    Attributes:
        error: why a write failed; torch says `unexpected pos` in its place.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise

    def flush(self) -> None:
        self._file.flush()


def write(path: Path, contents: dict[str, Any]) -> None:
    """Write a checkpoint: whole or not at all, and on the disk when this returns.

    Args:
        path: target; an older file there is replaced only once the new one is complete.
        contents: tensors and plain containers under `KEYS`.

    Raises:
        UserError: if it cannot be written, or holds what could not be read back; nothing is left behind and the older
            file is untouched.
    """
    assert set(contents) == set(KEYS), f"a checkpoint has exactly the keys {KEYS}"
    for key, value in contents.items():
        if place := _foreign(value, key):
            raise UserError(
                f"checkpoint: {place}, which could not be read back; {path} was not written\n"
                "    allowed: tensors, numbers, texts, and lists and mappings of them, as what a state_dict() gives"
            )
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    hashing: _Hashing | None = None
    try:
        with temporary.open("wb") as file:
            hashing = _Hashing(file)
            torch.save(contents, hashing)  # type: ignore[arg-type]
            comment = _MARK + hashing.digest.hexdigest().encode()
            # The archive ends with the length of its comment, so far zero.
            file.seek(-2, os.SEEK_END)
            file.write(len(comment).to_bytes(2, "little") + comment)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        cause = (hashing and hashing.error) or error
        reason = (cause.strerror or str(cause)) if isinstance(cause, OSError) else str(cause)
        if isinstance(cause, OSError) and cause.errno == errno.EFBIG:
            reason = "it would be larger than files may be here (ulimit -f, or the file system)"
        raise UserError(f"checkpoint: cannot write {path}: {reason}; earlier checkpoints are untouched") from error


def _foreign(value: Any, place: str) -> str:
    """Where something lies that the restricted loader refuses, and what it is; an empty string if there is nothing."""
    if type(value) in _LEAVES or isinstance(value, torch.Tensor):
        return ""
    if type(value) not in _CONTAINERS:
        return f"{place} is a {type(value).__name__}"
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return next(filter(None, (_foreign(item, f"{place}.{key}") for key, item in items)), "")


def link(source: Path, target: Path) -> None:
    """Make `target` the same checkpoint as `source`, atomically; a copy where the file system has no links.

    Raises:
        UserError: if it cannot be written.
    """
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        try:
            os.link(source, temporary)
        except OSError:
            with source.open("rb") as reading, temporary.open("wb") as writing:
                while block := reading.read(_BLOCK):
                    writing.write(block)
                writing.flush()
                os.fsync(writing.fileno())
        os.replace(temporary, target)
        # Where both names are one file already, replacing does nothing and leaves the temporary name.
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        _sync_folder(target.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise UserError(f"checkpoint: cannot write {target}: {error}") from error


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_marked(path: Path) -> bool:
    """Whether a file ends as checkpoints do, whole or damaged.

    Raises:
        UserError: if there is no such file, or it cannot be read.
    """
    with _opened(path) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TRAILER))
        return file.read(len(_MARK)) == _MARK


def verify(path: Path) -> None:
    """Check the file's SHA-256.

    Raises:
        DamagedCheckpoint: if it is missing or does not fit.
        UserError: if there is no such file, or it cannot be read.
    """
    with _opened(path) as file:
        _verify(file, path)


def read(path: Path) -> dict[str, Any]:
    """Verify and load a checkpoint onto the CPU.

    Returns:
        The contents, brought up to the current format.

    Raises:
        DamagedCheckpoint: if it is truncated, altered, no checkpoint, or holds more than tensors and plain containers.
        UserError: if there is no such file, it cannot be read, or a newer version wrote it.
    """
    with _opened(path) as file:
        _verify(file, path)
        size = file.seek(0, os.SEEK_END)
        try:
            contents = pickles.load(file, size)
        except pickles.NotSaved as error:
            raise DamagedCheckpoint(f"{path}: is not a checkpoint of runner's: {error}") from error
        except pickle.UnpicklingError as error:
            reason = _reason(str(error))
            raise DamagedCheckpoint(
                f"{path}: refused, as it holds more than tensors and plain containers ({reason}); nothing in it was run"
            ) from error
        except Exception as error:  # what a file made by hand can raise in the unpickler has no end
            reason = first_line(error)
            raise DamagedCheckpoint(f"{path}: cannot be read: {reason}") from error
    # A newer format may have other keys, and is no damage: looked at first, so that no older file is taken in its place.
    written = contents.get("format") if isinstance(contents, dict) else None
    if type(written) is int and written > FORMAT:
        raise UserError(f"{path}: has format {written}, and this version reads up to {FORMAT}: update runner")
    if not isinstance(contents, dict) or set(contents) != set(KEYS):
        raise DamagedCheckpoint(f"{path}: is not a checkpoint of runner's: its keys are not {', '.join(KEYS)}")
    if type(written) is not int or written < 1:
        raise DamagedCheckpoint(f"{path}: is not a checkpoint of runner's: its format is not a number from 1 on")
    if place := wrong_contents(contents, size):
        raise DamagedCheckpoint(f"{path}: is not a checkpoint of runner's: {place}")
    return contents


def _reason(message: str) -> str:
    lines = [line.strip() for line in message.splitlines()]
    return next((line for line in lines if "GLOBAL" in line or "Unsupported" in line), lines[0])[:200]


def _opened(path: Path) -> BinaryIO:
    try:
        return open_regular(path)
    except OSError as error:
        raise UserError(f"checkpoint: cannot read {path}: {error.strerror or error}") from error


def _verify(file: BinaryIO, path: Path) -> None:
    size = file.seek(0, os.SEEK_END)
    # An older zip or a bare pickle has no comment of ours; neither is unpickled, not even under restrictions.
    file.seek(max(0, size - _TRAILER))
    trailer = file.read(_TRAILER)
    if len(trailer) < _TRAILER or not trailer.startswith(_MARK):
        raise DamagedCheckpoint(f"{path}: has no checksum at its end: truncated, or not a checkpoint of runner's")
    digest = hashlib.sha256()
    remaining = size - _TRAILER - 2
    file.seek(0)
    while remaining > 0:
        block = file.read(min(_BLOCK, remaining))
        if not block:
            break
        digest.update(block)
        remaining -= len(block)
    length = file.read(2)
    digest.update(b"\0\0")
    if length != _TRAILER.to_bytes(2, "little") or digest.hexdigest().encode() != trailer[len(_MARK) :]:
        raise DamagedCheckpoint(f"{path}: its contents do not fit its checksum: the file is damaged")
