"""Changes to a forked process that make its disk slow, or end it at a chosen operation of checkpoint writing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults.lives import Prepare

_SLEEP_S = 0.0005


class _Watched:
    """An open file that reports every write: before it, in its middle and after it."""

    def __init__(self, inner: Any, tell: Callable[[], None]) -> None:
        self._inner, self._tell = inner, tell

    def write(self, data: bytes) -> int:
        data = bytes(data)
        half = len(data) // 2
        self._tell()
        written = self._inner.write(data[:half])
        self._inner.flush()
        self._tell()
        return int(written + self._inner.write(data[half:]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __enter__(self) -> _Watched:
        return self

    def __exit__(self, *_: object) -> None:
        self._inner.close()


def telling(tell: Callable[[], None]) -> None:
    """Call `tell` around every operation that writes a checkpoint: writes, flushes to the disk, renames, links, deletions."""
    open_path = Path.open

    def open_watched(self: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        file = open_path(self, mode, *args, **options)
        watched = self.parent.name == "checkpoints" and ("w" in mode or "x" in mode)
        return _Watched(file, tell) if watched else file

    Path.open = open_watched  # type: ignore[method-assign, assignment]
    for owner, name in ((os, "fsync"), (os, "replace"), (os, "link"), (Path, "unlink")):
        original = getattr(owner, name)

        def operate(*args: Any, original: Callable[..., Any] = original, **options: Any) -> Any:
            tell()
            result = original(*args, **options)
            tell()
            return result

        setattr(owner, name, operate)


def slow() -> None:
    """Make every operation take a while."""
    telling(lambda: time.sleep(_SLEEP_S))


def counting(path: Path) -> Prepare:
    """Count the operations of the whole run into a file."""

    def prepare() -> None:
        done = [0]

        def tell() -> None:
            done[0] += 1
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
            os.pwrite(descriptor, f"{done[0]:9d}".encode(), 0)
            os.close(descriptor)

        telling(tell)

    return prepare


def dying(countdown: int) -> Prepare:
    """End the process with SIGKILL at an operation, counted from the first."""

    def prepare() -> None:
        left = [countdown]

        def tell() -> None:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        telling(tell)

    return prepare
