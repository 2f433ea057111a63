"""The number of worker processes: as many as there are cores, and none where reading takes next to no time."""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from runner.base.cores import cores
from runner.data.sampler import Indices
from runner.data.samples import SeededDataset

_MOST = 16
_MOST_FOR_FILES, _FEW = 8, 64
_TIMED = 32  # samples
_BUDGET_S = 0.25
_BATCH_S, _EPOCH_S = 0.005, 0.1  # faster reading is not worth another process
_SHARED_MEMORY = Path("/dev/shm")  # where workers put their batches, on Linux


@dataclass(frozen=True)
class WorkerChoice:
    """The worker processes (0 reads in the main one), the reason (empty if they were set), and problems to expect."""

    workers: int
    reason: str = ""
    warnings: list[str] = field(default_factory=list)


def choose_num_workers(
    wanted: int | Literal["auto"], reader: SeededDataset, indices: Indices, batch_size: int, *, bytes_ahead: int
) -> WorkerChoice:
    """Choose how many workers read; if `wanted` is 'auto', a few samples are timed, which changes no sample and no generator.

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
    sample_s = _seconds_a_sample(reader, indices)
    if sample_s * batch_size < _BATCH_S or sample_s * len(indices) < _EPOCH_S:
        return WorkerChoice(0, f"auto: a sample takes {sample_s * 1000:.2g} ms to read")
    reasons = {
        _MOST: f"at most {_MOST}",
        cores(): f"{cores()} cores",
        room: f"as many as {_SHARED_MEMORY} has room for",
    }
    return WorkerChoice(min(reasons), f"auto: {reasons[min(reasons)]}")


def workers_for_files(wanted: int | Literal["auto"], files: int, ahead: int = 0) -> int:
    """The workers that read image files once; fewer than 64 are read sooner than workers start. `ahead` is as below."""
    few = min(cores(), _MOST_FOR_FILES, workers_with_room(ahead)) if files >= _FEW else 0
    return few if wanted == "auto" else wanted


def workers_with_room(ahead: int) -> int:
    """The workers that shared memory has room for, if each keeps `ahead` bytes of batches there."""
    if _SHARED_MEMORY.is_dir():
        return shutil.disk_usage(_SHARED_MEMORY).free // max(1, ahead)
    return 0 if sys.platform == "linux" else sys.maxsize


def _seconds_a_sample(reader: SeededDataset, indices: Indices) -> float:
    """Time samples spread over the split until the budget is used."""
    spread = indices[:: max(1, len(indices) // _TIMED)][:_TIMED].tolist()
    began = time.perf_counter()
    reader[0, spread[0]]  # also opens files, so its time counts only if it uses up the budget
    first, read = time.perf_counter(), 0
    while read < len(spread) and time.perf_counter() - began < _BUDGET_S:
        reader[0, spread[read]]
        read += 1
    return (time.perf_counter() - first) / read if read else first - began
