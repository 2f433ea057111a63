"""Worker processes that die: heard of while a batch is waited for, and told in a sentence."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from runner.config.signals import raising_after

_ADVICE = {
    "SIGKILL": "the system kills processes that take too much memory",
    "SIGBUS": "as happens when the shared memory in /dev/shm is full",
}
_NO_ROOM = {
    errno.EFBIG: "the limit on file sizes (ulimit -f) holds for it as well",
    errno.ENOSPC: "/dev/shm is full",
}
_PATIENCE_S = 2.0
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
def wait_for_batch() -> Iterator[None]:
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


class TimedOut(RuntimeError):
    """Nothing came from the workers in time."""


@contextlib.contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise `TimedOut` if the block takes longer, whatever it waits for.

    torch's own time limit covers an empty queue alone. A tensor arrives as a message, and its memory as a file descriptor
    that a thread of the worker sends over a socket: a worker that was frozen in between would be waited for without end.

    Without effect outside of the main thread, and where a timer of the user's own code runs (`signal.setitimer`).
    """
    main = threading.current_thread() is threading.main_thread()
    if seconds is None or not main or signal.getitimer(signal.ITIMER_REAL)[0]:
        yield
        return

    with raising_after(seconds, lambda: TimedOut(f"nothing came for {seconds:g} s")):
        yield


def describe_failure(iterators: Sequence[Any], error: Exception) -> str:
    """Which worker of some iterators of DataLoaders died, of what, and what to do; empty if none did.

    Args:
        iterators: those of all loaders.
        error: what was raised where a batch was waited for.
    """
    if full := _no_shared_memory(error):
        return full
    # Once an iterator ends its workers, they may have ended with status 0.
    busy = [iterator for iterator in iterators if not getattr(iterator, "_shutdown", True)]
    unasked = {worker for iterator in busy for worker in iterator._workers}
    workers = [pair for iterator in iterators for pair in enumerate(getattr(iterator, "_workers", ()))]
    # A broken connection is seen a moment before the system says that the process at its other end is gone.
    broken = not isinstance(error, RuntimeError) and _FROM_A_WORKER not in str(error)
    deadline = time.monotonic() + (_MOMENT_S if broken else 0)
    while True:
        for number, worker in workers:
            if worker.exitcode or (worker.exitcode == 0 and worker in unasked):
                return _sentence(number, worker.pid, worker.exitcode)
        if time.monotonic() >= deadline:
            return ""
        time.sleep(0.01)


def _no_shared_memory(error: Exception) -> str:
    """The sentence for a worker that could not put a batch into shared memory, or an empty string."""
    text = str(error)
    if _FROM_A_WORKER not in text or "</torch_" not in text:  # how torch names its shared memory
        return ""
    for number, reason in _NO_ROOM.items():
        if os.strerror(number) in text:
            return (
                f"data.num_workers: a worker process cannot put a batch into shared memory: {reason}\n"
                "    allowed: a larger limit, a smaller data.batch_size, or data.num_workers=0, which reads in the main "
                "process"
            )
    return ""


def _sentence(number: int, pid: int, exitcode: int) -> str:
    if exitcode == 0:
        how = "ended with status 0 (the data set or a transform may have called exit())"
    elif exitcode > 0:
        how = f"ended with status {exitcode}"
    else:
        name = next((known.name for known in signal.Signals if known == -exitcode), f"signal {-exitcode}")
        how = f"was killed by {name}" + (f" ({_ADVICE[name]})" if name in _ADVICE else "")
    return (
        f"data.num_workers: worker process {number} (pid {pid}) {how}\n"
        "    allowed: fewer workers, a smaller data.prefetch or data.batch_size, or data.num_workers=0, which reads in the "
        "main process"
    )


def shut_down(iterator: Any) -> None:
    """Ask an iterator's workers to end, and kill those that have not ended soon after.

    torch alone would wait for 5 seconds for each worker that is frozen, and as long again after a SIGTERM.
    """
    if sys.is_finalizing():  # a thread that is started now never runs, and start() would wait for it without end
        kill(iterator)
        iterator._shutdown_workers()
        return
    impatience = threading.Timer(_PATIENCE_S, _send_sigkill, (iterator,))
    impatience.daemon = True
    impatience.start()
    try:
        iterator._shutdown_workers()
    finally:
        impatience.cancel()
        impatience.join()
    kill(iterator)


def kill(iterator: Any) -> None:
    """End what is left of an iterator's workers, whatever they are at."""
    _send_sigkill(iterator)
    for worker in getattr(iterator, "_workers", ()):
        worker.join(_END_S)


def _send_sigkill(iterator: Any) -> None:
    for worker in getattr(iterator, "_workers", ()):
        worker.kill()
