"""Checkpoints written by a thread, while training goes on."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
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
        """Copy tensors and containers; the copy is whole after `finish`.

        Args:
            contents: nested containers.
            later: reports for a tensor on the CPU, by its place such as `/model/head.weight`, whether `finish` may copy it;
                until `complete` is set nobody may change it.
        """
        self.complete.clear()
        self._later = []
        self._devices: set[torch.device] = set()
        self._copies: dict[Hashable, torch.Tensor] = {}  # tied tensors are copied once, and stay tied
        copy: dict[str, Any] = self._copied(contents, "", later)
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

    def _copied(self, value: Any, place: str, later: Callable[[str], bool]) -> Any:
        if isinstance(value, torch.Tensor):
            return self._copied_tensor(value.detach(), place, later)
        return mapped(value, lambda item, key: self._copied(item, f"{place}/{key}", later))

    def _copied_tensor(self, tensor: torch.Tensor, place: str, later: Callable[[str], bool]) -> torch.Tensor:
        key = identity(tensor)
        if key in self._copies:
            return self._copies[key]
        buffer = self._buffers.get(place)
        if buffer is None or (buffer.shape, buffer.dtype, buffer.stride()) != (
            tensor.shape,
            tensor.dtype,
            tensor.stride(),
        ):
            buffer = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            self._buffers[place] = buffer
        self._copies[key] = buffer
        if tensor.is_cuda:
            self._devices.add(tensor.device)
        if tensor.device.type == "cpu" and later(place):
            self._later.append((buffer, tensor))
            return buffer
        return buffer.copy_(tensor, non_blocking=tensor.is_cuda)


def mapped(value: Any, item: Callable[[Any, Any], Any]) -> Any:
    """A container of a checkpoint with `item(element, key)` instead of each element; anything else as it is."""
    kind = type(value)
    if kind in (dict, OrderedDict, Counter):
        return (
            kind((key, item(element, key)) for key, element in value.items()) if kind is not Counter else Counter(value)
        )
    if kind in (list, tuple):
        return kind(item(element, index) for index, element in enumerate(value))
    return kind(value) if kind in (set, bytearray) else value


class AsyncWriter:
    """Does one piece of work at a time in a thread; what goes wrong there is raised where the program next looks."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Begin with a piece of work, once the one before has ended.

        Raises:
            Exception: what the one before raised.
        """
        self.wait()
        self._thread = threading.Thread(target=self._do, args=(work,), name="checkpoint writer")
        self._thread.start()

    def check(self) -> None:
        """Raise what the last piece of work raised, if it has ended; never waits."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait for the work to end.

        Raises:
            Exception: what it raised.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error
