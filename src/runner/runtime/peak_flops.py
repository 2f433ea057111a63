"""The most floating-point operations a second of a device."""

from __future__ import annotations

import re
import statistics
import time
from dataclasses import dataclass
from typing import Literal

import torch

Kind = Literal["bf16", "fp16", "tf32", "float32"]
"""The format that matrix products are computed in."""

# Dense, with float32 accumulation, in 1e12 operations a second: (bf16 and fp16, tf32, float32), from the vendor's data
# sheets and white papers, which often give twice that, with structured sparsity. None: the GPU has no such units.
_TABLE: tuple[tuple[str, float, float | None, float], ...] = (
    (r"GB200|B200", 2250, 1125, 75),
    (r"H200 NVL", 835.5, 417.5, 60),
    (r"H200|GH200", 989.5, 494.7, 67),
    (r"H100 NVL", 835.5, 417.5, 60),
    (r"H100 PCIe", 756, 378, 51),
    (r"H100", 989.5, 494.7, 67),
    (r"A100|A800", 312, 156, 19.5),
    (r"A30", 165, 82, 10.3),
    (r"A10", 125, 62.5, 31.2),
    (r"A40", 149.7, 74.8, 37.4),
    (r"L40S", 362, 183, 91.6),
    (r"L40", 181, 90.5, 90.5),
    (r"L4", 121, 60, 30.3),
    (r"RTX 6000 Ada", 364.2, 182.1, 91.1),
    (r"RTX A6000", 154.8, 77.4, 38.7),
    (r"RTX 5090(?! D)", 209.5, 104.8, 104.8),
    (r"RTX 4090(?! D)", 165.2, 82.6, 82.6),
    (r"RTX 3090 Ti", 80, 40, 40),
    (r"RTX 3090", 71, 35.6, 35.6),
    (r"V100S", 130, None, 16.4),
    (r"V100-PCIE", 112, None, 14),
    (r"V100", 125, None, 15.7),
    (r"T4", 65, None, 8.1),
)
# Without matrix units for bf16, these compute it far below the figure for fp16.
_NO_BF16 = ("V100S", "V100-PCIE", "V100", "T4")


@dataclass(frozen=True)
class PeakFlops:
    """The most operations a second."""

    flops: float  # operations a second
    kind: Kind  # what they compute in
    measured: bool  # whether it was measured with matrix products here, rather than taken from a data sheet
    source: str  # where the figure is from, for people


def kind_of(autocast: torch.dtype | None, device: torch.device) -> Kind:
    """The format of matrix products, as torch is set."""
    if autocast is not None:
        return "bf16" if autocast is torch.bfloat16 else "fp16"
    rounded = device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return "tf32" if rounded else "float32"


def listed_peak(name: str, kind: Kind) -> PeakFlops | None:
    """The peak of a GPU according to its maker; None for one that is not in the table, or a part of one (MIG)."""
    # A part of a GPU, or one with less power, is slower than the data sheet of its name
    if "MIG" in name or "Laptop" in name or "Max-Q" in name:
        return None
    for pattern, half, tf32, single in _TABLE:
        if not re.search(rf"(?<![A-Za-z0-9])(?:{pattern})(?![0-9A-Za-z])", name):
            continue
        if kind == "bf16" and pattern in _NO_BF16:
            return None
        if kind == "tf32" and tf32 is None:  # a GPU without it computes as if it were not allowed
            kind = "float32"
        figure = {"bf16": half, "fp16": half, "tf32": tf32, "float32": single}[kind]
        assert figure is not None, "only tf32 can be missing"
        return PeakFlops(figure * 1e12, kind, False, f"data sheet of {name}, dense {kind}")
    return None


def known_peak(device: torch.device, kind: Kind) -> PeakFlops | None:
    """The peak of a device according to its maker; None if it is not known."""
    return listed_peak(torch.cuda.get_device_name(device), kind) if device.type == "cuda" else None


def peak(device: torch.device, kind: Kind) -> PeakFlops:
    """The peak of a device: its maker's figure, or else what large matrix products reach."""
    return known_peak(device, kind) or measured_peak(device, kind)


def measured_peak(device: torch.device, kind: Kind, seconds: float = 0.2) -> PeakFlops:
    """The speed of large square matrix products: the median of several, with as many threads as torch has.

    Takes about `seconds`. Random generators are left as they were. Waits for the device.
    """
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(kind, torch.float32)
    free = torch.cuda.mem_get_info(device)[0] / 10 if device.type == "cuda" else float("inf")
    size = 128
    # Products of a size that hides launches, but takes a small part of the time and of the free memory that there is.
    while True:
        size *= 2
        # Constant numbers would draw less power, and so run faster than any training.
        a, b = (
            torch.randn(size, size, device=device, generator=torch.Generator(device).manual_seed(seed)).to(dtype)
            for seed in (0, 1)
        )
        _seconds(a, b, 1)
        took = _seconds(a, b, 1)
        if took >= seconds / 40 or size >= 8192 or 4 * 3 * size**2 * dtype.itemsize > free:
            break
    # The median of several measurements, because other programs may disturb one
    repeats = max(1, round(seconds / 8 / max(took, 1e-9)))
    reached = 2 * size**3 * repeats / statistics.median(_seconds(a, b, repeats) for _ in range(7))
    where = f"{device} with threads={torch.get_num_threads()}" if device.type == "cpu" else str(device)
    return PeakFlops(reached, kind, True, f"measured: matrix products of {size}x{size} in {kind} on {where}")


def _seconds(a: torch.Tensor, b: torch.Tensor, repeats: int) -> float:
    def wait() -> None:
        if a.device.type != "cpu":
            torch.accelerator.synchronize(a.device)

    wait()
    began = time.perf_counter()
    with torch.inference_mode():
        for _ in range(repeats):
            torch.mm(a, b)
    wait()
    return time.perf_counter() - began
