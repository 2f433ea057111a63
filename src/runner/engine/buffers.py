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
        found = (buffer for _, buffers in self._buffers for buffer in buffers.values() if buffer is not None)
        self._written = [buffer.detach() for buffer in found if _is_written_to(buffer)]
        self._values = [buffer.clone() for buffer in self._written]

    def restore(self) -> None:
        """Put them back."""
        with torch.no_grad():
            if self._written:
                torch._foreach_copy_(self._written, self._values)
        for module, buffers in self._buffers:
            if buffers or module._buffers:
                module._buffers.clear()
                module._buffers.update(buffers)


def _is_written_to(buffer: Tensor) -> bool:
    """Whether it can be changed in place: an expanded tensor, whose elements share memory, cannot."""
    if buffer.is_contiguous():
        return True
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
