"""The number of worker processes: as many as there are cores, at most 8, and none for what is read sooner than they start."""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from runner.base.cores import cores

_MOST, _FEW = 8, 64
_SHARED_MEMORY = Path("/dev/shm")  # where workers put their batches, on Linux


@dataclass(frozen=True)
class WorkerChoice:
    """The worker processes (0 reads in the main one), the reason (empty if they were set), and problems to expect."""

    workers: int
    reason: str = ""
    warnings: list[str] = field(default_factory=list)


def choose_num_workers(
    wanted: int | Literal["auto"], samples: int, *, arrays: bool = False, bytes_ahead: int = 0
) -> WorkerChoice:
    """Choose how many workers read `samples`; if `wanted` is 'auto', none read `arrays` in memory or fewer than 64 samples.

    `bytes_ahead` are the bytes of all batches that one worker of every loader may hold at the same time.
    """
    # Workers hold their batches in shared memory, which is small in containers: exceeding it kills a worker
    room = workers_with_room(bytes_ahead)
    if wanted != "auto":
        held = f"{room} whose batches {_SHARED_MEMORY} has room for: set a smaller data.prefetch, or give the container more"
        limits = {f"{cores()} available CPU cores": cores(), held: room}
        warnings = [
            f"data.num_workers={wanted} is more than the {what}" for what, most in limits.items() if wanted > most
        ]
        return WorkerChoice(wanted, warnings=warnings)
    if arrays or samples < _FEW:  # few samples are read before a process has started
        return WorkerChoice(0, f"auto: {'the images are arrays in memory' if arrays else f'fewer than {_FEW} samples'}")
    reasons = {
        _MOST: f"at most {_MOST}",
        cores(): f"{cores()} cores",
        room: f"as many as {_SHARED_MEMORY} has room for",
    }
    return WorkerChoice(min(reasons), f"auto: {reasons[min(reasons)]}")


def workers_with_room(ahead: int) -> int:
    """The workers that shared memory has room for, if each keeps `ahead` bytes of batches there."""
    if _SHARED_MEMORY.is_dir():
        return shutil.disk_usage(_SHARED_MEMORY).free // max(1, ahead)
    return 0 if sys.platform == "linux" else sys.maxsize
