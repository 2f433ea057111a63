"""The number of worker processes: measured at the start, since it depends on the images, the disk and the cores."""

from __future__ import annotations

import math
import shutil
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from runner.base.cores import cores
from runner.data.sampler import Indices
from runner.data.samples import SeededDataset

_MOST = 16
_BUDGET_S = 0.25  # time to spend on measuring
_CHEAP_S = 0.002  # a batch that is read faster than this is not worth another process
_START_S = 0.1  # to start a process
_MESSAGE_S = 0.0005  # to ask a worker for a batch and to receive the reply
_SHARED_MEMORY = Path("/dev/shm")  # where workers put their batches, on Linux
_MIB = 2**20


@dataclass(frozen=True)
class WorkerChoice:
    """The worker processes (0 reads in the main one), the reason (empty if they were set), and problems to expect."""

    workers: int
    reason: str = ""
    warnings: list[str] = field(default_factory=list)


def choose_num_workers(
    wanted: int | Literal["auto"],
    reader: SeededDataset,
    indices: Indices,
    batch_size: int,
    *,
    bytes_ahead: int,
    sample_bytes: int,
) -> WorkerChoice:
    """Choose how many workers read, by reading a few samples if `wanted` is 'auto'.

    The global generators are untouched, and measuring changes no sample. `bytes_ahead` are the bytes of all batches that one
    worker of every loader may hold at the same time, `sample_bytes` those of an image.
    """
    # Workers hold their batches in shared memory, which is small in containers.
    room = _free_shared_memory()
    # A number from the user is used; the warnings say where it will hurt
    if wanted != "auto":
        warnings = []
        if wanted > cores():
            warnings.append(f"data.num_workers={wanted} is more than the {cores()} available CPU cores")
        if room is not None and wanted * bytes_ahead > room:
            warnings.append(
                f"data.num_workers={wanted} reads up to {_size(wanted * bytes_ahead)} of batches ahead, and "
                f"{_SHARED_MEMORY} has {_size(room)} free: set fewer workers, a smaller data.prefetch or batch size, or "
                "give the container more"
            )
        return WorkerChoice(wanted, warnings=warnings)
    # Shared memory is the hardest limit: exceeding it kills a worker
    allowed = workers_with_room(bytes_ahead)
    if allowed == 0:
        free = f"{_SHARED_MEMORY} has {_size(room or 0)} free"
        return WorkerChoice(0, f"auto: {free}, too little for batches of {_size(bytes_ahead)}")
    # A few samples are read to find out whether reading is the bottleneck at all
    per_sample = _seconds_a_sample(reader, indices, batch_size)
    hand_over = _MESSAGE_S + _seconds_to_share(batch_size * sample_bytes)
    return WorkerChoice(*enough(per_sample * batch_size, hand_over, per_sample * len(indices), cores(), allowed))


def enough(read: float, hand_over: float, epoch: float, cores: int, allowed: int) -> tuple[int, str]:
    """The fewest workers that keep ahead of any consumer, and why; `allowed` is how many there is memory for.

    `read`, `hand_over` and `epoch` are the seconds to read a batch on one core, to pass it to another process, and to read
    an epoch on one core. How long a training step takes is not known yet. But the main process cannot receive batches faster
    than they are handed over: more workers than the time to read divided by the time to hand over would never be waited for.
    """
    reason = f"auto: a batch takes {_time(read)} to read"
    # Handing a batch over has a price, so cheap reading is faster in the main process
    if read < max(_CHEAP_S, 2 * hand_over):
        return 0, f"{reason}, too little to transfer from another process"
    if epoch < _START_S:
        return 0, f"auto: an epoch takes {_time(epoch)} to read, less than starting a process"
    # One process reads while others hand over: their ratio is the number that keeps up
    wanted = math.ceil(read / hand_over)
    count = min(wanted, cores, allowed, _MOST)
    if count == wanted:
        return count, f"{reason} on one core and {_time(hand_over)} to transfer"
    limits = {allowed: f"{_SHARED_MEMORY} has room for as many", cores: f"{cores} cores"}
    return count, f"{reason} on one core; {limits.get(count, f'at most {_MOST}')}"


def workers_with_room(ahead: int) -> int:
    """The workers that shared memory has room for, at most 16, if each keeps `ahead` bytes of batches there."""
    room = _free_shared_memory()
    return _MOST if room is None else min(_MOST, room // max(1, ahead))


def _free_shared_memory() -> int | None:
    """Bytes of shared memory for batches; None where there is no such limit."""
    if _SHARED_MEMORY.is_dir():
        return shutil.disk_usage(_SHARED_MEMORY).free
    return 0 if sys.platform == "linux" else None


def _seconds_a_sample(seeded: SeededDataset, indices: Indices, most: int) -> float:
    """Time samples spread over the split, in growing chunks, until the budget is used."""
    count = min(most, len(indices))
    spread = indices[spread_places(len(indices), count)].tolist()
    seeded[0, spread[0]]  # the first one also opens files and imports modules
    began, done = time.perf_counter(), 0
    while done < count and time.perf_counter() - began < _BUDGET_S:
        upto = min(count, 2 * done + 1)
        seeded.__getitems__([(0, index) for index in spread[done:upto]])
        done = upto
    return (time.perf_counter() - began) / done


def spread_places(samples: int, count: int) -> Tensor:
    """`count` places from the first to the last of `samples`, int64; float32 would round some to beyond the last."""
    return torch.linspace(0, samples - 1, count, dtype=torch.float64).long()


def _seconds_to_share(size: int) -> float:
    """Time to put this many bytes into new shared memory; measured on at most 16 MiB."""
    tried = min(max(1, size), 16 * _MIB)
    own = torch.zeros(tried, dtype=torch.uint8)
    began = time.perf_counter()
    own.share_memory_()  # type: ignore[no-untyped-call]
    return (time.perf_counter() - began) * size / tried


def _size(count: int) -> str:
    return f"{count / _MIB:,.0f} MiB"


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 0.01 else f"{seconds * 1000:,.0f} ms"
