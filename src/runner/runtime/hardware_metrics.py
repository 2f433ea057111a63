"""Figures about the machine: those in the log lines of training, the peaks of GPUs that they refer to, and waits for a core."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from runner.base.errors import UserError, first_line
from runner.instrument.flops import Flops
from runner.runtime.memory import peak_memory

_SECONDS_BETWEEN_LOOKS = 1.0  # asking the system for the memory of the process takes longer than a small step

Kind = Literal["bf16", "fp16", "tf32", "float32"]
"""The format that matrix products are computed in."""

# Dense, with float32 accumulation, in 1e12 operations a second: bf16, fp16, tf32, float32, from the vendor's data sheets and
# white papers, which often give twice that, with structured sparsity. None: the GPU has no such units, and is far slower.
_PEAKS: dict[str, tuple[float | None, float, float | None, float]] = {
    r"GB200|B200": (2250, 2250, 1125, 75),
    r"H[12]00 NVL": (835.5, 835.5, 417.5, 60),
    r"H100 PCIe": (756, 756, 378, 51),
    r"H100|H200|GH200": (989.5, 989.5, 494.7, 67),
    r"A100|A800": (312, 312, 156, 19.5),
    r"A30": (165, 165, 82, 10.3),
    r"A10": (125, 125, 62.5, 31.2),
    r"A40": (149.7, 149.7, 74.8, 37.4),
    r"L40S": (362, 362, 183, 91.6),
    r"L40": (181, 181, 90.5, 90.5),
    r"L4": (121, 121, 60, 30.3),
    r"RTX 6000 Ada": (364.2, 364.2, 182.1, 91.1),
    r"RTX A6000": (154.8, 154.8, 77.4, 38.7),
    r"RTX 5090(?! D)": (209.5, 209.5, 104.8, 104.8),
    r"RTX 4090(?! D)": (165.2, 165.2, 82.6, 82.6),
    r"RTX 3090 Ti": (80, 80, 40, 40),
    r"RTX 3090": (71, 71, 35.6, 35.6),
    r"V100S": (None, 130, None, 16.4),
    r"V100-PCIE": (None, 112, None, 14),
    r"V100": (None, 125, None, 15.7),
    r"T4": (None, 65, None, 8.1),
}


def kind_of(autocast: torch.dtype | None, device: torch.device) -> Kind:
    """The format of matrix products, as torch is set."""
    if autocast is not None:
        return "bf16" if autocast is torch.bfloat16 else "fp16"
    rounded = device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return "tf32" if rounded else "float32"


def listed_peak(name: str, kind: Kind) -> tuple[float, str] | None:
    """The most operations a second of a GPU according to its maker, and where the figure is from, for people.

    None for a GPU that is not in the table, or a part of one (MIG).
    """
    # A part of a GPU, or one with less power, is slower than the data sheet of its name
    if "MIG" in name or "Laptop" in name or "Max-Q" in name:
        return None
    for pattern, (bf16, fp16, tf32, single) in _PEAKS.items():
        if re.search(rf"(?<![A-Za-z0-9])(?:{pattern})(?![0-9A-Za-z])", name):
            if kind == "tf32" and tf32 is None:  # a GPU without it computes as if it were not allowed
                kind = "float32"
            figure = {"bf16": bf16, "fp16": fp16, "tf32": tf32, "float32": single}[kind]
            return (figure * 1e12, f"data sheet of {name}, dense {kind}") if figure else None
    return None


def device_use(device: torch.device) -> dict[str, float]:
    """What the driver says of an NVIDIA GPU, of all programs on it. Does not wait for the work that is queued.

    Returns:
        `device_busy`, the share of the last second or less in which a kernel ran; `device_memory_mib`, the memory in use;
        `device_power_w`, the power drawn. Nothing where the driver does not answer.
    """
    try:
        busy, power = torch.cuda.utilization(device) / 100, torch.cuda.power_draw(device) / 1000
        return {
            "device_busy": busy,
            "device_memory_mib": torch.cuda.device_memory_used(device) / 2**20,
            "device_power_w": power,
        }
    except (
        Exception
    ):  # nvidia-ml-py is not installed, or raises a class of its own: figures about a device never end a run
        return {}


@dataclass
class HardwareMetrics:
    """Peak memory, how busy the device is, and how much of what it could compute went into training."""

    device: torch.device  # where training runs
    # Floating-point operations that training on one sample needs; None to leave utilisation out
    flops_of_sample: float | None = None
    peak: tuple[float, str] | None = None  # see `listed_peak`; None to leave utilisation out
    ask_driver: bool = False  # for `device_use`
    _peak_mib: float = field(default=0.0, init=False)
    _looked: float = field(default=float("-inf"), init=False)
    _use: dict[str, float] = field(default_factory=dict, init=False)
    _busy: list[float] = field(default_factory=list, init=False)

    def rows(self) -> list[tuple[str, str, str]]:
        """The peak that utilisation is a share of, for people: (label, value, reason), or nothing."""
        if self.flops_of_sample is None or self.peak is None:
            return []
        most, source = self.peak
        return [("utilization", f"of {_in_words(most)}/s, {_in_words(self.flops_of_sample)} a sample", source)]

    def __call__(self, samples_per_s: float) -> dict[str, float]:
        """The figures of a log line.

        Returns:
            `peak_memory_mib`, of the process on the CPU, of tensors on CUDA; and `mfu`, the model FLOPs utilisation of
            Chowdhery et al. 2022: operations that the model needs, not those that checkpointing repeats, as a share of
            the peak; with `ask_driver` those of `device_use`.
        """
        now = time.monotonic()
        # Reading the peak takes time, so it may be up to a second old
        if now - self._looked >= _SECONDS_BETWEEN_LOOKS:
            self._peak_mib, self._looked = peak_memory(self.device).bytes / 2**20, now
            self._use = device_use(self.device) if self.ask_driver else {}
            self._busy += [self._use["device_busy"]] if self._use else []
        figures = {"peak_memory_mib": self._peak_mib, **self._use}
        if self.flops_of_sample is not None and self.peak is not None:
            figures["mfu"] = samples_per_s * self.flops_of_sample / self.peak[0]
        return figures

    def summary(self) -> dict[str, float]:
        """`device_busy`, the mean over the log lines; empty where the driver was not asked or did not answer."""
        return {"device_busy": round(statistics.fmean(self._busy), 3)} if self._busy else {}


def _in_words(flops: float) -> str:
    unit, scale = next((pair for pair in (("T", 1e12), ("G", 1e9), ("M", 1e6)) if flops >= pair[1]), ("k", 1e3))
    return f"{flops / scale:.3g} {unit}FLOP"


def choose_hardware_metrics(
    wanted: bool | Literal["auto"], device: torch.device, kind: Kind, count: Callable[[], Flops], warnings: list[str]
) -> HardwareMetrics:
    """The metrics that `log.utilization` asks for.

    `count` counts the operations of a batch, and is called only if needed; `warnings` gets a line where utilisation is not
    reported. With `auto` a CPU, which has no listed peak, needs none.

    Raises:
        UserError: if utilisation is asked for and the operations cannot be counted.
    """
    if not wanted:
        return HardwareMetrics(device)
    no_effect = f"log.utilization={str(wanted).lower()} has no effect: "
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    if (peak := listed_peak(name, kind)) is None:
        if wanted is True or device.type != "cpu":
            warnings.append(f"{no_effect}no peak of {name} is listed for {kind}")
        return HardwareMetrics(device)
    try:
        return HardwareMetrics(device, count().of_sample, peak)
    except RuntimeError as error:
        reason = f"the operations of this model cannot be counted: {first_line(error)}"
        if wanted is True:
            raise UserError("log.utilization", reason, "log.utilization=false") from error
        warnings.append(no_effect + reason)
        return HardwareMetrics(device)


def asks_driver(wanted: bool | Literal["auto"], device: torch.device) -> bool:
    """Whether log lines have `device_use`, as `log.device` asks.

    Raises:
        UserError: with `true`, if there is no NVIDIA GPU, or its driver does not answer.
    """
    answers = bool(wanted) and device.type == "cuda" and bool(device_use(device))
    if wanted is True and not answers:
        reason = f"the use of {device.type} cannot be read: that needs an NVIDIA GPU and `pip install nvidia-ml-py`"
        raise UserError("log.device", reason, "auto or false")
    return answers


def waited_for_core() -> float | None:
    """Seconds that the main thread was ready to run while others had the core; None where the system does not count them."""
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


def core_wait(since: tuple[float, float | None]) -> float | None:
    """The share of the time since `(perf_counter(), waited_for_core())` in which other programs had the core; None if unknown."""
    (began, before), now = since, waited_for_core()
    if before is None or now is None:
        return None
    return round(min((now - before) / max(time.perf_counter() - began, 1e-9), 1.0), 3)
