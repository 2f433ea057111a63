"""The memory that the graph keeps for backward, in bytes."""

from __future__ import annotations

import collections
import contextlib
from collections import Counter
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from runner.instrument.nested import tensors_in
from runner.instrument.observer import Observer

OUTSIDE = "(outside the model)"
"""The name in `SavedTensors.by_module` of what is saved while no module of the model runs, such as the loss's."""


class _SavedTensor:
    """A saved tensor that the graph holds; reports when the graph releases it."""

    __slots__ = ("_key", "_released", "tensor")

    def __init__(self, tensor: Tensor, key: int, released: collections.deque[int]) -> None:
        self.tensor, self._key, self._released = tensor, key, released

    def __del__(self) -> None:
        # Only a note: this may run in a thread of autograd's, or in the midst of anything. The storage is freed after it.
        self._released.append(self._key)


class SavedTensors:
    """Counts what the graph keeps for backward while it is built, each storage once.

        with SavedTensors(model) as saved:
            loss = criterion(model(images), targets)
        saved.activations, saved.by_module

    Counted are tensors saved by operations and by `ctx.save_for_backward`, through
    `torch.autograd.graph.saved_tensors_hooks`; what a checkpointed region (`use_reentrant=False`) computes again is not
    saved, and its inputs are. The figures are those of the moment when most was kept, so a block may hold several steps.
    A view counts as its whole storage, which it keeps alive. Nothing is added to the graph, no result changes and no
    device is waited for; it works on any device, `meta` too.

    Args:
        model: whose parameters, inputs and modules are counted separately; without one, all but `inputs` are activations.
        inputs: further tensors that are in memory anyway; kept until the block ends.
    """

    def __init__(self, model: nn.Module | None = None, inputs: Iterable[Tensor] = ()) -> None:
        self._model, self._given = model, list(inputs)
        self._released: collections.deque[int] = collections.deque()
        self._live: dict[int, list[Any]] = {}  # storage -> [times saved, bytes, (kind, module)]
        self._now: Counter[tuple[str, str]] = Counter()  # bytes by kind and module
        self._most: Counter[tuple[str, str]] = Counter()  # the same when the activations were most
        self._running: list[str] = []
        self._known: dict[int, str] = {}  # kind of what is in memory anyway, by storage
        self._noted: list[int] = []  # inputs of the model among them
        self._contexts = contextlib.ExitStack()

    def __enter__(self) -> SavedTensors:
        self._known = {_storage(tensor)[0]: "inputs" for tensor in self._given}
        if self._model is not None:
            for tensor in (*self._model.parameters(), *self._model.buffers()):
                self._known[_storage(tensor)[0]] = "parameters"
            # Recomputing a checkpointed region stops by an exception as soon as it has all it needs, hence `always`.
            self._contexts.enter_context(Observer(self._model, self._enter, self._leave, always=True))
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor)
        self._contexts.enter_context(hooks)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._contexts.close()
        self._running.clear()
        self._known.clear()
        self._given.clear()

    @property
    def activations(self) -> int:
        """Bytes kept that would be free otherwise, copies of weights that autocast makes among them."""
        return _total(self._at_most(), "activations")

    @property
    def parameters(self) -> int:
        """Bytes of the model's parameters and buffers that the graph refers to; they stay in memory anyway."""
        return _total(self._at_most(), "parameters")

    @property
    def inputs(self) -> int:
        """Bytes of the model's inputs, as it saves them, and of those given, that the graph refers to."""
        return _total(self._at_most(), "inputs")

    @property
    def by_module(self) -> dict[str, int]:
        """Activations by the dotted name of the module that was running, without its children, in the order of saving."""
        return {name: count for (kind, name), count in self._at_most().items() if kind == "activations" and count}

    def _at_most(self) -> Counter[tuple[str, str]]:
        if _total(self._now, "activations") >= _total(self._most, "activations"):
            self._most = self._now.copy()
        return self._most

    def _enter(self, name: str, module: nn.Module, inputs: list[Any]) -> None:
        self._running.append(name)
        for tensor in tensors_in(inputs) if module is self._model else ():
            if (key := _storage(tensor)[0]) not in self._known:
                self._known[key] = "inputs"
                self._noted.append(key)

    def _leave(self, name: str, module: nn.Module, inputs: list[Any], output: Any) -> None:
        if self._running:
            self._running.pop()
        if module is self._model:
            # Once the caller frees them, their place in memory may be given to an activation.
            for key in self._noted:
                self._known.pop(key, None)
            self._noted.clear()

    def _pack(self, tensor: Tensor) -> _SavedTensor:
        if self._released:
            self._let_go()
        key, size = _storage(tensor)
        if key not in self._live:
            place = (self._known.get(key, "activations"), self._running[-1] if self._running else OUTSIDE)
            self._live[key] = [0, size, place]
            self._now[place] += size
        self._live[key][0] += 1
        return _SavedTensor(tensor, key, self._released)

    def _let_go(self) -> None:
        """Subtract what the graph has let go since the last tensor was saved."""
        self._at_most()
        while self._released:
            key = self._released.popleft()
            entry = self._live[key]
            entry[0] -= 1
            if entry[0] == 0:
                _, size, place = self._live.pop(key)
                self._now[place] -= size


def _total(counts: Counter[tuple[str, str]], kind: str) -> int:
    return sum(count for (each, _), count in counts.items() if each == kind)


def _storage(tensor: Tensor) -> tuple[int, int]:
    """The identity of a tensor's storage, unique while it lives, and its bytes."""
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse tensors have several
        return id(tensor), tensor.element_size() * (tensor._nnz() if tensor.is_sparse else tensor.numel())
    return int(storage._cdata), int(storage.nbytes())
