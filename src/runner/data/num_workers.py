"""How many worker processes read samples: measured at the start, since it depends on the images, the disk and the cores."""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.config.cores import cores
from runner.data.bad_samples import ReplacementSampler
from runner.data.indices import Indices
from runner.data.samples import SampleTransform, SeededDataset

_MOST = 16
_BUDGET_S = 0.25  # time to spend on measuring
_CHEAP_S = 0.002  # a batch that is read faster than this is not worth another process
_START_S = 0.1  # what it takes to start one
_MESSAGE_S = 0.0005  # what it takes to ask a worker for a batch and to be told of it
_SHARED_MEMORY = Path("/dev/shm")  # where workers put their batches, on Linux
_MIB = 2**20


@dataclass(frozen=True)
class WorkerChoice:
    """The workers that read samples.

    Attributes:
        workers: processes; 0 reads in the main one.
        reason: why as many; empty if they were set.
        warnings: what will not go well with as many.
    """

    workers: int
    reason: str = ""
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class BatchTiming:
    """What a batch costs, in seconds.

    Attributes:
        read: reading it on one core.
        handed_over: passing it from one process to another.
        epoch: reading all samples on one core.
    """

    read: float
    handed_over: float
    epoch: float


def choose_num_workers(
    wanted: int | Literal["auto"],
    prefetch: int,
    dataset: Dataset[Any],
    indices: Indices,
    transforms: Sequence[SampleTransform],
    batch_size: int,
    samples_ahead: int,
    sample_bytes: int,
    replacements: ReplacementSampler | None = None,
) -> WorkerChoice:
    """Choose how many workers read, by reading a few samples if that is to be found out.

    The global generators are untouched, and no sample comes out as another for it.

    Args:
        wanted: the setting.
        prefetch: batches that each worker reads ahead.
        dataset: what the training split is read from.
        indices: its samples.
        transforms: callables on one image.
        batch_size: samples of a batch.
        samples_ahead: samples of one batch of every loader that may hold batches at the same time.
        sample_bytes: bytes of an image.
        replacements: what is read in place of samples that cannot be.
    """
    ahead = prefetch * samples_ahead * sample_bytes
    room = _free_shared_memory()
    if wanted != "auto":
        return WorkerChoice(wanted, warnings=_doubts(wanted, ahead, room))
    allowed = workers_with_room(ahead)
    if allowed == 0:
        return WorkerChoice(
            0, f"auto: {_SHARED_MEMORY} has {_size(room or 0)} free, too little for batches of {_size(ahead)}"
        )
    per_sample = _seconds_a_sample(SeededDataset(dataset, 0, transforms, replacements), indices, batch_size)
    shared = _seconds_to_share(batch_size * sample_bytes)
    timing = BatchTiming(per_sample * batch_size, _MESSAGE_S + shared, per_sample * len(indices))
    return WorkerChoice(*enough(timing, cores(), allowed))


def enough(timing: BatchTiming, cores: int, allowed: int) -> tuple[int, str]:
    """The fewest workers that keep ahead of any consumer, and why.

    How long a training step takes is not known yet. But the main process cannot take batches faster than they are handed
    over: workers beyond the time to read divided by the time to hand over would never be waited for.

    Args:
        timing: what a batch costs.
        cores: CPU cores.
        allowed: workers that there is memory for.
    """
    read = f"auto: a batch takes {_time(timing.read)} to read"
    if timing.read < max(_CHEAP_S, 2 * timing.handed_over):
        return 0, f"{read}, not worth handing over from another process"
    if timing.epoch < _START_S:
        return 0, f"auto: an epoch takes {_time(timing.epoch)} to read, less than starting a process"
    wanted = math.ceil(timing.read / timing.handed_over)
    count = min(wanted, cores, allowed, _MOST)
    if count == wanted:
        return count, f"{read} on one core and {_time(timing.handed_over)} to hand over"
    if count == cores:
        return count, f"{read} on one core; {cores} cores"
    if count == allowed:
        return count, f"{read} on one core; {_SHARED_MEMORY} has room for as many"
    return count, f"{read} on one core; at most {_MOST}"


def workers_with_room(ahead: int) -> int:
    """How many workers shared memory has room for, 16 at most, if each keeps so many bytes of batches there."""
    room = _free_shared_memory()
    return _MOST if room is None else min(_MOST, room // max(1, ahead))


def _doubts(workers: int, ahead: int, room: int | None) -> list[str]:
    doubts = []
    if workers > cores():
        doubts.append(f"data.num_workers={workers} is more than the {cores()} CPU cores there are")
    if room is not None and workers * ahead > room:
        doubts.append(
            f"data.num_workers={workers} reads up to {_size(workers * ahead)} of batches ahead, and {_SHARED_MEMORY} has "
            f"{_size(room)} free: set fewer workers, a smaller data.prefetch or batch size, or give the container more"
        )
    return doubts


def _free_shared_memory() -> int | None:
    """Bytes that workers can still put batches into; None where there is no such limit."""
    if _SHARED_MEMORY.is_dir():
        return shutil.disk_usage(_SHARED_MEMORY).free
    return 0 if sys.platform == "linux" else None


def _seconds_a_sample(keyed: SeededDataset, indices: Indices, most: int) -> float:
    """Time samples that are spread over the split, more and more at a time, until it has taken long enough."""
    count = min(most, len(indices))
    spread = indices[_spread(len(indices), count)].tolist()
    keyed[0, spread[0]]  # the first one also opens files and imports what is needed
    began, done = time.perf_counter(), 0
    while done < count and time.perf_counter() - began < _BUDGET_S:
        upto = min(count, 2 * done + 1)
        keyed.__getitems__([(0, index) for index in spread[done:upto]])
        done = upto
    return (time.perf_counter() - began) / done


def _spread(samples: int, count: int) -> Tensor:
    """`count` places from the first to the last of `samples`, int64; float32 would round some to beyond the last."""
    return torch.linspace(0, samples - 1, count, dtype=torch.float64).long()


def _seconds_to_share(size: int) -> float:
    """Time to put this many bytes into fresh shared memory, of which no more than 16 MiB are tried."""
    tried = min(max(1, size), 16 * _MIB)
    own = torch.zeros(tried, dtype=torch.uint8)
    began = time.perf_counter()
    own.share_memory_()  # type: ignore[no-untyped-call]
    return (time.perf_counter() - began) * size / tried


def _size(count: int) -> str:
    return f"{count / _MIB:,.0f} MiB"


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 0.01 else f"{seconds * 1000:,.0f} ms"
