"""Buffers of modules, put back as they were."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn


class KeptBuffers:
    """The buffers of modules as they are now: their values, and which tensors they are.

    Some models assign new tensors to their buffers, or register buffers while they run. Writing the old values into the old
    tensors would not undo that.

    Args:
        *modules: modules, and objects of other kinds, which have no buffers.
    """

    def __init__(self, *modules: object) -> None:
        inner = dict.fromkeys(each for module in modules if isinstance(module, nn.Module) for each in module.modules())
        self._buffers = [(module, dict(module._buffers)) for module in inner]
        self._values = [
            (buffer, buffer.detach().clone())
            for _, buffers in self._buffers
            for buffer in buffers.values()
            if buffer is not None and _is_written_to(buffer)
        ]

    def restore(self) -> None:
        """Put them back."""
        with torch.no_grad():
            for buffer, value in self._values:
                buffer.copy_(value)
        for module, buffers in self._buffers:
            module._buffers.clear()
            module._buffers.update(buffers)


def _is_written_to(buffer: Tensor) -> bool:
    """Whether it can be changed in place: an expanded tensor, whose elements share memory, cannot."""
    pairs = zip(buffer.stride(), buffer.shape, strict=True) if buffer.layout is torch.strided else ()
    return all(stride for stride, size in pairs if size > 1)


@contextlib.contextmanager
def untouched_buffers(*modules: object) -> Iterator[None]:
    """Put back the buffers of modules, see `KeptBuffers`."""
    kept = KeptBuffers(*modules)
    try:
        yield
    finally:
        kept.restore()
