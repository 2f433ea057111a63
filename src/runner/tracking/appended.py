"""Log files that survive another program deleting, replacing or truncating them during a run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from runner.tracking.files import write_atomically, writing

_BLOCK = 2**20


def is_at(path: Path, descriptor: int) -> bool:
    """Whether `path` still names the open file itself, not a link."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except OSError:
        return False


def content(descriptor: int) -> bytes:
    """All bytes of an open file, which exist while it is open, even if its name is gone."""
    data = bytearray()
    while block := os.pread(descriptor, _BLOCK, len(data)):
        data += block
    return bytes(data)


class AppendedFile:
    """A file that lines are appended to; each write reaches the operating system at once.

    A file that was deleted or replaced before a write is written again with everything that it contained. A truncated file
    continues after its last complete line. Either is reported once.

    Args:
        path: the file; created if it does not exist.
        warn: called with a sentence.
        header: the first line of the file; written again if it is lost.

    Raises:
        UserError: the file cannot be opened.
    """

    def __init__(self, path: Path, warn: Callable[[str], None], header: bytes = b"") -> None:
        self.path, self._warn, self._header, self._reported = path, warn, header, False
        self._size = 0
        self._descriptor = self._open()
        # Some network file systems give a file a new inode number at each look; a comparison is meaningless there.
        self._comparable = is_at(path, self._descriptor)

    def write(self, data: bytes) -> None:
        """Append `data`.

        Raises:
            UserError: it cannot be written.
        """
        self.check()
        with writing(self.path):
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
            self._size += len(data)

    def check(self) -> None:
        """Restore the file if it is gone or was truncated within a line.

        Raises:
            UserError: it cannot be written.
        """
        gone = self._comparable and not is_at(self.path, self._descriptor)
        if not gone and os.fstat(self._descriptor).st_size >= self._size:
            return
        with writing(self.path):
            left = content(self._descriptor)
        # An incomplete line is dropped: half a number reads like another number.
        whole = left[: left.rfind(b"\n") + 1]
        if not whole.startswith(self._header):
            whole = self._header + whole
        if gone or whole != left:
            write_atomically(self.path, whole)
            # Not before: if writing fails, the owner still flushes and closes the old file.
            opened = self._open()
            self.close()
            self._descriptor = opened
        else:
            self._size = len(left)
        if not self._reported:
            self._reported = True  # first, because the report may be written to this very file
            lost = "was truncated by another program during the run; the missing lines are lost"
            again = "was deleted or replaced during the run; it was written again with all of its content"
            self._warn(f"{self.path} {again if gone else lost}")

    def sync(self) -> None:
        """Make everything written so far survive a power cut.

        Raises:
            UserError: it cannot be written.
        """
        with writing(self.path):
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file; call it once."""
        os.close(self._descriptor)

    def _open(self) -> int:
        with writing(self.path):
            descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        self._size = os.fstat(descriptor).st_size
        return descriptor
