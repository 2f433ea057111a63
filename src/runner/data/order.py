"""Sample order: a pure function of seed and epoch, so that batch k of an epoch is a slice of it."""

from __future__ import annotations

import torch
from torch import Tensor

from runner.data.keyed import mix


def order(samples: int, seed: int, epoch: int, shuffle: bool = True) -> Tensor:
    """Positions of all samples in the order of an epoch.

    Args:
        samples: number of samples.
        seed: seed of the run.
        epoch: number of the epoch.
        shuffle: False gives 0, 1, 2, ... every epoch.

    Returns:
        A permutation of 0 to `samples` - 1, int64 of shape (samples,), on the CPU. The global generator is untouched.
    """
    if not shuffle:
        return torch.arange(samples)
    generator = torch.Generator().manual_seed(mix(seed, epoch, 0))
    return torch.randperm(samples, generator=generator)
