"""`runner.gather`: the rows of all ranks, for losses that compare the samples of a batch with each other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from runner.base.errors import UserError
from runner.distributed.world import gathered_rows, rows, world

_samples, _whole = 0, True  # of the batch that a step trains on; 0 outside of a step


@contextlib.contextmanager
def training_on(samples: int, *, whole: bool) -> Iterator[None]:
    """Around the step of a batch of `samples`; `whole` is False for one of several batches of an optimizer step."""
    global _samples, _whole
    _samples, _whole = samples, whole
    try:
        yield
    finally:
        _samples, _whole = 0, True


def gather(tensor: Tensor) -> Tensor:
    """The rows of a tensor of all ranks, in the order of the samples in the batch, with gradients.

    A loss of the gathered rows is that of the whole batch, and so are its gradients, on any number of processes. On one
    process, and in evaluations, where a rank has whole batches, it returns the tensor itself.

    Args:
        tensor: (B, ...), a row of each sample that this rank has of the batch.

    Returns:
        (samples of the batch, ...), the same on every rank.

    Raises:
        UserError: if an optimizer step accumulates several batches, as no sample is compared with those of the others.
        ValueError: if the rows are not those of this rank's samples.
    """
    if not isinstance(tensor, Tensor) or not tensor.ndim:
        got = "a tensor without dimensions" if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
        raise ValueError(f"gather takes a tensor (B, ...), got {got}")
    if not _whole:
        problem = "is more than 1, and the loss compares all samples of an optimizer step by runner.gather"
        raise UserError("accumulate", problem, "1, with a larger data.batch_size, or more devices")
    if world().size == 1 or not _samples:
        return tensor
    own = rows(_samples, world().rank, world().size)
    expected = max(1, own.stop - own.start)  # a rank without a sample has taken another one, which is skipped
    if len(tensor) != expected:
        raise ValueError(
            f"gather takes a row of each sample, {expected} here, got {len(tensor)}: gather each view by itself"
        )
    gathered: Tensor = _Gather.apply(tensor, _samples, own)
    return gathered


class _Gather(torch.autograd.Function):
    """Gathers rows; backward adds up the gradients of all ranks' losses, of which their mean is taken afterwards."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, samples: int, own: slice) -> Tensor:
        ctx.own, ctx.shape = own, tensor.shape
        return gathered_rows(tensor.contiguous(), samples, world())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        found = gradient.new_zeros(ctx.shape)
        found[: ctx.own.stop - ctx.own.start] = world().total(gradient.contiguous())[ctx.own]
        return found, None, None
