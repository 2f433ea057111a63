"""Types of numbers: one code path for float64, float32, bf16 and fp16."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from runner.base.errors import UserError

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# What a CPU that computes in a 16-bit format says it has, of x86 and of ARM.
_INSTRUCTIONS = {
    "bf16": ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"),
    "fp16": ("avx512_fp16", "amx_fp16", "fp16_arith"),
}
# Of x86 and of ARM, whose bf16 extension has a product of matrices.
_MATRIX_UNITS = ("amx_bf16", "bf16", "sve_bf16")


@dataclass
class Precision:
    """The number format of forward passes."""

    device: torch.device
    dtype: torch.dtype | None  # dtype of autocast; None computes in the type of the weights
    # Scales the loss so that fp16 gradients do not vanish; None where that is not needed
    scaler: torch.amp.GradScaler | None
    name: str  # for people
    reason: str  # why it was chosen
    warnings: list[str] = field(default_factory=list)  # what people should know
    weights: torch.dtype = torch.float32  # dtype of weights and images

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """A context for forward passes and the loss."""
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)


def choose_precision(
    amp: bool | Literal["auto", "bf16", "fp16"],
    device: torch.device,
    weights: Literal["float32", "float64"] = "float32",
) -> Precision:
    """The precision that `amp=` asks for on a device; `auto` is `true` where that is known to be faster.

    Weights of float64 are for `amp=false`.

    Raises:
        UserError: if the device cannot compute in it.
    """
    if weights == "float64":
        if device.type == "mps":
            raise UserError("dtype", "is float64, which mps does not support", "float32, or device=cpu")
        return Precision(device, None, None, "float64", "dtype=float64", weights=torch.float64)
    # Each answer carries its reason, which the header of the run shows
    if amp is False:
        return Precision(device, None, None, "float32", "amp=false")
    if amp == "auto" and not has_matrix_units(device):
        reason = f"amp=auto: this {device.type} is not known to have units for matrices of 16 bits"
        return Precision(device, None, None, "float32", reason)
    # bf16 is preferred as it needs no loss scaling
    native = is_native("bf16", device)
    if amp is True or amp == "auto":
        kind: Literal["bf16", "fp16"] = "bf16" if device.type == "cpu" or native else "fp16"
        has = "has bf16" if native else "emulates bf16" if kind == "bf16" else "has no bf16"
        reason = f"amp={str(amp).lower()}: {device.type} {has}"
    else:
        kind, reason = amp, f"amp={amp}"
    warnings = []
    if not is_native(kind, device):
        faster = "amp=bf16 or amp=false" if kind == "fp16" and native else "amp=false"
        warnings.append(
            f"amp={kind}: this {device.type} has no instructions for it and emulates them, which may be slower than "
            f"float32; {faster} is faster"
        )
    if kind == "bf16":
        return Precision(device, torch.bfloat16, None, name="bf16 mixed", reason=reason, warnings=warnings)
    scaler = torch.amp.GradScaler(device.type)
    return Precision(device, torch.float16, scaler, name="fp16 mixed, scaled loss", reason=reason, warnings=warnings)


def is_native(kind: Literal["bf16", "fp16"], device: torch.device) -> bool:
    """True if a device computes in a 16-bit format itself; True where nothing is known."""
    if device.type == "cuda":
        return kind == "fp16" or bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "mps":
        try:
            return bool(torch.ones(1, dtype=_DTYPES[kind], device=device).dtype == _DTYPES[kind])
        except (RuntimeError, TypeError):
            return False
    capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    known = [capabilities[name] for name in _INSTRUCTIONS[kind] if name in capabilities]
    return any(known) or not known


def has_matrix_units(device: torch.device) -> bool:
    """True if a device has units that multiply matrices of 16 bits faster than those of 32; False where nothing is known.

    Instructions alone (`avx512_bf16`) are not enough: where they were measured, float32 was faster.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (7, 0)
    if device.type != "cpu":
        return False
    capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name) for name in _MATRIX_UNITS)
