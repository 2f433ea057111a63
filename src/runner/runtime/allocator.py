"""Memory of the CPU that tensors are allocated from: kept when they are freed, since the next step allocates the same again."""

from __future__ import annotations

import ctypes
import platform

# Parameters of mallopt(3) in glibc.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4


def keep_freed_memory() -> bool:
    """Make the C library keep freed memory for the next allocation instead of returning it to the system.

    By default glibc maps every tensor of more than 32 MiB and unmaps it again when it is freed, so that each step of training
    waits for the system to clear the same pages again, 4 KiB at a time. Keeping them changes no result; the process stays as
    large as it has been at most.

    Returns:
        Whether the C library supports it.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_MAX, 0)) and bool(mallopt(_M_TRIM_THRESHOLD, -1))
