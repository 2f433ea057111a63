"""Repeated augmentation, a function for `data.batch_sampler`."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import torch
from torch import Tensor


def repeated_augmentation(dataset: Sized, batch_size: int, generator: Any, repeats: int) -> Tensor:
    """Each sample `repeats` times in a row, each time augmented differently (Berman et al. 2019, arXiv:1902.05509).

    An epoch has as many samples as the data set, int64 (N,), and so a share 1 / `repeats` of its images. `generator` is a
    `torch.Generator`.

    Raises:
        ValueError: `repeats` is below 1.
    """
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    samples = len(dataset)
    chosen = torch.randperm(samples, generator=generator)[: -(-samples // repeats)]
    return chosen.repeat_interleave(repeats)[:samples]
