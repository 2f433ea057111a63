"""Files that appear whole or not at all, and write errors as sentences."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import secrets
import stat
import sys
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
def writing(path: Path, key: str = "", allowed: str = "") -> Iterator[None]:
    """Turn an `OSError` raised inside the block into a `UserError` with `path` and the reason, and a key to set if there is one."""
    try:
        yield
    except OSError as error:
        if key:
            kind = DiskFull if error.errno in _FULL else UserError
            raise kind(key, f"cannot write {path.absolute()}: {error.strerror or error}", allowed) from error
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
def renaming(path: Path) -> Iterator[Path]:
    """A temporary name for a file that gets the name `path` when the block ends; after an error in it nothing is left.

    The name is in the same folder: `.<name>.<random>.tmp`, by which leftovers of killed processes are known. After the rename,
    the folder is flushed, so that the rename itself survives a power cut.

    Raises:
        OSError: the file cannot be renamed; the old content is untouched.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _FOLDER_FLUSH_UNSUPPORTED:
                raise
        finally:
            os.close(descriptor)
    finally:
        # It is still there after an error, and if both names are one file: then replacing does nothing
        with contextlib.suppress(OSError):
            temporary.unlink()


@contextlib.contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write that becomes `path` when the block ends; a reader, or a crash at any instant, sees no part of it.

    Raises:
        OSError: it cannot be written; the old content is untouched.
    """
    with renaming(path) as temporary:
        file = temporary.open("xb")
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            with contextlib.suppress(OSError):
                file.close()  # writes what is buffered, which fails again on a full disk
            raise
        file.close()


@contextlib.contextmanager
def replacing(path: Path, *, named: bool = False) -> Iterator[BinaryIO]:
    """A file to write as `whole` does.

    `named` is for a path of the user's: a link is followed, and what is not an ordinary file, such as /dev/stdout or a named pipe,
    is written into. Any other link is replaced, as a run directory may come from someone else.

    Raises:
        UserError: the file cannot be written.
    """
    with contextlib.ExitStack() as ending:
        with writing(path):
            special = _special(path) if named else None
            target = Path(os.path.realpath(path)) if named and path.is_symlink() else path
            file = ending.enter_context(special or whole(target))
        yield file
        with writing(path):
            ending.close()


def _special(path: Path) -> BinaryIO | None:
    """What is not an ordinary file, opened; None for what can be replaced."""
    if not path.exists():
        return None
    found = path.stat()
    # A file that the shell has opened goes on where it is, and is not opened again, which would begin at its start
    for descriptor in (1, 2, int(path.name) if path.name.isdecimal() else 2):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(descriptor), found):
                sys.stdout.flush()
                return os.fdopen(os.dup(descriptor), "wb")
    return None if stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode) else path.open("wb")


def write_atomically(path: Path, data: bytes, *, named: bool = False) -> None:
    """Make `path` hold `data`, as `replacing` does, with its errors; after one the old content is untouched."""
    with replacing(path, named=named) as file, writing(path):
        file.write(data)


def append(file: FileIO, data: bytes) -> None:
    """Append all of `data` to an unbuffered file, so that a kill of this process loses nothing; errors as of `writing`."""
    with writing(Path(file.name)):
        rest = memoryview(data)
        while rest:  # an unbuffered write may take a part only, as on a disk that is nearly full
            rest = rest[file.write(rest) :]


def write_json(path: Path, obj: Any, *, named: bool = False) -> None:
    """Write `obj` as `replacing` does, as JSON, indented by two, keys in their order; NaN and infinities become null.

    Raises:
        UserError: the file cannot be written.
        TypeError: `obj` contains something that JSON cannot represent.
    """
    text = json.dumps(finite(obj), indent=2, ensure_ascii=False, allow_nan=False)
    # The name of a file may have bytes that are not UTF-8: escaped as `\udc80`, a reader of the JSON gets them back.
    write_atomically(path, (text + "\n").encode(errors="backslashreplace"), named=named)


def finite(obj: Any) -> Any:
    """A copy of nested mappings and sequences for JSON: NaN and infinities become None, paths text."""
    if isinstance(obj, float):
        return obj if math.isfinite(obj) else None
    if isinstance(obj, Mapping):
        return {key: finite(value) for key, value in obj.items()}
    if isinstance(obj, Sequence) and not isinstance(obj, str | bytes):
        return [finite(value) for value in obj]
    return str(obj) if isinstance(obj, Path) else obj
