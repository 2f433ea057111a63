"""The most floating-point operations a second of a device."""

from __future__ import annotations

import re
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
        return PeakFlops(figure * 1e12, kind, f"data sheet of {name}, dense {kind}")
    return None


def peak(device: torch.device, kind: Kind) -> PeakFlops | None:
    """The peak of a device according to its maker; None if it is not listed."""
    return listed_peak(torch.cuda.get_device_name(device), kind) if device.type == "cuda" else None
