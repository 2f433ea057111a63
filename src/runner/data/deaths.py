"""Worker processes that die: heard of while a batch is waited for, and told in a sentence."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

_ADVICE = {
    "SIGKILL": "the system kills processes that take too much memory",
    "SIGBUS": "as happens when the shared memory in /dev/shm is full",
}
_END_S = 5.0
_MOMENT_S = 10.0
_FROM_A_WORKER = "in DataLoader worker process"
_OF_TORCH = "torch.utils.data._utils.signal_handling"


class _Listener:
    """Stands in for torch's handler of SIGCHLD, which raises wherever the main process is when a worker dies.

    In the middle of a step that would leave half of it done, and in some places, such as a callback of the garbage collector,
    what is raised is lost. So it is put off until the next batch is asked for; while one is waited for, torch's loader
    looks every five seconds whether its workers live.
    """

    def __init__(self, handler: Any, before: Any) -> None:
        self._handler, self._before = handler, before
        self._missed = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._missed = True
        if callable(self._before):
            self._before(number, frame)

    def catch_up(self) -> None:
        """Raise now for a worker that died meanwhile."""
        if self._missed:
            self._missed = False
            self._handler(signal.SIGCHLD, None)


@contextlib.contextmanager
def awaited() -> Iterator[None]:
    """Wait for workers, or start them: a RuntimeError is raised if one is dead or dies meanwhile."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGCHLD)
    try:
        if isinstance(before, _Listener):
            before.catch_up()
        yield
    finally:
        if not isinstance(before, _Listener):
            handler = signal.getsignal(signal.SIGCHLD)
            if getattr(handler, "__module__", "") == _OF_TORCH:
                signal.signal(signal.SIGCHLD, _Listener(handler, None if handler is before else before))


def told(iterators: Sequence[Any], error: Exception) -> str:
    """Which worker of some iterators of DataLoaders died, of what, and what to do; empty if none did.

    Args:
        iterators: those of all loaders.
        error: what was raised where a batch was waited for.
    """
    workers = [pair for iterator in iterators for pair in enumerate(getattr(iterator, "_workers", ()))]
    # A broken connection is seen a moment before the system says that the process at its other end is gone.
    broken = not isinstance(error, RuntimeError) and _FROM_A_WORKER not in str(error)
    deadline = time.monotonic() + (_MOMENT_S if broken else 0)
    while True:
        for number, worker in workers:
            if worker.exitcode:
                return _sentence(number, worker.pid, worker.exitcode)
        if time.monotonic() >= deadline:
            return ""
        time.sleep(0.01)


def _sentence(number: int, pid: int, exitcode: int) -> str:
    if exitcode > 0:
        how = f"ended with status {exitcode}"
    else:
        name = next((known.name for known in signal.Signals if known == -exitcode), f"signal {-exitcode}")
        how = f"was killed by {name}" + (f" ({_ADVICE[name]})" if name in _ADVICE else "")
    return (
        f"data.num_workers: worker process {number} (pid {pid}) {how}\n"
        "    allowed: fewer workers, a smaller data.prefetch or data.batch_size, or data.num_workers=0, which reads in the "
        "main process"
    )


def kill(iterator: Any) -> None:
    """End what is left of an iterator's workers, whatever they are at."""
    workers = getattr(iterator, "_workers", ())
    for worker in workers:
        if worker.is_alive():
            worker.kill()
    for worker in workers:
        worker.join(_END_S)
