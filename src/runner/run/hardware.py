"""The device of a run and its precision, with torch's process-wide switches set."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from runner.config.schema.train import Train
from runner.runtime.device import choose_device, configure_torch, prepare_repeating
from runner.runtime.precision import Precision, choose_precision


@dataclass(frozen=True)
class Hardware:
    """Where a run computes, and how precisely."""

    device: torch.device
    reason: str  # why it was chosen
    precision: Precision  # of forward passes
    warnings: list[str]  # settings without effect here


def choose_hardware(config: Train) -> Hardware:
    """Choose device and precision, and set torch's switches."""
    prepare_repeating(config.deterministic)  # before the device is used for the first time
    device, reason = choose_device(config.device)
    warnings = set_switches(config, device)
    return Hardware(device, reason, choose_precision(config.amp, device, config.dtype), warnings)


def set_switches(config: Train, device: torch.device) -> list[str]:
    """Set torch's process-wide switches; returns warnings about those without effect."""
    return configure_torch(
        device,
        threads=config.threads,
        deterministic=config.deterministic,
        cudnn_benchmark=config.cudnn_benchmark,
        tf32=config.tf32,
        detect_anomaly=config.detect_anomaly,
        matmul_precision=config.matmul_precision,
    )
