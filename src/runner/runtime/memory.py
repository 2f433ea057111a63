"""The most memory that a device has used, and memory of the CPU that is kept for the next step."""

from __future__ import annotations

import contextlib
import ctypes
import platform
import re
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

# Parameters of mallopt(3) in glibc.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4


class Peak(NamedTuple):
    """The most memory in use at one time."""

    bytes: int
    what: str


def readable(size: int) -> str:
    """A number of bytes for people, such as `239.4 MiB`."""
    size = max(0, size)
    power = min(max(0, size.bit_length() - 1) // 10, 4)
    number = f"{size / 1024**power:,.1f}".removesuffix(".0")
    return f"{number} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def peak_memory(device: torch.device) -> Peak:
    """The most memory that this process has used on a device, since `reset_peak_memory` where that is possible.

    On CUDA these are the bytes of tensors, as torch's allocator counts them; on the CPU it is the resident memory of
    the whole process, libraries included; elsewhere what the driver holds now, as no peak is known. Does not wait for
    the device.
    """
    if device.type == "cuda":
        return Peak(torch.cuda.max_memory_allocated(device), f"most allocated for tensors on {device}")
    if device.type == "mps":
        return Peak(torch.mps.driver_allocated_memory(), "held by the driver of mps now")
    try:
        size = int(re.findall(rb"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_bytes())[0]) * 1024
    except (OSError, IndexError):
        size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return Peak(size, "most resident memory of the process")


def reset_peak_memory(device: torch.device) -> None:
    """Start `peak_memory` again, where the system can; elsewhere the peak stays that of the whole life of the process.

    On the CPU, memory that was freed but kept for later allocations is returned first, as far as the C library can,
    so that one measurement is not hidden by the last.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    if device.type != "cpu" or not sys.platform.startswith("linux"):
        return
    # Free memory in the C library counts as used, so it goes back to the system first
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):
        # Documented in proc(5): 5 resets the peak of the resident set to what it is now.
        Path("/proc/self/clear_refs").write_text("5")


@contextlib.contextmanager
def memory_history(path: Path) -> Iterator[Path]:
    """Record what CUDA's allocator does in the block, with stacks, into a snapshot for https://pytorch.org/memory_viz.

    The file `path`, a pickle, is written when the block has ended well.
    """
    torch.cuda.memory._record_memory_history(max_entries=200_000)
    try:
        yield path
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def keep_freed_memory() -> None:
    """Make the C library keep freed memory for the next allocation instead of returning it to the system, if it is glibc.

    By default glibc maps every tensor of more than 32 MiB and unmaps it again when it is freed, so that each step of training
    waits for the system to clear the same pages again, 4 KiB at a time. Keeping them changes no result; the process stays as
    large as it has been at most.
    """
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)
