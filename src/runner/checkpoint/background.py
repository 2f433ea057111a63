"""Checkpoints written by a thread, while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch


class Snapshot:
    """A copy of a checkpoint's contents in the memory of the CPU, in buffers that are used again for the next one.

    Fresh memory for every copy would take longer to be handed out by the system than to be written to.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._later: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._event: torch.cuda.Event | None = None
        self.complete = threading.Event()

    def take(self, contents: dict[str, Any], later: Callable[[str], bool] = lambda place: False) -> dict[str, Any]:
        """Copy tensors and containers; the copy is whole after `finish`.

        Args:
            contents: nested containers.
            later: tells of a tensor on the CPU, by its place such as `/model/head.weight`, whether `finish` may copy it;
                until `complete` is set nobody may change it.
        """
        self.complete.clear()
        self._later = []
        copy: dict[str, Any] = self._copied(contents, "", later)
        if any(buffer.is_pinned() for buffer in self._buffers.values()) and torch.cuda.is_available():
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
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
        if self._event is not None:
            self._event.synchronize()
            self._event = None

    def _copied(self, value: Any, place: str, later: Callable[[str], bool]) -> Any:
        if isinstance(value, torch.Tensor):
            return self._copied_tensor(value.detach(), place, later)
        if isinstance(value, dict):
            return {key: self._copied(item, f"{place}/{key}", later) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._copied(item, f"{place}/{index}", later) for index, item in enumerate(value))
        return value

    def _copied_tensor(self, tensor: torch.Tensor, place: str, later: Callable[[str], bool]) -> torch.Tensor:
        buffer = self._buffers.get(place)
        if buffer is None or (buffer.shape, buffer.dtype, buffer.stride()) != (
            tensor.shape,
            tensor.dtype,
            tensor.stride(),
        ):
            buffer = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
            self._buffers[place] = buffer
        if tensor.device.type == "cpu" and later(place):
            self._later.append((buffer, tensor))
            return buffer
        return buffer.copy_(tensor, non_blocking=tensor.is_cuda)


class Background:
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
