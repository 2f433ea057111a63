"""What a figure has to be read with: machine, versions, and how busy the machine was."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "torchvision", "lightning", "accelerate", "timm")


def installed(package: str) -> str | None:
    """Version of a package; None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def machine() -> dict[str, Any]:
    """Processor, its cores, Python and the versions of the packages that take part."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "processor": found.group(1).strip() if found else platform.processor() or platform.machine(),
        "cores": cores,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: installed(name) for name in PACKAGES},
    }


def load() -> float | None:
    """Processes that wanted a core during the last minute, on average; None where that is not known."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None
