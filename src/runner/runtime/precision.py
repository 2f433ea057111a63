"""Mixed precision: one code path for float32, bf16 and fp16."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from runner.config.errors import UserError

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
    """How forward passes are computed.

    Attributes:
        dtype: dtype of autocast; None computes in float32.
        scaler: scales the loss so that fp16 gradients do not vanish; None where that is not needed.
        name: for people.
        reason: why it was chosen.
        warnings: what people should know.
    """

    device: torch.device
    dtype: torch.dtype | None
    scaler: torch.amp.GradScaler | None
    name: str
    reason: str
    warnings: list[str] = field(default_factory=list)

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """A context for forward passes and the loss."""
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)


def choose_precision(amp: bool | Literal["auto", "bf16", "fp16"], device: torch.device) -> Precision:
    """The precision that `amp=` asks for on a device; `auto` is `true` where that is known to be faster.

    Raises:
        UserError: if the device cannot compute in it.
    """
    if amp is False:
        return Precision(device, None, None, "float32", "amp=false")
    if amp == "auto" and not has_matrix_units(device):
        reason = f"amp=auto: this {device.type} is not known to have units for matrices of 16 bits"
        return Precision(device, None, None, "float32", reason)
    if amp is True or amp == "auto":
        word = f"amp={str(amp).lower()}"
        kind: Literal["bf16", "fp16"] = "bf16" if device.type == "cpu" or is_native("bf16", device) else "fp16"
        if not is_native("bf16", device):
            reason = f"{word}: {device.type} " + ("emulates bf16" if kind == "bf16" else "has no bf16")
        else:
            reason = f"{word}: {device.type} has bf16"
    else:
        kind, reason = amp, f"amp={amp}"
    warnings = [] if is_native(kind, device) else [_emulated(kind, device)]
    if kind == "bf16":
        return Precision(device, torch.bfloat16, None, "bf16 mixed", reason, warnings)
    scaler = torch.amp.GradScaler(device.type)
    if not _scales(scaler, device):
        raise UserError(
            "amp",
            f"fp16 needs its loss scaled, which torch {torch.__version__} cannot do on {device.type}",
            "amp=bf16 or amp=false",
        )
    return Precision(device, torch.float16, scaler, "fp16 mixed, scaled loss", reason, warnings)


def is_native(kind: Literal["bf16", "fp16"], device: torch.device) -> bool:
    """Whether a device computes in a 16-bit format itself; True where nothing is known."""
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
    """Whether a device has units that multiply matrices of 16 bits faster than those of 32; False where nothing is known.

    Instructions alone (`avx512_bf16`) are not enough: where they were measured, float32 was faster.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (7, 0)
    if device.type != "cpu":
        return False
    capabilities: Mapping[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(capabilities.get(name) for name in _MATRIX_UNITS)


def _emulated(kind: str, device: torch.device) -> str:
    other = "" if kind == "bf16" or not is_native("bf16", device) else "amp=bf16 or "
    return (
        f"amp={kind}: this {device.type} has no instructions for it and emulates them, which may be slower than float32; "
        f"{other}amp=false is faster"
    )


def _scales(scaler: torch.amp.GradScaler, device: torch.device) -> bool:
    """Whether a scaler works on a device, which on some is only found out by trying."""
    if device.type in ("cpu", "cuda"):
        return True
    weight = torch.ones(1, device=device, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.0)
    trial = type(scaler)(device.type)
    try:
        trial.scale(weight.sum()).backward()  # type: ignore[no-untyped-call]
        trial.step(optimizer)
        trial.update()
    except (RuntimeError, NotImplementedError, TypeError, AttributeError, AssertionError):
        return False
    return True
