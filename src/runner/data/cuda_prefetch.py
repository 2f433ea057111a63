"""Copies the next batch to a GPU and prepares it there while the model computes on the current one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import torch
from torch import Tensor

Tensors = TypeVar("Tensors", bound=tuple[Tensor, ...])


def prefetch_to_cuda(batches: Iterator[Tensors], device: torch.device) -> Iterator[Tensors]:
    """The same tuples of tensors, each made one ahead on its own stream; on other devices than CUDA, just `batches`.

    The producer must use no stateful generator: one batch is always made before it is requested, and a checkpoint written in
    between must not depend on that.
    """
    return _ahead(batches, device) if device.type == "cuda" else batches


def _ahead(batches: Iterator[Tensors], device: torch.device) -> Iterator[Tensors]:
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    # The inputs of batches, such as the statistics of the normalisation, were computed on the other stream.
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
