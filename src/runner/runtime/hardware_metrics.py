"""Figures about the machine that go into the log lines of training."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch

from runner.base.errors import UserError, first_line
from runner.instrument.flops import Flops
from runner.runtime.memory import peak_memory
from runner.runtime.peak_flops import Kind, PeakFlops, peak

_SECONDS_BETWEEN_LOOKS = 1.0  # asking the system for the memory of the process takes longer than a small step


@dataclass
class HardwareMetrics:
    """Peak memory, and how much of what the device could compute went into training."""

    device: torch.device  # where training runs
    # Floating-point operations that training on one sample needs; None to leave utilisation out
    flops_of_sample: float | None = None
    peak_flops: PeakFlops | None = None  # what the device can do at most; None to leave utilisation out
    _peak_mib: float = field(default=0.0, init=False)
    _looked: float = field(default=float("-inf"), init=False)

    def rows(self) -> list[tuple[str, str, str]]:
        """The peak that utilisation is a share of, for people: (label, value, reason), or nothing."""
        if self.flops_of_sample is None or self.peak_flops is None:
            return []
        most, work = _in_words(self.peak_flops.flops), _in_words(self.flops_of_sample)
        return [("utilization", f"of {most}/s, {work} a sample", self.peak_flops.source)]

    def __call__(self, samples_per_s: float) -> dict[str, float]:
        """The figures of a log line.

        Returns:
            `peak_memory_mib`, of the process on the CPU, of tensors on CUDA; and `mfu`, the model FLOPs utilisation of
            Chowdhery et al. 2022: operations that the model needs, not those that checkpointing repeats, as a share of
            the peak.
        """
        now = time.monotonic()
        # Reading the peak takes time, so it may be up to a second old
        if now - self._looked >= _SECONDS_BETWEEN_LOOKS:
            self._peak_mib, self._looked = peak_memory(self.device).bytes / 2**20, now
        figures = {"peak_memory_mib": self._peak_mib}
        if self.flops_of_sample is not None and self.peak_flops is not None:
            figures["mfu"] = samples_per_s * self.flops_of_sample / self.peak_flops.flops
        return figures


def _in_words(flops: float) -> str:
    unit, scale = next(
        ((unit, scale) for unit, scale in zip("TGM", (1e12, 1e9, 1e6), strict=True) if flops >= scale), ("k", 1e3)
    )
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
    if (peak_flops := peak(device, kind)) is None:
        if wanted is True or device.type != "cpu":
            name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
            warnings.append(f"{no_effect}no peak of {name} is listed for {kind}")
        return HardwareMetrics(device)
    try:
        return HardwareMetrics(device, count().of_sample, peak_flops)
    except RuntimeError as error:
        reason = f"the operations of this model cannot be counted: {first_line(error)}"
        if wanted is True:
            raise UserError("log.utilization", reason, "log.utilization=false") from error
        warnings.append(no_effect + reason)
        return HardwareMetrics(device)
