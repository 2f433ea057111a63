"""Names and locks of folders that one process at a time writes into, and what a folder from others must not contain."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import socket
import time
from pathlib import Path

from runner.base.errors import UserError
from runner.base.files import make_folder, writing
from runner.base.reading import open_regular
from runner.tracking.run_files import PROGRESS

_OWNER, _SEEN = 0, 1  # bytes of a lock file that its owner locks: `works` looks only at the second, and hinders nobody
_descriptors: set[int] = set()  # of locks of this process; whoever has one closes it
_WRITTEN = (
    "checkpoints", "plots", "tensorboard", "config.yaml", "overrides.yaml", "environment.json", "run.log", "metrics.jsonl",
    "summary.json", PROGRESS, ".lock", "nonfinite", "samples", "trackers", "wandb", "pictures",
)  # fmt: skip
"""Names that a run or a tracker writes to, beside metrics_*.csv."""


class Occupied(UserError):
    """Another process writes into a folder."""


def claim(parent: Path, kind: str = "") -> Path:
    """Create and return a new directory in `parent`, named after the local time, such as `2026-11-20_10-31-07`.

    `_1`, `_2`, ... is added to a name that is taken, and `kind` to any.

    Creating a directory is atomic, so that two processes, or two machines on one file system, never get the same one. Raises
    `UserError` if it cannot be created.
    """
    stamp = time.strftime("%Y-%m-%d_%H-%M-%S")
    try:
        make_folder(parent)
        for path in (parent / (stamp + f"_{count}" * bool(count) + kind) for count in itertools.count()):
            with writing(path), contextlib.suppress(FileExistsError):
                path.mkdir()
                break
    except UserError as error:
        raise UserError("output_root", str(error)) from error
    return path


def hold(folder: Path) -> int | None:
    """Prevent other processes from writing into a folder until the descriptor is closed; None where there are no locks.

    Raises:
        Occupied: if another process has the folder.
        UserError: if the lock cannot be written.
    """
    # The lock belongs to the process, so the system drops it however the process ends
    path = folder / ".lock"
    with writing(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        # Unlike flock, lockf is not inherited by loader workers, which may outlive a killed run.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _OWNER)
        fcntl.lockf(descriptor, fcntl.LOCK_EX, 1, _SEEN)  # waits for a process that is just looking, see `works`
    except (BlockingIOError, PermissionError):
        owner = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
        os.close(descriptor)
        raise Occupied(f"{folder} is being written by {owner}; wait for it, or stop it first") from None
    except OSError:  # a file system without locks
        os.close(descriptor)
        return None
    _descriptors.add(descriptor)
    # Whoever finds the folder occupied learns by whom
    try:
        with writing(path):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
    except UserError:
        os.close(descriptor)
        raise
    return descriptor


def works(folder: Path, elsewhere: bool = True) -> bool:
    """True if another process `hold`s a folder; `elsewhere` is the answer for a process of another machine."""
    path = folder / ".lock"
    try:
        if _is_own(path):
            return False
        with open_regular(path) as file:
            # A lock says nothing across machines: the owner's name in the file has to do
            owner = re.fullmatch(r"process \d+ on (.*)", file.read(200).decode().strip())
            if owner is None or owner[1] != socket.gethostname():
                return owner is not None and elsewhere
            # A shared lock on another byte asks without taking the folder, see `hold`
            with contextlib.suppress(BlockingIOError, PermissionError):
                fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, _SEEN)
                return False
            return True
    except (OSError, ValueError):
        return False


def _is_own(path: Path) -> bool:
    """True if this process holds a lock file: to open and close it once more would give up the lock."""
    for descriptor in _descriptors:
        with contextlib.suppress(OSError):  # it is closed
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return True
    return False


def refuse_special_files(run: Path) -> None:
    """Raise a `UserError` for links, named pipes, sockets and devices that a run would write through: others may have made them."""
    for path in sorted([*(run / name for name in _WRITTEN), *run.glob("metrics_*.csv")]):
        if path.is_symlink():
            problem = f"{path} is a link, and a run writes only into its own directory"
            raise UserError(str(path), problem, "another directory, or output_root=... to keep runs on another disk")
        if path.exists() and not path.is_file() and not path.is_dir():
            raise UserError(f"{path} is not a regular file")
