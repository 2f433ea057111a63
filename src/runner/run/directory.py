"""The directory of one run, used by one process only, and its files."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import socket
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import yaml

from runner.base.errors import UserError
from runner.base.files import make_folder, write_atomically, write_json, writing
from runner.base.reading import open_regular, read_json, read_summary
from runner.base.secrets import mask_text, mask_words
from runner.tracking import progress_file
from runner.tracking.jsonl import copy_until

_OWNER, _SEEN = 0, 1  # bytes of a lock file that its owner locks: `works` looks only at the second, and hinders nobody
_descriptors: set[int] = set()  # of locks of this process; whoever has one closes it


class Occupied(UserError):
    """Another process writes into a folder."""


def timestamp() -> str:
    """The local time in names of directories, such as `2026-11-20_10-31-07`."""
    return time.strftime("%Y-%m-%d_%H-%M-%S")


def claim(parent: Path, stamp: str, kind: str = "") -> Path:
    """Create and return a new directory `parent/stamp`, or `stamp_1`, `stamp_2`, ... if the name is taken; `kind` ends the name.

    Creating a directory is atomic, so that two processes, or two machines on one file system, never get the same one.

    Raises:
        UserError: the directory cannot be created.
    """
    try:
        make_folder(parent)
        for path in (parent / (stamp + f"_{count}" * bool(count) + kind) for count in itertools.count()):
            with writing(path), contextlib.suppress(FileExistsError):
                path.mkdir()
                break
    except UserError as error:
        raise UserError("output_root", str(error)) from error
    return path


def unfinished(runs: Path, same: Callable[[Path], bool]) -> tuple[RunDirectory | None, list[str]]:
    """The newest run in `runs` that is the `same` and has not finished, unless a newer one has, and warnings.

    Directories that cannot be read or used are skipped with a warning, because they may belong to someone else.
    """
    from runner.checkpoint.find import recency  # imports torch, which reports and sweeps do without

    skipped, finished = list[str](), list[Path]()  # finished ones are compared only if it matters, as that takes time

    # A run that cannot be read is skipped with a warning, as an older one may be fine
    def opened(folder: Path) -> RunDirectory | None:
        try:
            if same(folder):
                if os.path.lexists(folder / "summary.json") and read_summary(folder) is None:
                    raise ValueError("summary.json cannot be read")
                return RunDirectory(folder)
        except (ValueError, UserError) as error:
            skipped.append(f"resume=auto skips {folder}: {error}")
        return None

    # Every run has this file, because it is written first
    for folder in sorted((path.parent for path in runs.glob("*/overrides.yaml")), key=recency, reverse=True):
        if (read_summary(folder) or {}).get("status") == "finished":
            # A finished run that is newer than the unfinished one wins: what was interrupted was done again
            finished.append(folder)
        elif found := opened(folder):
            return (None if any(map(opened, finished)) else found), skipped
    return None, skipped


def slurm_job(folder: Path) -> str:
    """The number of the SLURM job that a run began in; an empty string if there was none."""
    variables = read_json(folder / "environment.json").get("variables")
    return str(variables.get("SLURM_JOB_ID", "")) if isinstance(variables, dict) else ""


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


class RunDirectory:
    """The files of one run; creates the folders of checkpoints and plots.

    Raises:
        UserError: the directory cannot be written, or contains links or special files.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.plots = path / "plots"
        self.tensorboard = path / "tensorboard"
        self.config_file = path / "config.yaml"  # resolved
        self.overrides_file = path / "overrides.yaml"  # of the command line
        self.environment_file = path / "environment.json"
        self.log_file = path / "run.log"  # what the console showed, with times
        self.metrics_file = path / "metrics.jsonl"
        self.summary_file = path / "summary.json"  # status and final metrics
        self.progress_file = path / progress_file.NAME  # while it trains
        self._lock: int | None = None
        # Before anything is written, as a link would lead the first write elsewhere
        self._refuse_special_files()
        for folder in (self.checkpoints, self.plots):
            make_folder(folder)

    def _refuse_special_files(self) -> None:
        """Refuse links, named pipes, sockets and devices, because a directory may come from someone else."""
        # The names that this program or a tracker writes to
        own = {path for path in vars(self).values() if isinstance(path, Path) and path != self.path}
        own |= {self.path / name for name in (".lock", "nonfinite", "trackers", "wandb")}
        for path in sorted({*own, *self.path.glob("metrics_*.csv")}):
            if path.is_symlink():
                problem = f"{path} is a link, and a run writes only into its own directory"
                raise UserError(
                    str(path), problem, "another directory, or output_root=... to keep runs on another disk"
                )
            if path.exists() and not path.is_file() and not path.is_dir():
                raise UserError(f"{path} is not a regular file")

    def write_overrides(self, overrides: list[str]) -> None:
        """Store the overrides of the command line as a YAML list, secrets masked."""
        text = yaml.safe_dump(mask_words(overrides), allow_unicode=True, width=1_000_000)
        write_atomically(self.overrides_file, text.encode())

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Store status and final metrics."""
        error = summary.get("error")
        write_json(self.summary_file, summary | ({"error": mask_text(error)} if error else {}))

    def forget(self) -> None:
        """Remove metrics and log, which a run that starts again here will write again."""
        for path in (self.metrics_file, self.log_file, *self.path.glob("metrics_*.csv"), *self.tensorboard.glob("*")):
            with writing(path):
                path.unlink(missing_ok=True)

    def take_metrics(self, source: Path, global_step: int, repeated: Collection[str] = ()) -> None:
        """Take the metrics of a run, maybe of this one, up to a step, without those of `repeated` splits at it."""
        copy_until(source / self.metrics_file.name, self.metrics_file, global_step, repeated)

    def lock(self) -> None:
        """Prevent other processes from writing here until this one ends, however it ends; raises as `hold`."""
        if self._lock is not None:
            return
        self._lock = hold(self.path)
        # Temporary files of a killed process; the lock excludes that another one uses them.
        for folder in (self.path, self.plots, self.checkpoints) if self._lock is not None else ():
            for leftover in folder.glob(".*.tmp"):
                with contextlib.suppress(OSError):
                    leftover.unlink()

    def unlock(self) -> None:
        """Let others write here."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
