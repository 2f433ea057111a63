"""Copies of whole files of a store, which all processes of a machine share."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch

BLOCK = 2**20  # bytes that are requested at once
IDLE_S = 600.0  # a copy that was used since then is not removed
_NOTED_S = 15.0  # how often the use of a copy is noted
_FULL_S = 15.0  # how long a full folder counts as full
_COPY, _PART = ".copy", ".part"

Fetch = Callable[[int, int], bytes]
"""Gives the bytes of a file from a first one up to another."""


@dataclass
class _Download:
    """A copy that a process is making: so many bytes are there."""

    path: Path  # of the copy
    file: FileIO  # locked; unbuffered, as a process that was forked must not write what is left in a buffer
    size: int
    fetch: Fetch
    ending: contextlib.ExitStack  # closes the file, and removes it unless it became a copy
    done: int = 0


class Copies:
    """A folder of local copies of whole files, at most `limit` bytes together. A file is identified by a name, which is any text.

    A process makes one copy at a time. Each read of a file that has no copy yet downloads one more block of it, so that no read
    waits for a whole file. When the folder is full, the least recently used copies are removed. If a copy cannot be made, for
    example because the disk is full, `read` returns None. Copies are not verified: the caller does that.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit
        self._warned = torch.zeros(1, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]  # by any worker
        self._full_until = 0.0
        self._noted: dict[Path, float] = {}
        self._download: _Download | None = None
        # A forked process would hold the lock, too, and this one may read nothing any more
        own = weakref.WeakMethod(self._stop)

        def before_fork() -> None:
            if (end := own()) is not None:
                end()

        os.register_at_fork(before=before_fork)

    def read(self, name: str, size: int, fetch: Fetch, start: int, length: int) -> bytes | None:
        """Bytes of the copy of a file of `size` bytes; None if there is no copy yet. Raises what `fetch` raises."""
        path = self._path(name)
        if (content := self._read(path, start, length)) is not None:
            return content
        if self._download is None:
            self._download = self._start(path, size, fetch)
        if self._download is not None:
            self._fetch_block(self._download)
        return self._read(path, start, length)

    def remove(self, name: str) -> None:
        """Remove a copy that is damaged."""
        with contextlib.suppress(OSError):
            self._path(name).unlink()

    def _path(self, name: str) -> Path:
        return self._folder / f"{hashlib.sha256(os.fsencode(name)).hexdigest()[:32]}{_COPY}"

    def _read(self, path: Path, start: int, length: int) -> bytes | None:
        with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
            if time.monotonic() > self._noted.get(path, 0.0):
                self._noted[path] = time.monotonic() + _NOTED_S
                with contextlib.suppress(OSError):  # it may belong to another user
                    os.utime(path)
            return os.pread(file.fileno(), length, start)
        return None

    def _start(self, path: Path, size: int, fetch: Fetch) -> _Download | None:
        """The download of a file; None if another process has it, or there is no room."""
        if time.monotonic() < self._full_until or size > self._limit:
            return None
        part = path.with_suffix(_PART)
        with contextlib.ExitStack() as ending, self._warn_once():
            self._folder.mkdir(parents=True, exist_ok=True)
            file = ending.enter_context(FileIO(os.open(part, os.O_RDWR | os.O_CREAT, 0o644), "r+"))
            try:
                # Ends with the process, however it ends; what it leaves is overwritten by the next one
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return None
            ending.callback(_remove, file, part)
            if path.exists() or not _is_at(file, part):  # another process was faster
                return None
            if self._reserve(file, size):
                return _Download(path, file, size, fetch, ending.pop_all())
            self._full_until = time.monotonic() + _FULL_S
        return None

    def _fetch_block(self, download: _Download) -> None:
        """Download one more block; the last one makes the copy."""
        part, unfinished = download.path.with_suffix(_PART), False
        try:
            block = download.fetch(download.done, min(download.done + BLOCK, download.size))
            with self._warn_once():
                while block:
                    written = os.pwrite(download.file.fileno(), block, download.done)
                    block, download.done = block[written:], download.done + written
                unfinished = download.done < download.size
                if not unfinished and _is_at(download.file, part):
                    part.rename(download.path)
        finally:
            if not unfinished:
                self._stop()

    def _stop(self) -> None:
        """End the download; what is there of it is removed."""
        download, self._download = self._download, None
        if download is not None:
            with contextlib.suppress(OSError):
                download.ending.close()

    @contextlib.contextmanager
    def _warn_once(self) -> Iterator[None]:
        """Errors of the disk end the download, and are reported once."""
        try:
            yield
        except OSError as error:
            self._full_until = time.monotonic() + IDLE_S
            if not self._warned[0]:
                self._warned[0] = 1
                reason = error.strerror or error
                problem = f"cannot keep copies of shards in {self._folder}: {reason}; the store is read instead"
                print(f"warning: {problem}", file=sys.stderr, flush=True)

    def _reserve(self, file: FileIO, size: int) -> bool:
        """Give a new copy its size, at which it counts from now on, once others made room; tells whether there is room."""
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            os.truncate(file.fileno(), 0)
            others = []
            for path in self._folder.iterdir():
                with contextlib.suppress(FileNotFoundError):
                    if path.suffix in (_COPY, _PART):
                        about = path.stat()
                        others.append((about.st_mtime, about.st_size, path))
            excess = sum(length for _, length, _ in others) + size - self._limit
            idle = [each for each in sorted(others) if each[0] < time.time() - IDLE_S]
            if excess > sum(length for _, length, _ in idle):
                return False
            for _, length, path in idle:
                if excess > 0 and _removed(path):
                    excess -= length
            if excess <= 0:
                os.truncate(file.fileno(), size)
            return excess <= 0
        finally:
            os.close(folder)


def _removed(path: Path) -> bool:
    """Remove a copy, or what a killed process left of one."""
    with contextlib.suppress(OSError), path.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
        return True
    return False


def _remove(file: FileIO, path: Path) -> None:
    with contextlib.suppress(OSError):
        if _is_at(file, path):
            path.unlink()


def _is_at(file: FileIO, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False
