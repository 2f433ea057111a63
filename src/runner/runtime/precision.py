"""Mixed precision: one code path for float32, bf16 and fp16."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Literal

import torch


@dataclass
class Precision:
    """How forward passes are computed.

    Attributes:
        dtype: dtype of autocast; None computes in float32.
        scaler: scales the loss so that fp16 gradients do not vanish; None where that is not needed.
        name: for people.
        reason: why it was chosen.
    """

    device: torch.device
    dtype: torch.dtype | None
    scaler: torch.amp.GradScaler | None
    name: str
    reason: str

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """A context for forward passes and the loss."""
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)


def choose_precision(amp: bool | Literal["bf16", "fp16"], device: torch.device) -> Precision:
    """The precision that `amp=` asks for on a device."""
    if amp is False:
        return Precision(device, None, None, "float32", "amp=false")
    if amp is True:
        has_bf16 = device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_bf16_supported())
        kind = "bf16" if has_bf16 else "fp16"
        reason = f"amp=true: {device.type} " + ("has bf16" if has_bf16 else "has no bf16")
    else:
        kind, reason = amp, f"amp={amp}"
    if kind == "bf16":
        return Precision(device, torch.bfloat16, None, "bf16 mixed", reason)
    scaler = torch.amp.GradScaler(device.type)
    return Precision(device, torch.float16, scaler, "fp16 mixed, scaled loss", reason)
