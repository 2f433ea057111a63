"""The device of a run and the settings of torch that go with it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from collections.abc import Iterator
from typing import Literal

import torch
import torch.utils.deterministic

from runner.base.cores import cores
from runner.base.errors import UserError, nearest
from runner.config.schema.train import Train
from runner.distributed.world import world
from runner.runtime.memory import keep_freed_memory

_USUAL_THREADS = torch.get_num_threads()
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_WORKSPACES = (":4096:8", ":16:8")  # those that cuBLAS repeats with


def choose_device(name: str) -> tuple[torch.device, str]:
    """The device that `device=` asks for.

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
    except (RuntimeError, TypeError):
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda", "mps"):
        # gpu is not a device of torch, but often typed
        close = "cuda" if name == "gpu" else nearest(str(name), ["auto", "cpu", "cuda", "mps"])
        raise UserError("device", f"cannot be '{name}'", "auto, cpu, cuda, cuda:1, mps", close)
    backend = torch.backends.mps if device.type == "mps" else torch.cuda
    # A build without CUDA is a common cause, and looks like a missing GPU
    if device.type != "cpu" and not backend.is_available():
        built = "" if device.type == "mps" or torch.version.cuda else ": this torch is built without CUDA"
        raise UserError("device", f"'{name}' is not available{built}", "device=auto or device=cpu")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) >= count:
            raise UserError("device", f"'{name}' is not available: torch sees {count}", f"cuda:0 to cuda:{count - 1}")
        # The number is fixed, so that all tensors are on one device even if the current one changes
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    return device, "as set"


def prepare_repeating(deterministic: bool | Literal["warn"]) -> None:
    """Set what cuBLAS reads when it is first used; to be called before the device is touched.

    Raises:
        UserError: if the environment asks for a workspace that cuBLAS does not repeat with.
    """
    # cuBLAS reads the variable once, so it has to be set before the first kernel
    if not deterministic:
        return
    given = os.environ.setdefault(_WORKSPACE, _WORKSPACES[0])
    # The user may have set a value that contradicts deterministic=true: do not overwrite it silently
    if given not in _WORKSPACES and deterministic is True and torch.cuda.is_available():
        raise UserError(
            "deterministic",
            f"cuBLAS is not deterministic with the {_WORKSPACE}={given} of the environment",
            f"{' or '.join(_WORKSPACES)}, or no such variable",
        )


def configure_torch(config: Train, device: torch.device) -> list[str]:
    """Set torch's process-wide switches, all of them, so that a job of a sweep never inherits those of the last.

    Returns:
        Warnings about settings that have no effect here, or not the wanted one.
    """
    threads, deterministic, tf32, matmul = config.threads, config.deterministic, config.tf32, config.matmul_precision
    # Several ranks share the cores; torch would give each of them all
    torch.set_num_threads(threads or (cores() if world().size > 1 else _USUAL_THREADS))
    if device.type == "cpu":
        keep_freed_memory()
    prepare_repeating(deterministic)
    # Memory that nothing was written to is filled, so that reading it shows, and repeats
    if deterministic:
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    wanted = (bool(deterministic), deterministic == "warn")
    # Setting it loads torch's compiler, a second that most runs need not spend.
    if wanted != (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()):
        torch.use_deterministic_algorithms(wanted[0], warn_only=wanted[1])
    torch.autograd.set_detect_anomaly(config.detect_anomaly)
    torch.backends.cudnn.deterministic = bool(deterministic)
    torch.backends.cudnn.benchmark = config.cudnn_benchmark
    on_cuda = device.type == "cuda"
    # Only CUDA has TF32; for others it would be a change of precision that nobody asked for
    torch.set_float32_matmul_precision(matmul or ("high" if tf32 and on_cuda else "highest"))
    if on_cuda:
        torch.backends.cudnn.allow_tf32 = tf32
    warnings = []
    if threads is not None and threads > cores():
        warnings.append(
            f"threads={threads} is more than the {cores()} available CPU cores, which is slower than {cores()}"
        )
    # Switches without effect are reported: whoever sets one expects a difference
    for name in [name for name, on in (("cudnn_benchmark", config.cudnn_benchmark), ("tf32", tf32)) if on]:
        if not on_cuda:
            warnings.append(f"{name}=true has no effect on {device.type}: it is a setting of CUDA's")
        elif deterministic == "warn":
            warnings.append(f"{name}=true may change bits from run to run, or from GPU to GPU; false does not")
    if tf32 and on_cuda and torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        warnings.append(
            "tf32=true has no effect: this GPU has no TensorFloat-32, which began with compute capability 8.0"
        )
    if matmul not in (None, "highest") and not _rounds_products(device):
        warnings.append(f"matmul_precision={matmul} has no effect on this {device.type}: it has no faster product")
    return warnings


@contextlib.contextmanager
def switches_kept() -> Iterator[None]:
    """Afterwards, the switches that `configure_torch` sets are as they were, and so is the variable for cuBLAS."""
    names = [(torch.backends.cudnn, name) for name in ("deterministic", "benchmark", "allow_tf32")]
    names += [(torch.utils.deterministic, "fill_uninitialized_memory")]
    flags, workspace = [(*place, getattr(*place)) for place in names], os.environ.get(_WORKSPACE)
    threads, anomaly = torch.get_num_threads(), torch.is_anomaly_enabled()
    precision, mode = torch.get_float32_matmul_precision(), torch.get_deterministic_debug_mode()
    try:
        yield
    finally:
        # Setting it loads torch's compiler, so it is set only if it changed
        if mode != torch.get_deterministic_debug_mode():
            torch.set_deterministic_debug_mode(mode)
        torch.set_num_threads(threads)
        torch.autograd.set_detect_anomaly(anomaly)
        torch.set_float32_matmul_precision(precision)
        for flag in flags:
            setattr(*flag)
        if workspace is None:
            os.environ.pop(_WORKSPACE, None)


def _rounds_products(device: torch.device) -> bool:
    """True if the precision that is set makes a difference: assumed on CUDA, and tried on the CPU."""
    if device.type != "cpu":
        return device.type == "cuda"
    matrix = torch.linspace(-1, 1, 256 * 256).view(256, 256)
    rounded = matrix @ matrix
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    exact = matrix @ matrix
    torch.set_float32_matmul_precision(precision)
    return not torch.equal(rounded, exact)


def missing_compiler(device: torch.device) -> str:
    """A clause on what compiling for a device needs and lacks here, such as `needs a C++ compiler on the CPU`, or nothing."""
    if device.type == "cpu" and not any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++")):
        return "needs a C++ compiler on the CPU"
    if device.type == "cuda":
        if torch.version.hip is None and torch.cuda.get_device_capability(device) < (7, 0):
            return "needs a GPU of compute capability 7.0"
        if importlib.util.find_spec("triton") is None:
            return "needs Triton on CUDA"
        if not any(shutil.which(name) for name in (os.environ.get("CC", ""), "gcc", "clang", "cc")):
            return "needs a C compiler, with which Triton builds its launchers"
    return ""
