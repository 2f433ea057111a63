"""The signals that ask a run to stop."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

WARNINGS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""The signals that schedulers send some time before they end a job."""
STOPPING = (*WARNINGS, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU)
"""All that ask a run to stop."""
heard: list[str] = []
"""Names of the signals that asked this process to stop, since its verb started."""
early: list[str] = []
"""Those that came before a run listened to them, until it does."""
interrupts: list[int] = []
"""Ctrl-C, while the code in `interruptible` runs: what it raises may be swallowed, as by an import that may fail."""


_LEFT_IGNORED = ("SIGHUP", "SIGQUIT", "SIGXCPU")
"""These stay ignored if they were when the process started, as nohup and shells do it."""


@contextlib.contextmanager
def listening(
    note: Callable[[int, FrameType | None], None], numbers: Sequence[signal.Signals] = STOPPING
) -> Iterator[None]:
    """Call `note` for signals. Outside the main thread, where Python allows no handlers, nothing is done."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            if number.name not in _LEFT_IGNORED or signal.getsignal(number) != signal.SIG_IGN:
                before[number] = signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """After Ctrl-C, raise `KeyboardInterrupt` whatever the code inside raises: OmegaConf, broken off, raises something else."""

    def note(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        # Compiled code that is being imported may print what Python raises, drop it, or, as torch does, abort the process
        if any(caller.f_code.co_filename.startswith("<frozen importlib") for caller, _ in traceback.walk_stack(frame)):
            os.write(2, b"interrupted\n")
            os._exit(128 + number)
        signal.default_int_handler(number, frame)

    # Only Python's own handler is replaced: a shell ignores the signal for jobs in the background, and that stays so.
    noted = threading.current_thread() is threading.main_thread()
    noted = noted and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if noted:
        interrupts.clear()
        signal.signal(signal.SIGINT, note)
    try:
        yield
    except Exception as error:
        if not interrupts:
            raise
        raise KeyboardInterrupt from error
    finally:
        if noted:
            interrupts.clear()
            signal.signal(signal.SIGINT, signal.default_int_handler)
