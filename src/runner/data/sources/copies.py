"""Copies of whole files of a store, which all processes of a machine share."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import torch

BLOCK = 2**22  # bytes that are requested at once
IDLE_S = 60.0  # a copy that was used since then is not removed
_SEEN_S = 15.0  # how often the use of a copy is noted, and how long a full folder counts as full

Fetch = Callable[[int, int], bytes]
"""Gives the bytes of a file from a first one up to another."""


class Copies:
    """A folder with copies of whole files, up to `limit` bytes, each of which has a name, any text.

    A process that needs a file downloads it unless another one does so. The copies that were used last stay. Whatever prevents a
    copy, such as a full disk, means that there is none.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit
        self._warned = torch.zeros(1, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]  # by any worker
        self._full_until = 0.0
        self._noted: dict[Path, float] = {}

    def read(self, name: str, size: int, fetch: Fetch, start: int, length: int) -> bytes | None:
        """Bytes of the copy, see `open`."""
        file = self.open(name, size, fetch)
        with contextlib.suppress(OSError):
            if file is not None:
                with file:
                    return os.pread(file.fileno(), length, start)
        return None

    def open(self, name: str, size: int, fetch: Fetch) -> BinaryIO | None:
        """The copy of a file of `size` bytes, which is made if need be; None if there is none. Raises what `fetch` raises."""
        path = self._path(name)
        for _ in range(2):
            with contextlib.suppress(OSError):
                file = path.open("rb")
                if time.monotonic() > self._noted.get(path, 0.0):
                    self._noted[path] = time.monotonic() + _SEEN_S
                    os.utime(path)
                return file
            if not self._make(path, size, fetch):
                break
        return None

    def remove(self, name: str) -> None:
        """Remove a copy that is damaged."""
        with contextlib.suppress(OSError):
            self._path(name).unlink()

    def _path(self, name: str) -> Path:
        return self._folder / f"{hashlib.sha256(os.fsencode(name)).hexdigest()[:32]}.tar"

    def _make(self, path: Path, size: int, fetch: Fetch) -> bool:
        """Download a file; tells whether there is a copy now."""
        if time.monotonic() < self._full_until:
            return False
        part = path.with_suffix(".part")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with os.fdopen(os.open(part, os.O_RDWR | os.O_CREAT, 0o644), "r+b") as file:
                # Ends with the process, however it ends; what it leaves is overwritten by the next one
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if path.exists() or not _is_at(file, part):  # another process was faster
                    return path.exists()
                try:
                    if self._reserved(file, size):
                        for start in range(0, size, BLOCK):
                            file.write(fetch(start, min(start + BLOCK, size)))
                        file.flush()
                        part.rename(path)
                        return True
                    self._full_until = time.monotonic() + _SEEN_S
                except BaseException:
                    part.unlink(missing_ok=True)
                    raise
                part.unlink(missing_ok=True)
        except BlockingIOError:
            pass
        except OSError as error:
            self._full_until = time.monotonic() + IDLE_S
            if not self._warned[0]:
                self._warned[0] = 1
                reason = error.strerror or error
                problem = f"cannot keep copies of shards in {self._folder}: {reason}; the store is read instead"
                print(f"warning: {problem}", file=sys.stderr, flush=True)
        return False

    def _reserved(self, file: BinaryIO, size: int) -> bool:
        """Give a new copy its size, at which it counts from now on, once others made room; tells whether there is room."""
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            os.truncate(file.fileno(), 0)
            others = []
            for path in self._folder.iterdir():
                with contextlib.suppress(FileNotFoundError):
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


def _is_at(file: BinaryIO, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False
