"""Checkpoints written by a thread, while training goes on."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from runner.checkpoint.structure import identity


class Snapshot:
    """A copy of a checkpoint's contents in the memory of the CPU, in buffers that are used again for the next one.

    Fresh memory for every copy would take longer to be handed out by the system than to be written to.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._later: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._events: list[torch.cuda.Event] = []
        self.complete = threading.Event()

    def take(self, contents: dict[str, Any], later: Callable[[str], bool] = lambda place: False) -> dict[str, Any]:
        """Copy nested containers; the copy is whole after `finish`.

        `later` reports for a tensor on the CPU, by its place such as `/model/head.weight`, whether `finish` may copy it;
        until `complete` is set nobody may change it.
        """
        self.complete.clear()
        self._devices: set[torch.device] = set()
        self._copies: dict[Hashable, torch.Tensor] = {}  # tied tensors are copied once, and stay tied
        copy: dict[str, Any] = mapped(contents, lambda tensor, place: self._copied(tensor, place, later))
        # Copies from a GPU are still under way here: the events tell `finish` when they are complete
        for device in self._devices:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            self._events.append(event)
        return copy

    def finish(self) -> None:
        """Copy what was left for later, and wait for copies from a GPU; may be called in another thread than `take`."""
        try:
            with torch.no_grad():
                for buffer, tensor in self._later:
                    buffer.copy_(tensor)
        finally:
            self._later = []
            self.complete.set()
        for event in self._events:
            event.synchronize()
        self._events = []

    def _copied(self, tensor: torch.Tensor, place: str, later: Callable[[str], bool]) -> torch.Tensor:
        key = identity(tensor)
        if key in self._copies:
            return self._copies[key]
        # Buffers are used for every checkpoint, because pinned memory is slow to allocate
        buffer = self._buffers.get(place)
        made_for = buffer is not None and (buffer.shape, buffer.dtype, buffer.stride())
        if buffer is None or made_for != (tensor.shape, tensor.dtype, tensor.stride()):
            buffer = self._buffers[place] = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        self._copies[key] = buffer
        if tensor.is_cuda:
            self._devices.add(tensor.device)
        # Copying on the CPU would hold up training, so what only the next update changes is left to the thread
        if tensor.device.type == "cpu" and later(place):
            self._later.append((buffer, tensor))
            return buffer
        return buffer.copy_(tensor, non_blocking=tensor.is_cuda)


def mapped(value: Any, copy: Callable[[torch.Tensor, str], Any], place: str = "") -> Any:
    """A copy of a checkpoint's contents with `copy(tensor, place)` instead of each tensor."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return copy(value.detach(), place)
    if kind in (dict, OrderedDict):
        return kind((key, mapped(item, copy, f"{place}/{key}")) for key, item in value.items())
    if kind in (list, tuple):
        return kind(mapped(item, copy, f"{place}/{index}") for index, item in enumerate(value))
    return kind(value) if kind in (set, bytearray, Counter) else value


class AsyncWriter:
    """Does one piece of work at a time in a thread; what goes wrong there is raised where the program next looks."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint writer")
        self._work: Future[None] | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Begin with a piece of work, once the one before has ended; raises what that one raised."""
        self.wait()
        self._work = self._thread.submit(work)

    def check(self) -> None:
        """Raise what the last piece of work raised, if it has ended; never waits."""
        if self._work is not None and self._work.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the work to end; raises what it raised, once."""
        if self._work is not None:
            futures.wait([self._work])
            work, self._work = self._work, None
            work.result()

    def close(self) -> None:
        """End the thread, once its work has ended."""
        self._thread.shutdown()
