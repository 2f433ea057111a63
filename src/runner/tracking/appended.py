"""Log files that survive being deleted, replaced or cut short by another program while a run writes them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from runner.tracking.files import write_atomically, writing

_BLOCK = 2**20


def is_at(path: Path, descriptor: int) -> bool:
    """Whether `path` still names the open file; a link in its place does not count."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except OSError:
        return False


def content(descriptor: int) -> bytes:
    """All bytes of an open file, which the system keeps for as long as it is open, whatever became of its name."""
    blocks, offset = [], 0
    while block := os.pread(descriptor, _BLOCK, offset):
        blocks.append(block)
        offset += len(block)
    return b"".join(blocks)


class AppendedFile:
    """A file that lines are added to. Each write reaches the operating system at once.

    Before a write it looks whether the file is still there. One that was deleted or replaced is written again, with all
    that it held, as the open file still has it. One that was cut short goes on after its last whole line. That is
    reported once.

    Args:
        path: the file; created if it does not exist.
        warn: called with a sentence.
        header: the line that the file starts with; written again if it is cut off.

    Raises:
        UserError: the file cannot be opened.
    """

    def __init__(self, path: Path, warn: Callable[[str], None], header: bytes = b"") -> None:
        self.path, self._warn, self._header, self._reported = path, warn, header, False
        self._size = 0
        self._descriptor = self._open()
        # On a file system whose inode numbers change between two looks, no comparison means anything.
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
        """Write the file again if it is gone or was cut in the middle of a line.

        Raises:
            UserError: it cannot be written.
        """
        gone = self._comparable and not is_at(self.path, self._descriptor)
        if not gone and os.fstat(self._descriptor).st_size >= self._size:
            return
        with writing(self.path):
            left = content(self._descriptor)
        # The rest of a line that was cut in the middle is dropped: half a number reads like another number.
        whole = left[: left.rfind(b"\n") + 1]
        if not whole.startswith(self._header):
            whole = self._header + whole
        if gone or whole != left:
            write_atomically(self.path, whole)
            # Only now, as what could not be written again is still to be flushed and closed by its owner.
            opened = self._open()
            self.close()
            self._descriptor = opened
        else:
            self._size = len(left)
        if gone:
            self._report("was deleted or replaced during the run; it was written again, with all that was logged in it")
        else:
            self._report("was cut short by another program during the run; what was cut off is lost")

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

    def _report(self, what: str) -> None:
        if not self._reported:
            self._reported = True  # first, as the report may be written to this very file
            self._warn(f"{self.path} {what}")
