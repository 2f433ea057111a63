"""The comparison of an exported model with the model itself: outputs and latency."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_SECONDS = 0.3
_MOST_CALLS = 100
_WARM_UP = 2


@dataclass(frozen=True)
class Comparison:
    """One format at one batch size."""

    format: str  # its name
    batch_size: int  # images of the batch
    max_abs: float  # largest difference from the model's outputs
    max_rel: float  # the same as a share of the model's largest output, or of 1 if that is larger
    ms: float  # median time of a call in milliseconds
    model_ms: float  # that of the model itself


@torch.inference_mode()
def compare(name: str, model: nn.Module, exported: nn.Module, batches: list[Tensor]) -> list[Comparison]:
    """Compare outputs and latency at each batch."""
    found = []
    for images in batches:
        expected, got = model(images).double(), exported(images).double()
        difference = float((expected - got).abs().max()) if expected.shape == got.shape else math.inf
        relative = difference / max(1.0, float(expected.abs().max()))
        found.append(
            Comparison(
                format=name,
                batch_size=len(images),
                max_abs=difference,
                max_rel=relative,
                ms=_latency_ms(exported, images),
                model_ms=_latency_ms(model, images),
            )
        )
    return found


def _latency_ms(model: nn.Module, images: Tensor) -> float:
    """Median time of a call in milliseconds."""
    times: list[float] = []
    while len(times) < _WARM_UP + 3 or (sum(times[_WARM_UP:]) < _SECONDS and len(times) < _WARM_UP + _MOST_CALLS):
        began = time.perf_counter()
        model(images)
        times.append(time.perf_counter() - began)
    return 1000 * statistics.median(times[_WARM_UP:])
