"""The environment of a run: versions, hardware, variables, commit; nothing secret.

`torch.utils.collect_env` is not a replacement: it asks pip, compilers and nvidia-smi, which takes about 5 s, and does not know
the packages, the commit and the command line.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from runner import __version__
from runner.base.cores import cores
from runner.base.secrets import mask_words
from runner.tracking.formats import amount

_PACKAGES = (
    "torch", "torchvision", "triton", "numpy", "hydra-core", "omegaconf", "pydantic", "torchmetrics", "scikit-learn",
    "pillow", "tensorboard", "matplotlib", "rich", "psutil", "safetensors", "onnx", "onnxruntime", "ray", "optuna",
)  # fmt: skip
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUBLAS_WORKSPACE_CONFIG", "PYTHONHASHSEED",
    "PYTORCH_ALLOC_CONF", "WORLD_SIZE", "SLURM_JOB_ID",
)  # fmt: skip
_GIT_TIMEOUT_S = 5.0


def environment() -> dict[str, Any]:
    """Everything that could make another run differ, ready for JSON, secrets masked; missing tools are not an error."""
    import psutil
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "runner": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "hostname": platform.node(),
        "cpu": {"model": _cpu_model(), "logical": os.cpu_count() or 1, "usable": cores()},
        "memory_bytes": int(psutil.virtual_memory().total),
        "packages": versions(),
        "torch": {
            "version": str(torch.__version__),
            "git": torch.version.git_version,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
            "threads": torch.get_num_threads(),
            "interop_threads": torch.get_num_interop_threads(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        },
        "devices": [
            {
                "name": device.name,
                "memory_bytes": int(device.total_memory),
                "capability": f"{device.major}.{device.minor}",
                "multiprocessors": int(device.multi_processor_count),
            }
            for device in map(torch.cuda.get_device_properties, range(count))
        ],
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "git": _git(),
        "command": mask_words(sys.orig_argv),
    }


def lines(env: dict[str, Any]) -> list[tuple[str, str]]:
    """The environment as (label, value) rows of a table; the last one is what another machine must share for the same bits."""
    cpu, torch, git = env["cpu"], env["torch"], env["git"]
    cuda = f"CUDA {torch['cuda']}, cuDNN {torch['cudnn']}" if torch["cuda"] else "no CUDA"
    devices = [
        (f"cuda:{index}", f"{device['name']}, {_gib(device['memory_bytes'])}, capability {device['capability']}")
        for index, device in enumerate(env["devices"])
    ]
    threads = amount(torch["threads"], "thread")
    bits = [f"torch {torch['version']}", threads, f"CPU with {torch['cpu_capability']}"]
    if devices:
        names = dict.fromkeys(f"{device['name']} ({device['capability']})" for device in env["devices"])
        bits += [*cuda.split(", "), *names, "deterministic=true"]
    return [
        *((name, env[name]) for name in ("runner", "python", "platform", "hostname")),
        ("cpu", f"{cpu['model']}, {cpu['usable']} of {cpu['logical']} logical cores usable, {torch['cpu_capability']}"),
        ("memory", _gib(env["memory_bytes"])),
        ("torch build", f"{cuda}, {threads}"),
        *(devices or [("devices", "cpu only")]),
        *env["packages"].items(),
        *env["variables"].items(),
        *([("git", git["commit"] + (", with uncommitted changes" if git["dirty"] else ""))] if git else []),
        ("command", " ".join(env["command"])),
        ("same bits need", "; ".join(bits)),
    ]


@functools.cache
def versions() -> dict[str, str]:
    """Installed versions of the packages that a run depends on, cached."""
    found = {}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _cpu_model() -> str:
    with contextlib.suppress(OSError):
        if found := re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return found.group(1).strip()
    return platform.processor() or platform.machine()


def _git() -> dict[str, Any] | None:
    commit = _git_output("rev-parse", "HEAD")
    status = _git_output("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if status is None else bool(status)} if commit else None


def _git_output(*arguments: str) -> str | None:
    # Optional locks could block a commit that the user makes at the same time.
    command = ["git", "--no-optional-locks", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip()


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
