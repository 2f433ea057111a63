"""The device of a run and the settings of torch that go with it."""

from __future__ import annotations

import os
import shutil
from typing import Literal

import torch

from runner.config.errors import UserError, nearest

_USUAL_THREADS = torch.get_num_threads()


def choose_device(name: str) -> tuple[torch.device, str]:
    """The device that `device=` asks for.

    Args:
        name: `auto` or a device of torch's, such as `cuda:1`.

    Returns:
        The device and why it was chosen.

    Raises:
        UserError: if the name is none, or the device is not there.
    """
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device()), "auto: the first CUDA device"
        if torch.backends.mps.is_available():
            return torch.device("mps"), "auto: Apple's GPU"
        return torch.device("cpu"), "auto: no accelerator found"
    try:
        device = torch.device(name)
    except RuntimeError:
        close = "cuda" if name == "gpu" else nearest(name, ["auto", "cpu", "cuda", "mps"])
        hint = f"; did you mean '{close}'?" if close else ""
        raise UserError(f"device: cannot be '{name}'{hint}\n    allowed: auto, cpu, cuda, cuda:1, mps") from None
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            built = "torch finds no CUDA device" if torch.version.cuda else "this torch is built without CUDA"
            raise UserError(f"device: '{name}' is not there: {built}\n    allowed: device=auto or device=cpu")
        if (device.index or 0) >= count:
            raise UserError(
                f"device: '{name}' is not there: torch sees {count}\n    allowed: cuda:0 to cuda:{count - 1}"
            )
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    elif device.type == "mps" and not torch.backends.mps.is_available():
        raise UserError(f"device: '{name}' is not there\n    allowed: device=auto or device=cpu")
    elif device.type not in ("cpu", "cuda", "mps"):
        raise UserError(f"device: '{name}' is not supported\n    allowed: auto, cpu, cuda, cuda:1, mps")
    return device, "as set"


def configure_torch(
    device: torch.device,
    threads: int | None,
    deterministic: bool | Literal["warn"],
    cudnn_benchmark: bool,
    tf32: bool,
    detect_anomaly: bool,
) -> list[str]:
    """Set torch's process-wide switches, all of them, so that a job of a sweep never inherits those of the last.

    Returns:
        Warnings about settings that have no effect here.
    """
    torch.set_num_threads(threads or _USUAL_THREADS)
    if deterministic:
        # cuBLAS reads this when it is first used, which is before any of our own code on the device.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    wanted = (bool(deterministic), deterministic == "warn")
    # Setting it loads torch's compiler, a second that most runs need not spend.
    if wanted != (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()):
        torch.use_deterministic_algorithms(wanted[0], warn_only=wanted[1])
    torch.autograd.set_detect_anomaly(detect_anomaly)
    torch.backends.cudnn.deterministic = bool(deterministic)
    torch.backends.cudnn.benchmark = cudnn_benchmark
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = tf32
        return []
    ignored = [name for name, on in (("cudnn_benchmark", cudnn_benchmark), ("tf32", tf32)) if on]
    return [f"{name}=true has no effect on {device.type}: it is a setting of CUDA's" for name in ignored]


def compile_in_place(model: torch.nn.Module, device: torch.device) -> None:
    """Compile a model's forward without wrapping it, so that the names in its state dict stay as they are.

    Raises:
        UserError: on the CPU without a C++ compiler.
    """
    if device.type == "cpu" and not any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++")):
        raise UserError("compile: true needs a C++ compiler on the CPU\n    allowed: install g++, or compile=false")
    model.compile()
