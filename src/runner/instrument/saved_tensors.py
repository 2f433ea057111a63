"""What the graph keeps for backward, in bytes."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from runner.instrument.nested import tensors_in
from runner.instrument.observer import Observer

OUTSIDE = "(outside the model)"
"""Where `SavedTensors.by_module` counts what is saved while no module of the model runs, such as the loss's."""


class _Held:
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

    Attributes are read after the block, or inside it:
        activations: bytes kept that would be free otherwise, copies of weights that autocast makes among them.
        parameters: bytes of the model's parameters and buffers that the graph refers to; they stay in memory anyway.
        inputs: bytes of the model's inputs, as it saves them, and of those given.
        by_module: activations by the dotted name of the module that was running, not counting its children; the empty
            name is the model itself.

    Args:
        model: whose parameters, inputs and modules are counted separately; without one, all but `inputs` are activations.
        inputs: further tensors that are in memory anyway; kept until the block ends.
    """

    def __init__(self, model: nn.Module | None = None, inputs: Iterable[Tensor] = ()) -> None:
        self._model, self._given = model, list(inputs)
        self._released: collections.deque[int] = collections.deque()
        self._live: dict[int, list[Any]] = {}  # storage -> [times saved, bytes, kind, module]
        self._now = {"activations": 0, "parameters": 0, "inputs": 0}
        self._modules_now: dict[str, int] = {}
        self._most = dict(self._now)
        self._modules_most: dict[str, int] = {}
        self._running: list[str] = []
        self._known: dict[int, str] = {}
        self._noted: list[int] = []
        self._observer: Observer | None = None
        self._context: Any = None

    def __enter__(self) -> SavedTensors:
        self._known = {_storage(tensor)[0]: "inputs" for tensor in self._given}
        if self._model is not None:
            for tensor in (*self._model.parameters(), *self._model.buffers()):
                self._known[_storage(tensor)[0]] = "parameters"
            # Recomputing a checkpointed region stops by an exception as soon as it has all it needs, hence `always`.
            self._observer = Observer(self._model, self._enter, self._leave, always=True)
        self._context = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        self._context.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._context.__exit__(kind, error, traceback)
        if self._observer is not None:
            self._observer.remove()
        self._running.clear()
        self._known.clear()
        self._given.clear()

    @property
    def activations(self) -> int:
        """Bytes kept that would be free otherwise."""
        return self._at_most()["activations"]

    @property
    def parameters(self) -> int:
        """Bytes of parameters and buffers that the graph refers to."""
        return self._at_most()["parameters"]

    @property
    def inputs(self) -> int:
        """Bytes of inputs that the graph refers to."""
        return self._at_most()["inputs"]

    @property
    def by_module(self) -> dict[str, int]:
        """Activations by module, in the order in which the modules first saved something."""
        self._at_most()
        return {name: count for name, count in self._modules_most.items() if count}

    def _at_most(self) -> dict[str, int]:
        if self._now["activations"] >= self._most["activations"]:
            self._most, self._modules_most = dict(self._now), dict(self._modules_now)
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

    def _pack(self, tensor: Tensor) -> _Held:
        self._let_go()
        key, size = _storage(tensor)
        entry = self._live.get(key)
        if entry is None:
            kind = self._known.get(key, "activations")
            module = self._running[-1] if self._running else OUTSIDE
            self._live[key] = entry = [0, size, kind, module]
            self._add(kind, module, size)
        entry[0] += 1
        return _Held(tensor, key, self._released)

    @staticmethod
    def _unpack(held: _Held) -> Tensor:
        return held.tensor

    def _let_go(self) -> None:
        """Subtract what the graph has let go since the last tensor was saved."""
        if not self._released:
            return
        self._at_most()
        while self._released:
            key = self._released.popleft()
            entry = self._live[key]
            entry[0] -= 1
            if entry[0] == 0:
                _, size, kind, module = self._live.pop(key)
                self._add(kind, module, -size)

    def _add(self, kind: str, module: str, size: int) -> None:
        self._now[kind] += size
        if kind == "activations":
            self._modules_now[module] = self._modules_now.get(module, 0) + size


def _storage(tensor: Tensor) -> tuple[int, int]:
    """The identity of a tensor's storage, unique while it lives, and its bytes."""
    local = getattr(tensor, "_local_tensor", tensor)  # of a sharded tensor, the part that is here
    try:
        storage = local.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse tensors have several
        return id(tensor), local.element_size() * (local._nnz() if local.is_sparse else local.numel())
    return int(storage._cdata), int(storage.nbytes())
