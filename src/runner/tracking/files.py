"""Files that appear whole or not at all, and write errors told as sentences."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.config.errors import UserError

_FULL = {errno.ENOSPC, errno.EDQUOT}
_REFUSED = {errno.EACCES, errno.EPERM, errno.EROFS}
# Some file systems cannot flush a folder; on those the rename is as durable as it gets.
_FOLDER_FLUSH_UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.EBADF}


def write_error(path: Path, error: OSError) -> UserError:
    """The sentence for `error`, which was met while writing `path`."""
    if error.errno in _FULL:
        what = "no space left" if error.errno == errno.ENOSPC else "the quota is used up"
        return UserError(f"{what} on the disk that holds {path}; free some space or choose another output directory")
    if error.errno == errno.EFBIG:
        return UserError(
            f"cannot write {path}: it would be larger than files may be here (ulimit -f, or the file system)"
        )
    if error.errno == errno.EROFS:
        return UserError(f"cannot write {path}: the file system is read-only; choose another output directory")
    if error.errno in _REFUSED:
        return UserError(f"cannot write {path}: permission denied; choose another output directory")
    if error.errno in {errno.ENOTDIR, errno.EEXIST, errno.EISDIR}:
        return UserError(f"cannot write {path}: a file stands where a folder is needed, or the reverse")
    reason = (error.strerror or str(error) or type(error).__name__).lower()
    return UserError(f"cannot write {path}: {reason}")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an `OSError` raised inside the block into a `UserError` that names `path` and the reason."""
    try:
        yield
    except OSError as error:
        raise write_error(path, error) from error


def write_atomically(path: Path, data: bytes) -> None:
    """Make `path` hold `data`; a reader, or a crash at any instant, sees the old content or the new, never a part.

    The data go to a temporary name in the same folder (`.<name>.<random>.tmp`), are flushed to the disk and renamed
    to `path`; then the folder is flushed, so that the rename itself survives a power cut.

    Raises:
        UserError: the file cannot be written; the old content is untouched and the temporary file is gone.
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
        _flush_folder(path.parent)


def write_json(path: Path, obj: Any) -> None:
    """Write `obj` atomically as JSON, indented by two, keys in their order; NaN and the infinities become null.

    Raises:
        UserError: the file cannot be written.
        TypeError: `obj` holds something that JSON has no form for.
    """
    text = json.dumps(finite(obj), indent=2, ensure_ascii=False, allow_nan=False)
    write_atomically(path, (text + "\n").encode())


def finite(obj: Any) -> Any:
    """A copy of nested mappings and sequences in which every NaN and infinity is None, as JSON knows neither."""
    if isinstance(obj, float):
        return obj if math.isfinite(obj) else None
    if isinstance(obj, Mapping):
        return {key: finite(value) for key, value in obj.items()}
    if isinstance(obj, Sequence) and not isinstance(obj, str | bytes):
        return [finite(value) for value in obj]
    if isinstance(obj, Path):
        return str(obj)
    return obj


def _flush_folder(folder: Path) -> None:
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _FOLDER_FLUSH_UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)
