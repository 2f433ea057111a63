"""The next batch is copied to a GPU and prepared there while the model computes on this one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor

Tensors = TypeVar("Tensors", bound=tuple[Tensor, ...])


def prefetch_to_cuda(batches: Iterator[Tensors], device: torch.device) -> Iterator[Tensors]:
    """Give the same batches, each made one ahead on a stream of its own; anywhere but on CUDA, just the batches.

    What makes the batches must draw from no generator that has a state: one batch is always made before it is asked for,
    and a checkpoint that is written in between must not depend on that.

    Args:
        batches: gives tuples of tensors on the device; what it computes is put on the stream.
        device: where the batches are.
    """
    return _ahead(batches, device) if device.type == "cuda" else batches


def _ahead(batches: Iterator[Tensors], device: torch.device) -> Iterator[Tensors]:
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    # What batches are made from, such as the statistics of the normalisation, was computed on the other stream.
    side.wait_stream(torch.cuda.current_stream(device))

    def made() -> Tensors | None:
        with torch.cuda.stream(side):
            return next(batches, None)

    upcoming = made()
    while upcoming is not None:
        batch = upcoming
        current = torch.cuda.current_stream(device)
        current.wait_stream(side)
        for tensor in batch:
            # Their memory belongs to the side stream, which must not reuse it before this one is done with them.
            tensor.record_stream(current)
        upcoming = made()
        yield batch
