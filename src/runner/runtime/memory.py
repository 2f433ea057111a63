"""How much memory training takes: at most on a device, and what the graph keeps for backward."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor, nn

OUTSIDE = "(outside the model)"
"""Where `SavedTensors.by_module` counts what is saved while no module of the model runs, such as the loss's."""


class Peak(NamedTuple):
    """The most memory in use at one time.

    Attributes:
        bytes: how much.
        what: what was counted, for people.
    """

    bytes: int
    what: str


def readable(size: int) -> str:
    """A number of bytes for people, such as `239.4 MiB`."""
    number, unit = float(max(0, size)), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if number < 1024 or unit == "TiB":
            break
        number /= 1024
    return f"{number:,.1f}".removesuffix(".0") + f" {unit}"


def peak_memory(device: torch.device) -> Peak:
    """The most memory that this process has used on a device, since `reset_peak_memory` where that is possible.

    On CUDA these are the bytes of tensors, as torch's allocator counts them; on the CPU it is the resident memory of
    the whole process, libraries included; elsewhere what the driver holds now, as no peak is known. Does not wait for
    the device.
    """
    if device.type == "cuda":
        return Peak(torch.cuda.max_memory_allocated(device), f"most allocated for tensors on {device}")
    if device.type == "mps":
        return Peak(torch.mps.driver_allocated_memory(), "held by the driver of mps now")
    return Peak(_peak_resident(), "most resident memory of the process")


def memory_in_use(device: torch.device) -> int:
    """Bytes in use now, counted as `peak_memory` counts them: the peak minus this is what came on top."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    return int(psutil.Process().memory_info().rss)


def reset_peak_memory(device: torch.device) -> bool:
    """Let `peak_memory` start anew.

    On the CPU, memory that was freed but kept for later allocations is handed back first, as far as the C library can,
    so that one measurement is not hidden by the last.

    Returns:
        Whether the peak was reset; where it was not, `peak_memory` is that of the whole life of the process.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    if device.type != "cpu" or not sys.platform.startswith("linux"):
        return False
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)
    try:
        # Documented in proc(5): 5 resets the peak of the resident set to what it is now.
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


@contextlib.contextmanager
def memory_history(path: Path, most: int = 200_000) -> Iterator[bool]:
    """Record what CUDA's allocator does in the block, with stacks, into a snapshot for https://pytorch.org/memory_viz.

    Args:
        path: file that is written when the block has ended well; a pickle, as torch makes it.
        most: allocations to remember.

    Yields:
        Whether this torch can record.
    """
    record: Any = getattr(torch.cuda.memory, "_record_memory_history", None)
    dump: Any = getattr(torch.cuda.memory, "_dump_snapshot", None)
    if record is None or dump is None:
        yield False
        return
    record(max_entries=most)
    try:
        yield True
        dump(str(path))
    finally:
        record(enabled=None)


def _peak_resident() -> int:
    try:
        status = Path("/proc/self/status").read_bytes()
        start = status.index(b"VmHWM:") + 6
        return int(status[start : status.index(b"kB", start)]) * 1024
    except (OSError, ValueError):
        pass
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


class _Held:
    """A saved tensor in the hands of the graph; tells when the graph lets it go."""

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
        model: whose parameters, inputs and modules are told apart; without one, all but `inputs` are activations.
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
        self._hooks: list[Any] = []
        self._context: Any = None

    def __enter__(self) -> SavedTensors:
        self._known = {_storage(tensor)[0]: "inputs" for tensor in self._given}
        if self._model is not None:
            for tensor in (*self._model.parameters(), *self._model.buffers()):
                self._known[_storage(tensor)[0]] = "parameters"
            self._hooks.append(self._model.register_forward_pre_hook(self._note_inputs, with_kwargs=True))
            self._hooks.append(self._model.register_forward_hook(self._forget_inputs, always_call=True))
            for name, module in self._model.named_modules():
                self._hooks.append(module.register_forward_pre_hook(self._entering(name), prepend=True))
                # Also called when recomputing a checkpointed region stops early, by an exception.
                self._hooks.append(module.register_forward_hook(self._left, always_call=True))
        self._context = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        self._context.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._context.__exit__(kind, error, traceback)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
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

    def _note_inputs(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and (key := _storage(value)[0]) not in self._known:
                self._known[key] = "inputs"
                self._noted.append(key)

    def _forget_inputs(self, module: nn.Module, args: Any, result: Any) -> None:
        # Once the caller frees them, their place in memory may be given to an activation.
        for key in self._noted:
            self._known.pop(key, None)
        self._noted.clear()

    def _entering(self, name: str) -> Any:
        running = self._running

        def enter(module: nn.Module, args: Any) -> None:
            running.append(name)

        return enter

    def _left(self, module: nn.Module, args: Any, result: Any) -> None:
        if self._running:
            self._running.pop()

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
    """What tells a tensor's storage from all others as long as it lives, and its bytes."""
    local = getattr(tensor, "_local_tensor", tensor)  # of a sharded tensor, the part that is here
    try:
        storage = local.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse tensors have several
        return id(tensor), local.element_size() * (local._nnz() if local.is_sparse else local.numel())
    return int(storage._cdata), int(storage.nbytes())
