"""Worker processes that die or hang: noticed while a batch is waited for, and reported in a sentence.

Uses private attributes of torch's DataLoader iterators (`_workers`, `_shutdown`, `_shutdown_workers`), nowhere else used;
tests/data/test_worker_failures.py notices a change.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from runner.base.signals import raising_after

_ADVICE = {
    "SIGKILL": " (the system kills processes that take too much memory)",
    "SIGBUS": " (as happens when the shared memory in /dev/shm is full)",
}
_PATIENCE_S = 2.0
_END_S = 5.0
_LOOKS = 1000
_IN_MAIN = "data.num_workers=0, which reads in the main process"
_FROM_A_WORKER = "in DataLoader worker process"
_OF_TORCH = "torch.utils.data._utils.signal_handling"


class _Listener:
    """Replaces torch's handler of SIGCHLD, which raises wherever the main process is when a worker dies.

    That would leave a step half done, and an exception raised in a callback of the garbage collector is lost. So it is
    deferred until the next batch is requested; while one is waited for, torch's loader checks its workers every five seconds.
    """

    def __init__(self, handler: Any, before: Any) -> None:
        self._handler, self._before = handler, before
        self._missed = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._missed = True
        if callable(self._before):
            self._before(number, frame)

    def catch_up(self) -> None:
        """Raise now for a worker that died in the meantime."""
        if self._missed:
            self._missed = False
            self._handler(signal.SIGCHLD, None)


class TimedOut(RuntimeError):
    """No batch came from the workers in time."""


@contextlib.contextmanager
def wait_for_batch(seconds: float | None) -> Iterator[None]:
    """Wait for workers, or start them, outside of the main thread without any of these checks.

    Raises RuntimeError if one is dead or dies in the meantime, and `TimedOut` after so many seconds, whatever is waited for:
    torch's own timeout covers an empty queue only. A tensor arrives as a message, and its memory as a file descriptor that a
    thread of the worker sends over a socket: a worker that is frozen in between would be waited for forever. There is no
    limit while user code runs a timer (`signal.setitimer`).
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Torch installs its handler when the first workers start, which happens inside of this block.
    before = signal.getsignal(signal.SIGCHLD)
    limit: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    # The user's own timer must not be replaced
    if seconds is not None and not signal.getitimer(signal.ITIMER_REAL)[0]:
        limit = raising_after(seconds, lambda: TimedOut(f"no data for {seconds:g} s"))
    try:
        if isinstance(before, _Listener):
            before.catch_up()
        with limit:
            yield
    finally:
        # The handler of torch would raise anywhere in the main process, see `_Listener`
        handler = signal.getsignal(signal.SIGCHLD)
        if not isinstance(before, _Listener) and getattr(handler, "__module__", "") == _OF_TORCH:
            signal.signal(signal.SIGCHLD, _Listener(handler, None if handler is before else before))


def describe_failure(iterators: Sequence[Any], error: Exception) -> tuple[str, str] | None:
    """The failure of a worker of any loader's iterator, and what is allowed; None if all are well.

    `error` is what was raised while a batch was waited for.
    """
    text = str(error)
    # The usual failure in containers has advice of its own
    if _FROM_A_WORKER in text and "</torch_" in text:  # how torch names its shared memory
        problem = f"a worker process cannot put a batch into shared memory: {text.strip().rpartition('Error: ')[2]}"
        return problem, f"more space in /dev/shm, a smaller data.batch_size, or {_IN_MAIN}"
    # Once an iterator ends its workers, they may have ended with status 0.
    workers = [
        (number, worker, not getattr(iterator, "_shutdown", True))
        for iterator in iterators
        for number, worker in enumerate(getattr(iterator, "_workers", ()))
    ]
    # A broken connection is seen a moment before the system reports that the process at its other end is gone.
    broken = not isinstance(error, RuntimeError) and _FROM_A_WORKER not in text
    for _ in range(_LOOKS if broken else 1):
        for number, worker, busy in workers:
            if worker.exitcode or (worker.exitcode == 0 and busy):
                problem = f"worker process {number} (pid {worker.pid}) {_how_it_ended(worker.exitcode)}"
                return problem, f"fewer workers, a smaller data.prefetch or data.batch_size, or {_IN_MAIN}"
        time.sleep(0.01)
    return None


def _how_it_ended(exitcode: int) -> str:
    if exitcode == 0:
        return "ended with status 0 (the data set or a transform may have called exit())"
    if exitcode > 0:
        return f"ended with status {exitcode}"
    # Real-time signals have a number alone
    name = signal.Signals(-exitcode).name if -exitcode in set(signal.Signals) else f"signal {-exitcode}"
    return f"was killed by {name}{_ADVICE.get(name, '')}"


def shut_down(iterator: Any) -> None:
    """Ask an iterator's workers to end, and kill those that do not end soon.

    torch alone would wait 5 seconds for each frozen worker, and as long again after a SIGTERM.
    """
    if not hasattr(iterator, "_workers"):  # it reads in this process, or there is none
        return
    if sys.is_finalizing():  # a thread started now never runs, and start() would wait for it forever
        kill(iterator)
        iterator._shutdown_workers()
        return
    # A worker that hangs in a read would block the end of the run
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
    """Kill what is left of an iterator's workers."""
    _send_sigkill(iterator)
    for worker in getattr(iterator, "_workers", ()):
        worker.join(_END_S)


def _send_sigkill(iterator: Any) -> None:
    for worker in getattr(iterator, "_workers", ()):
        worker.kill()
