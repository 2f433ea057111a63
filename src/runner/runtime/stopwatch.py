"""The time of a step by named ranges, timed on the host and on a CUDA device, and shown to profilers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

OTHER = "other"
"""The range of everything that is in no other."""


@dataclass
class Step:
    """Seconds of a step by name of the range, each second counted once, in the innermost range."""

    host: dict[str, float] = field(default_factory=dict)  # as the Python thread spent them
    # As the compute stream of a CUDA device spent them, idle time included; empty elsewhere. Work on other streams, as
    # that of the next batch, takes none of this time unless the compute stream waits for it.
    device: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> dict[str, float]:
        """As the device spent them where there is one, else as the host did."""
        return self.device or self.host


class Stopwatch:
    """Times ranges: `with stopwatch("forward"): ...`, and `boundary()` between steps.

    On CUDA an event is recorded on the compute stream wherever a range begins or ends, so nothing waits for the device
    until `steps` is read, and the ranges are visible to Nsight (NVTX). With `annotate` they are visible to
    `torch.profiler` as well.

    Args:
        device: where training runs; its current stream is taken for the compute stream.
    """

    def __init__(self, device: torch.device) -> None:
        self.annotate = False
        self._device = device
        self._cuda = device.type == "cuda"
        self._stream = torch.cuda.current_stream(device) if self._cuda else None
        self._thread = threading.get_ident()
        self._open: list[str] = []
        self._turns: list[tuple[str, float, Any]] = []
        self._boundaries: list[int] = []
        self._step_range: Any = None

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """A context for a range."""
        with torch.profiler.record_function(name) if self.annotate else contextlib.nullcontext():
            # What another thread does at the same time takes none of a step's time.
            if threading.get_ident() != self._thread:
                yield
                return
            # Ranges nest, and each moment counts for the innermost one only
            self._open.append(name)
            self._turn(name)
            try:
                with torch.cuda.nvtx.range(name) if self._cuda else contextlib.nullcontext():
                    yield
            finally:
                self._open.pop()
                self._turn(self._open[-1] if self._open else OTHER)

    def boundary(self, last: bool = False) -> None:
        """A step ends, and the next one begins unless this was the `last`; must be outside of all ranges."""
        assert not self._open, f"a step ended inside the range {self._open[-1]}"
        self._boundaries.append(len(self._turns))
        self._turn(OTHER)
        self._end_step_range()
        if self.annotate and not last:
            self._step_range = torch.profiler.record_function("step")
            self._step_range.__enter__()

    def reset(self) -> None:
        """Forget all steps; the next one begins with the next boundary."""
        self._turns.clear()
        self._boundaries.clear()
        self._end_step_range()

    def steps(self) -> list[Step]:
        """The steps between boundaries; waits for a CUDA device."""
        # Events of the device have times only once it has reached them
        if self._cuda:
            torch.cuda.synchronize(self._device)
        found = []
        for first, last in zip(self._boundaries, self._boundaries[1:], strict=False):
            step = Step()
            for index in range(first, last):
                (name, began, event), (_, ended, next_event) = self._turns[index], self._turns[index + 1]
                step.host[name] = step.host.get(name, 0.0) + ended - began
                if self._cuda:
                    step.device[name] = step.device.get(name, 0.0) + event.elapsed_time(next_event) / 1000
            found.append(step)
        return found

    def _end_step_range(self) -> None:
        if self._step_range is not None:
            self._step_range.__exit__(None, None, None)
            self._step_range = None

    def _turn(self, name: str) -> None:
        event = None
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(self._stream)
        self._turns.append((name, perf_counter(), event))


def waited_for_core() -> float | None:
    """Seconds that the main thread was ready to run while others had the core; None where the system does not count them."""
    try:
        return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


def core_wait(since: tuple[float, float | None]) -> float | None:
    """The share of the time since `(perf_counter(), waited_for_core())` in which other programs had the core; None if unknown."""
    (began, before), now = since, waited_for_core()
    if before is None or now is None:
        return None
    return round(min((now - before) / max(perf_counter() - began, 1e-9), 1.0), 3)
