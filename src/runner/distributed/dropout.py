"""Random numbers in forward passes of several ranks: those that one process would have drawn for the whole batch.

Every rank has the same generators. Where a mask has a row for each sample, a rank draws the rows of the whole batch and keeps
its own, so the mask of a sample does not depend on the number of ranks, and the generators stay the same everywhere.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_ENTERED: list[SharedMasks] = []
_BY_CHANNEL = {F.dropout1d: 3, F.dropout2d: 4, F.dropout3d: 5}  # dimensions of a batch


class SharedMasks(TorchFunctionMode):
    """While entered, dropout and random rows are those of the whole batch of `samples`, of which this rank has `own`.

    Fused kernels draw other numbers: on CUDA a mask is another one than that of a single process, but the same for any
    number of ranks. Compiled models draw inside their kernels, where this has no effect.
    """

    def __init__(self) -> None:
        super().__init__()
        self.samples, self.own = 0, slice(0, 0)

    def __enter__(self) -> SharedMasks:
        _ENTERED.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _ENTERED.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout or func is torch.dropout or func in _BY_CHANNEL:
            return self._dropout(func, *args, **kwargs)
        if func is Tensor.bernoulli_ and self._is_batch(args[0]):
            with torch._C.DisableTorchFunction():
                return args[0].copy_(self._drawn(args[0], *args[1:], **kwargs))
        if func is F.scaled_dot_product_attention and _argument(args, kwargs, 4, "dropout_p", 0.0) > 0:
            return self._attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _is_batch(self, tensor: Tensor) -> bool:
        return tensor.ndim > 0 and len(tensor) == self.own.stop - self.own.start

    def _drawn(self, like: Tensor, p: float = 0.5, generator: Any = None) -> Tensor:
        """Zeros and ones for this rank's rows, drawn in the order of the memory of `like`."""
        order = sorted(range(like.ndim), key=like.stride, reverse=True)
        whole = torch.empty_permuted((self.samples, *like.shape[1:]), order, dtype=like.dtype, device=like.device)
        return whole.bernoulli_(p, generator=generator)[self.own]

    def _dropout(
        self, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, **kwargs: Any
    ) -> Tensor:
        training = kwargs.pop("train", training)  # torch.dropout's name
        if not training or not 0 < p < 1 or not self._is_batch(input) or input.ndim < _BY_CHANNEL.get(func, 1):
            with torch._C.DisableTorchFunction():
                return func(input, p, training) if func is torch.dropout else func(input, p, training, inplace)
        with torch._C.DisableTorchFunction():
            by_channel = input[(slice(None),) * 2 + (slice(0, 1),) * (input.ndim - 2)] if func in _BY_CHANNEL else input
            mask = self._drawn(by_channel, 1 - p).div(1 - p)  # a copy: a view would keep the rows of all ranks
            return input.mul_(mask) if inplace else input * mask

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Attention by its definition, as its kernels draw masks that cannot be divided."""
        scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
        if is_causal:
            ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
            scores = scores.masked_fill(~ones.tril(), -math.inf)
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
        return self._dropout(F.dropout, scores.softmax(-1), dropout_p) @ value


def masks_now() -> contextlib.AbstractContextManager[object]:
    """The masks that are entered, to enter them again where backward repeats a forward pass: autograd leaves them."""
    return _ENTERED[-1] if _ENTERED else contextlib.nullcontext()


def _argument(args: Any, kwargs: Any, place: int, name: str, default: Any) -> Any:
    return args[place] if len(args) > place else kwargs.get(name, default)
