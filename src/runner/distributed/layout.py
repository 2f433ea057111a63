"""The cost of a layout of ranks, by formula: bytes that a rank holds, and bytes that it sends in a step.

All sizes are bytes, N is the number of ranks. No formula counts what libraries reserve, fragmentation, workspaces of
kernels, gradients of activations, or the input batch.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from runner.distributed.share import rows


@dataclass(frozen=True)
class Weight:
    """A parameter, as far as its size goes."""

    shape: tuple[int, ...]
    itemsize: int = 4  # bytes of an element
    trained: bool = True
    divided: int = 0  # bytes of optimizer state that FSDP divides as it divides the parameter, such as moments
    whole: int = 0  # bytes of other optimizer state, such as step counters
    unit: str = ""  # the block that FSDP gathers it with; "" for what is in no block

    @property
    def bytes(self) -> int:
        """Bytes of the whole parameter."""
        return math.prod(self.shape) * self.itemsize

    def share(self, ranks: int, size: int | None = None) -> int:
        """Bytes of the largest of N shards, of the parameter or of `size` bytes in its shape: ceil(dim 0 / N) of its rows.

        `fully_shard` pads every shard to this size, so a rank without rows holds as much.
        """
        first = self.shape[0] if self.shape else 1
        whole = self.bytes if size is None else size
        return whole // first * -(-first // ranks) if first else 0


@dataclass(frozen=True)
class Memory:
    """Bytes that a rank holds in a step, when it holds the most."""

    parameters: int
    gradients: int
    optimizer: int  # the optimizer's state
    buffers: int  # such as the statistics of BatchNorm
    average: int  # the average of the weights that `ema` or `swa` keeps
    activations: int  # what autograd keeps for backward
    gathered: int = 0  # parameters and gradients in full size, of the blocks that FSDP computes with

    @property
    def total(self) -> int:
        """The sum."""
        return sum(vars(self).values())


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank sends in an optimizer step; it receives as many."""

    all_reduce: int = 0
    all_gather: int = 0
    reduce_scatter: int = 0
    broadcast: int = 0

    @property
    def total(self) -> int:
        """The sum."""
        return sum(vars(self).values())


def samples_of_ranks(batch: int, ranks: int) -> tuple[int, int]:
    """Samples of a batch that a rank gets at least and at most."""
    sizes = [own.stop - own.start for own in (rows(batch, ranks - 1, ranks), rows(batch, 0, ranks))]
    return sizes[0], sizes[1]


def ddp_memory(weights: Sequence[Weight], *, buffers: int = 0, averaged: bool = False, activations: int = 0) -> Memory:
    """The memory of a rank of DistributedDataParallel: all of everything, whatever N is; also of a single process.

    The gradients lie in the buckets that are communicated, so these add nothing. Not counted are the second set of buckets
    while DistributedDataParallel sorts them in its first step, and the copies that gloo makes of a message.
    """
    alone = fsdp_memory(weights, 1, buffers=buffers, averaged=averaged, activations=activations)
    return dataclasses.replace(alone, gathered=0)


def fsdp_memory(
    weights: Sequence[Weight],
    ranks: int,
    *,
    reshard: bool = True,
    batches: int = 1,
    buffers: int = 0,
    averaged: bool = False,
    activations: int = 0,
) -> Memory:
    """The memory of a rank under `fully_shard`, with a unit for each block and one for the rest.

    Parameters, gradients, optimizer state and averages are shards, see `Weight.share`; step counters and buffers are whole.
    Gathered are the rest and the largest block, or without `reshard` all parameters; and the gradients of one unit, or with
    accumulation those of all. Not counted are what is gathered early for the next block, which takes at most as much as the
    largest block again, and the flat copies that collectives work on.

    Args:
        weights: all parameters.
        ranks: N, that divide a copy of the model.
        reshard: whether parameters are dropped after forward and gathered again in backward.
        batches: that are accumulated.
        buffers: bytes of buffers.
        averaged: whether an average of the weights is kept.
        activations: bytes that autograd keeps, without parameters.
    """
    # Frozen weights have no gradient and no moments
    trained = [weight for weight in weights if weight.trained]
    sizes, gradients = defaultdict[str, int](int), defaultdict[str, int](int)
    for weight in weights:
        sizes[weight.unit] += weight.bytes
        gradients[weight.unit] += weight.bytes * weight.trained
    # The root unit holds what is in no block, and is gathered for the whole step
    rest = sizes.pop("", 0)
    # With resharding one block is whole at a time, without it all of them
    gathered = rest + (max if reshard else sum)(sizes.values() or [0])
    return Memory(
        parameters=sum(weight.share(ranks) for weight in weights),
        gradients=sum(weight.share(ranks) for weight in trained),
        optimizer=sum(weight.share(ranks, weight.divided) + weight.whole for weight in weights),
        buffers=buffers,
        average=sum(weight.share(ranks) for weight in trained) * averaged,
        activations=activations,
        gathered=gathered + (max if batches == 1 else sum)(gradients.values() or [0]),
    )


def ddp_traffic(weights: Sequence[Weight], ranks: int, *, buffers: int = 0) -> Traffic:
    """The traffic of a rank of DistributedDataParallel: a ring all-reduce of the gradients moves 2 (N - 1) / N of their bytes.

    Only the last of accumulated batches communicates. It begins with rank 0 giving the buffers to the others; along a ring,
    each rank passes them on once. Not counted are the messages in which ranks agree on when to stop, of 16 bytes, and those of
    logging and evaluation.
    """
    if ranks == 1:
        return Traffic()
    gradients = sum(weight.bytes for weight in weights if weight.trained)
    return Traffic(all_reduce=round(2 * (ranks - 1) / ranks * gradients), broadcast=buffers)


def fsdp_traffic(
    weights: Sequence[Weight], ranks: int, *, reshard: bool = True, batches: int = 1, replicas: int = 1
) -> Traffic:
    """The traffic of a rank under `fully_shard`: each collective moves N - 1 shards, (N - 1) / N of the padded bytes.

    Each batch gathers all parameters in forward, and with `reshard` again in backward. The last of accumulated batches
    reduces and scatters the gradients in float32, and the replicas average their shards of them. Buffers are not sent.

    Args:
        weights: all parameters.
        ranks: N, that divide a copy of the model.
        reshard, batches: see `fsdp_memory`.
        replicas: copies of the model.
    """
    every = sum(weight.share(ranks) for weight in weights)
    trained = sum(weight.share(ranks) for weight in weights if weight.trained)
    return Traffic(
        all_reduce=round(2 * (replicas - 1) / replicas * trained),
        all_gather=batches * (ranks - 1) * every * (1 + reshard),
        reduce_scatter=(ranks - 1) * trained,
    )
