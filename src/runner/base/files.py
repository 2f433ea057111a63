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
from typing import Any

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


def write_atomically(path: Path, data: bytes | memoryview) -> None:
    """Make `path` hold `data`; a reader, or a crash at any instant, sees the old content or the new, never a part.

    The data go to a temporary name in the same folder (`.<name>.<random>.tmp`), are flushed to the disk and renamed
    to `path`; then the folder is flushed, so that the rename itself survives a power cut.

    Raises:
        UserError: the file cannot be written; the old content is untouched and the temporary file is removed.
    """
    temporary = path.parent / f".{path.name}.{secrets.token_hex(6)}.tmp"
    with writing(path):
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _FOLDER_FLUSH_UNSUPPORTED:
                raise
        finally:
            os.close(descriptor)


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
