"""The rows of a batch that each rank trains on."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from runner.distributed.world import World


def rows(samples: int, rank: int, size: int) -> slice:
    """The rows of a batch of `samples` that are a rank's: neighbours, and one more for the first ranks if they do not divide."""
    each, more = divmod(samples, size)
    start = rank * each + min(rank, more)
    return slice(start, start + each + (rank < more))


def gathered_rows(own: Tensor, samples: int, world: World) -> Tensor:
    """The rows of all ranks, (samples, ...), given this one's; a rank without rows gives a row that is skipped."""
    parts = [rows(samples, rank, world.size) for rank in range(world.size)]
    longest = max(1, parts[0].stop)
    padded = own.new_zeros((longest, *own.shape[1:]))
    padded[: len(own)] = own
    found = [torch.empty_like(padded) for _ in parts]
    dist.all_gather(found, padded)
    return torch.cat([rank_rows[: part.stop - part.start] for rank_rows, part in zip(found, parts, strict=True)])
