"""Figures about the machine that go into the log lines of training."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch

from runner.base.errors import UserError
from runner.instrument.flops import Flops
from runner.runtime.memory import peak_memory
from runner.runtime.peak_flops import Kind, PeakFlops, known_peak, peak

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
        peak, work = _in_words(self.peak_flops.flops), _in_words(self.flops_of_sample)
        return [("utilization", f"of {peak}/s, {work} a sample", self.peak_flops.source)]

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

    `count` counts the operations of a batch, and is called only if needed; `warnings` gets a line where `auto` is not
    supported.

    Raises:
        UserError: if utilisation is asked for and the operations cannot be counted.
    """
    # With `auto`, only a peak that is known from a table is used, as measuring takes time
    peak_flops = known_peak(device, kind) if wanted == "auto" else peak(device, kind) if wanted else None
    if peak_flops is None:
        return HardwareMetrics(device)
    try:
        return HardwareMetrics(device, count().of_sample, peak_flops)
    except RuntimeError as error:
        reason = f"the operations of this model cannot be counted: {str(error).strip().splitlines()[0]}"
        if wanted is True:
            raise UserError("log.utilization", reason, "log.utilization=false") from error
        warnings.append(f"log.utilization=auto has no effect: {reason}")
        return HardwareMetrics(device)
