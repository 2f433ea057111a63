"""Files that appear whole or not at all, and write errors as sentences."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

from runner.base.errors import DiskFull, UserError

_ELSEWHERE = "choose another output directory"
_FULL = {errno.ENOSPC: "no space left", errno.EDQUOT: "the quota is used up"}
_REASONS = {
    errno.EFBIG: "it would exceed the largest file size (ulimit -f, or the file system)",
    errno.EROFS: f"the file system is read-only; {_ELSEWHERE}",
    **dict.fromkeys((errno.EACCES, errno.EPERM), f"permission denied; {_ELSEWHERE}"),
    **dict.fromkeys(
        (errno.ENOTDIR, errno.EEXIST, errno.EISDIR), "a file exists where a folder is needed, or the reverse"
    ),
}
# Some file systems cannot flush a folder; there the rename is as durable as it gets.
_FOLDER_FLUSH_UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.EBADF}


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an `OSError` raised inside the block into a `UserError` with `path` and the reason."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            full = f"{_FULL[error.errno]} on the disk that holds {path}; free some space or {_ELSEWHERE}"
            raise DiskFull(full) from error
        reason = (error.strerror or str(error) or type(error).__name__).lower()
        raise UserError(f"cannot write {path}: {_REASONS.get(error.errno or 0, reason)}") from error


def make_folder(path: Path) -> None:
    """Make a folder with its parents if it is not there; a `UserError` says why it cannot be."""
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write that gets the name `path` when the block ends; a reader, or a crash at any instant, sees no part of it.

    Until then it has a temporary name in the same folder (`.<name>.<random>.tmp`). It is flushed to the disk and renamed; then
    the folder is flushed, so that the rename itself survives a power cut. After an error in the block nothing is left.

    Raises:
        UserError: the file cannot be made; the old content is untouched.
    """
    temporary = path.parent / f".{path.name}.{secrets.token_hex(6)}.tmp"
    with writing(path):
        file = temporary.open("xb")
    try:
        yield file
        with writing(path):
            file.flush()
            os.fsync(file.fileno())
            file.close()
            os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            file.close()  # writes what is buffered, which fails again on a full disk
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    with writing(path):
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _FOLDER_FLUSH_UNSUPPORTED:
                raise
        finally:
            os.close(descriptor)


def write_atomically(path: Path, data: bytes) -> None:
    """Make `path` hold `data`, as `replacing` does.

    Raises:
        UserError: the file cannot be written; the old content is untouched.
    """
    with replacing(path) as file, writing(path):
        file.write(data)


def append(file: FileIO, data: bytes) -> None:
    """Append all of `data` to an unbuffered file, so that a kill of this process loses nothing.

    Raises:
        UserError: it cannot be written.
    """
    with writing(Path(file.name)):
        rest = memoryview(data)
        while rest:  # an unbuffered write may take a part only, as on a disk that is nearly full
            rest = rest[file.write(rest) :]


def write_json(path: Path, obj: Any) -> None:
    """Write `obj` atomically as JSON, indented by two, keys in their order; NaN and infinities become null.

    Raises:
        UserError: the file cannot be written.
        TypeError: `obj` contains something that JSON cannot represent.
    """
    text = json.dumps(finite(obj), indent=2, ensure_ascii=False, allow_nan=False)
    # The name of a file may have bytes that are not UTF-8: escaped as `\udc80`, a reader of the JSON gets them back.
    write_atomically(path, (text + "\n").encode(errors="backslashreplace"))


def finite(obj: Any) -> Any:
    """A copy of nested mappings and sequences for JSON: NaN and infinities become None, paths text."""
    if isinstance(obj, float):
        return obj if math.isfinite(obj) else None
    if isinstance(obj, Mapping):
        return {key: finite(value) for key, value in obj.items()}
    if isinstance(obj, Sequence) and not isinstance(obj, str | bytes):
        return [finite(value) for value in obj]
    return str(obj) if isinstance(obj, Path) else obj
