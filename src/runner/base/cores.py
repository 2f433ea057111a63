"""The number of CPU cores that this process may use: one answer for workers, threads and what is recorded."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_GROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def cores() -> int:
    """CPU cores that this process may use, at least 1: its affinity, or a container's CPU limit if that is lower.

    Processes that train together on a machine share its cores evenly.
    """
    if hasattr(os, "process_cpu_count"):  # Python 3.13
        usable = os.process_cpu_count()
    elif hasattr(os, "sched_getaffinity"):  # not on macOS
        usable = len(os.sched_getaffinity(0))
    else:
        usable = os.cpu_count()
    return max(1, min((usable or 1, *_limits())) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def _limits() -> Iterator[int]:
    """CPU limits of this process's control groups (versions 1 and 2) and of all groups above them, rounded up."""
    for group in _groups():
        # Limits that are absent, unlimited or unreadable do not count.
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            if group.joinpath("cpu.max").is_file():
                quota, period = group.joinpath("cpu.max").read_text().split()
            else:
                quota, period = (group.joinpath(f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            if (cpus := int(quota) / int(period)) > 0:
                yield math.ceil(cpus)


def _groups() -> Iterator[Path]:
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = _MEMBERSHIP.read_text().splitlines()
    for line in ("0::/", *lines):  # inside a container the own group is often mounted as the root
        controllers, _, path = line.partition(":")[2].partition(":")
        mounts = [_GROUPS] if not controllers else [_GROUPS / "cpu", _GROUPS / controllers]
        if controllers and "cpu" not in controllers.split(","):
            continue
        own = PurePosixPath("/", path)
        yield from (mount / str(group).lstrip("/") for mount in mounts for group in (own, *own.parents))
