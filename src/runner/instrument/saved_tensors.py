"""The memory that the graph keeps for backward, in bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from runner.instrument.nested import tensors_in
from runner.instrument.observer import Observer


def bytes_for_backward(model: nn.Module, forward: Callable[[], object]) -> int:
    """Bytes that the graph of `forward` keeps for backward and that would be free otherwise, each storage once.

    Parameters, buffers and inputs of the model are in memory anyway. A view counts as its whole storage, which it keeps
    alive. What a checkpointed region (`use_reentrant=False`) computes again is not saved, and its inputs are. Nothing is added
    to the graph, and no result changes.
    """
    known = {_storage(tensor)[0] for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []  # or the place of a tensor that is freed would be given to another one

    def note(name: str, module: nn.Module, inputs: list[Any]) -> None:
        alive.extend(tensors_in(inputs))
        known.update(_storage(tensor)[0] for tensor in tensors_in(inputs))

    def pack(tensor: Tensor) -> Tensor:
        key, size = _storage(tensor)
        if key not in known:
            kept[key] = size
        alive.append(tensor.detach())
        return alive[-1]

    with (
        Observer(model, before=note, names=[""]),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        alive.extend(tensors_in(forward()))
    return sum(kept.values())


def _storage(tensor: Tensor) -> tuple[int, int]:
    """The identity of a tensor's storage, unique while it lives, and its bytes."""
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse tensors have several
        return id(tensor), tensor.element_size() * (tensor._nnz() if tensor.is_sparse else tensor.numel())
    return int(storage._cdata), int(storage.nbytes())
