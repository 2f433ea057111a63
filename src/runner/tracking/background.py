"""What a run calls to log metrics, and loggers that work in a thread: a slow or dead receiver neither blocks nor ends a run."""

# Not as strings, `annotations`: subclasses in other modules have these fields, too.

import importlib
import os
import queue
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

from runner.base.secrets import mask_text
from runner.tracking.formats import amount, clean

_MOST_WAITING, _MOST_SENT = 10_000, 500  # rows in the queue, and passed on together
_GROUPED_S = 1.0
_LONGEST_PAUSE_S = 60.0  # between attempts that fail
_IMPORTS = threading.RLock()
# A process that is forked during an import would wait for ever once it imports the same module.
os.register_at_fork(before=_IMPORTS.acquire, after_in_parent=_IMPORTS.release, after_in_child=_IMPORTS.release)


class Row(NamedTuple):
    """Metrics of one split, as they were logged."""

    split: str
    metrics: dict[str, Any]
    global_step: int
    epoch: int
    time: float  # in seconds since 1970


class Logger(Protocol):
    """Receives metrics, on the main process only, in the order of steps; ours inherit the methods that have nothing to do."""

    def open(self, directory: Path, resume_step: int | None) -> None:
        """Start to write into `directory`.

        Args:
            directory: the run directory; exists.
            resume_step: the `global_step` from which a run continues in this directory; None for a new run. What was logged
                for later steps is removed. Of this step itself, the lines that are in `metrics.jsonl` stay; the others
                will be logged again.
        """
        ...

    def log(self, split: str, metrics: dict[str, float], global_step: int, epoch: int) -> None:
        """Record the metrics of one split, such as `train` or `val`, after `global_step` optimizer steps."""
        return

    def flush(self) -> None:
        """Make everything logged so far survive the end of the process; called before each checkpoint."""
        return

    def close(self) -> None:
        """Finish; nothing is logged afterwards. May be called twice, and without `open`."""
        return


class MetricsBuffer:
    """Passes metrics on to each sink in groups if training logs more often than once a second.

    Formatting and writing one line between two small steps takes several times as long as one of many in a row, which adds
    up if a step takes less than a millisecond. Metrics of other splits than `train` are passed on at once, along with
    everything that waits. If the process is killed, what waited is younger than the last checkpoint, so a resumed run logs
    it again. A sink is called as `Logger.log` is.
    """

    def __init__(self, sinks: Sequence[Callable[[str, dict[str, float], int, int], None]]) -> None:
        self._sinks = list(sinks)
        self._waiting: list[tuple[str, dict[str, float], int, int]] = []
        self._emptied = float("-inf")

    def __call__(self, split: str, metrics: dict[str, float], global_step: int, epoch: int) -> None:
        """Add metrics, which must not be changed afterwards."""
        self._waiting.append((split, metrics, global_step, epoch))
        if split != "train" or time.monotonic() - self._emptied >= _GROUPED_S:
            self.empty()

    def empty(self) -> None:
        """Pass on everything that waits; called before every checkpoint and at the end."""
        waiting, self._waiting = self._waiting, []
        for sink in self._sinks:
            for metrics in waiting:
                sink(*metrics)
        self._emptied = time.monotonic()


@dataclass(kw_only=True, eq=False)
class Background(Logger):
    """Base of loggers that pass rows to a thread; see `Logger` for what a run calls.

    A row is dropped if the queue is full, or if sending it fails. The first failure is a warning of the run, and when the run
    ends, another one counts the rows that did not arrive. `metrics.jsonl` has all of them.
    """

    wait_s: float = 30.0
    warn: Callable[[str], object] = print
    name: ClassVar[str]
    period_s: ClassVar[float] = 2.0  # between two batches of rows, as Python does not train while the thread computes
    address: str = field(init=False)  # of the receiver, without secrets
    modules: Sequence[str] = field(init=False)  # that the thread imports first, as that may take seconds
    at_once: ClassVar[bool] = True  # whether to connect before there is a row
    connect: ClassVar[Callable[..., None]]  # called until it succeeds
    send: ClassVar[Callable[..., None]]  # a list of rows
    end: ClassVar[Callable[..., None]]  # how the run ended
    rest: str = field(init=False, default="")  # how to send the rest, for people

    def __post_init__(self) -> None:
        self._rows, self._wake = queue.Queue[Row](_MOST_WAITING), threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"runner-{self.name}", daemon=True)
        self._logged = self._arrived = 0
        self._trouble, self._warned, self._ended, self._complete = "", False, False, False

    def open(self, directory: Path, resume_step: int | None) -> None:
        """Start the thread."""
        self.directory, self.resume_step = directory, resume_step
        self._thread.start()

    def log(self, split: str, metrics: dict[str, Any], global_step: int, epoch: int) -> None:
        """Pass a row to the thread, or drop it; warn once if there is a reason."""
        self._logged += 1
        try:
            self._rows.put_nowait(Row(split, metrics, global_step, epoch, time.time()))
        except queue.Full:
            self._trouble = self._trouble or f"{self.address}: {_MOST_WAITING:,} rows wait, and more are dropped"
        if self._trouble and not self._warned:
            self._warned = True
            self.warn(f"{self.name}: {self._trouble}; the run goes on, and metrics.jsonl has every row")

    def finish(self) -> None:
        """The run has ended, and its summary says how: wait a little for the thread, and say what is missing."""
        if self._ended or self._thread.ident is None:
            return
        self._ended = True
        self._wake.set()
        self._thread.join(self.wait_s)
        if self._complete and not self._thread.is_alive():
            return
        reason = f"{self.address}: not everything was sent within {self.wait_s:g} s"
        reason = reason if self._thread.is_alive() else self._trouble
        missing = self._logged - self._arrived
        lost = f"{missing:,} of {amount(self._logged, 'row')}" if missing else "the end of the run"
        self.warn(f"{self.name}: {lost} did not arrive ({reason}){self.rest}; metrics.jsonl has every row")

    def _work(self) -> None:
        """The thread: connect, and send what there is every few seconds, until the run has ended."""
        pause, connected, ended = 0.0, False, False
        while not ended:
            self._wake.wait(pause)
            self._wake.clear()
            ended = self._ended
            try:
                if not connected and (self.at_once or not self._rows.empty()):
                    with _IMPORTS:
                        for module in self.modules:
                            importlib.import_module(module)
                    self.connect()
                    connected = True
                # Only this thread takes rows
                while rows := [self._rows.get() for _ in range(min(_MOST_SENT, self._rows.qsize()))]:
                    self.send(rows)
                    self._arrived += len(rows)
                if ended and connected:
                    self.end()
                self._complete = self._arrived == self._logged
                pause = self.period_s
            except (Exception, SystemExit) as error:
                self._complete, self._trouble = False, sentence_of(error, self.address)
                pause = min(max(2 * pause, self.period_s), _LONGEST_PAUSE_S)


def sentence_of(error: BaseException, address: str) -> str:
    """The innermost message of an error, on one line, without secrets; clients wrap that of the system several times."""
    deepest = error
    while (inner := deepest.__cause__ or deepest.__context__) is not None:
        deepest = inner
    system = (deepest.strerror or str(deepest)).lower() if isinstance(deepest, OSError) else ""
    text = clean(mask_text(f"{address}: {system or str(error) or type(error).__name__}"))
    return textwrap.shorten(text.strip().removesuffix("."), 300, placeholder=" ...")
