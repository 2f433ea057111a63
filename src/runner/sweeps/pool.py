"""Jobs of a sweep side by side on one machine: slots with devices and threads, and a process with a log for each job.

    with Pool(slots_of(["0", "1"], per_device=2), common) as pool:
        for all_ended in pool.run(start_next):  # which calls `pool.start`, and returns whether there was another job
            ...

A job is forked from a server process (`runner.verbs._job_server`) that has imported torch, which takes seconds, and has
computed nothing. It runs one job of the sweep through the ledger, as any launcher does, so that it skips what has finished.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from runner.config.errors import FAILED, PREEMPTED
from runner.config.signals import STOPPING, early, heard

LOGS = "logs"
"""Folder of the sweep that gets what each job prints, `<number>.log`."""
PATIENT = "RUNNER_POOL_JOB"
"""Variable that a job has: only the launcher decides that a second signal ends it at once."""
_LEFT_IGNORED = ("SIGHUP", "SIGQUIT", "SIGXCPU")  # by nohup and shells
_SAME_S = 1.0
_ENDED_S = 10.0
_UNWRITTEN = 120  # of a Python that could not write what it printed


@dataclass(frozen=True)
class Slot:
    """A place for one job: what is leased to it."""

    name: str  # for people, such as `GPU 1`
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Common:
    """What the jobs of a sweep have in common.

    Attributes:
        folder: of the sweep.
        words: overrides of `hydra.*`.
        verb: of the command line.
        primary: name of the primary config.
        sources: folders of configs beside the shipped ones.
        environment: variables that are set before the server process imports torch.
    """

    folder: Path
    words: Sequence[str] = ()
    verb: str = "train"
    primary: str = "train"
    sources: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """How the process of a job ended; its run may have failed with status 0, see `runner.sweeps.ledger.outcome`.

    Attributes:
        number: of the job.
        value: what the job returned, the value that sweepers optimise.
        sentence: why the process could not say itself how the job ended; empty if it could.
    """

    number: int
    value: float | None = None
    sentence: str = ""


@dataclass
class _Process:
    """The process of a job: it holds its slot until whatever it started is gone too, which may be after the job's end."""

    number: int  # of the job; one that is repeated at once has two processes for a moment
    slot: Slot
    value: float | None = None
    ended: bool = False


def slots_of(devices: Sequence[str], per_device: int) -> list[Slot]:
    """Slots for jobs.

    Args:
        devices: numbers of GPUs among those that this process sees, or `cpu`.
        per_device: how many jobs share one.
    """
    visible = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    slots = list[Slot]()
    for _ in range(per_device):  # neighbours are filled last
        for device in devices:
            own = "" if device == "cpu" else visible[int(device)] if visible else device
            name = f"CPU {len(slots)}" if device == "cpu" else f"GPU {device}"
            slots.append(Slot(name, {"CUDA_VISIBLE_DEVICES": own}))
    return slots


class Pool:
    """Runs jobs in slots. While entered, the signals of `STOPPING` go on to all jobs; a second one kills them.

    The jobs end with this process, however it ends: they are asked to save, and to stop.
    """

    def __init__(self, slots: Iterable[Slot], common: Common) -> None:
        self.common = common
        self.asked = ""  # name of the signal that asked this process to stop
        self._insists_from = 0.0
        self._free = list(slots)
        self._processes: dict[int, _Process] = {}  # those that hold a slot, in the order of their start
        self._started = 0
        self._server: int | None = None  # its process
        self._process: subprocess.Popen[bytes] | None = None  # the same, if it is not a copy of this one
        self._requests, self._said = -1, -1  # pipes to it, and from it
        self._unread = b""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Pool:
        if threading.current_thread() is threading.main_thread():
            self.asked = early.pop() if early else ""
            for number in STOPPING:
                if number.name not in _LEFT_IGNORED or signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, lambda number, _: self.stop(number))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        finally:
            for number, handler in self._before.items():
                signal.signal(number, handler)
            self._before.clear()

    @property
    def free(self) -> int:
        """How many slots are free and ready: no process of an earlier job is left there."""
        return 0 if self.asked else len(self._free)

    @property
    def running(self) -> list[int]:
        """Numbers of the jobs that have not ended."""
        return [each.number for each in self._processes.values() if not each.ended]

    def run(self, start_next: Callable[[], bool], period_s: float | None = None) -> Iterator[list[Ended]]:
        """Start jobs as slots become free, until there is no other one and all have ended, or a signal asked to stop.

        Args:
            start_next: starts a job, and returns whether there was one.
            period_s: how long to wait for something to happen; None for ever.

        Yields:
            The jobs that have just ended, which may be none.
        """
        while True:
            while self.free and start_next():
                pass
            if not self.running and (self.free or self.asked):
                return  # otherwise the last jobs have ended, and their processes have not yet left their slots
            yield self._ended(period_s)

    def start(self, number: int, words: Sequence[str], environment: Mapping[str, str] | None = None) -> Slot:
        """Start a job in a free slot, and return the slot.

        Args:
            number: tells the jobs of the sweep apart; `hydra.job.num`, and the name of its folder unless the ledger has another.
            words: its overrides.
            environment: variables for it alone.
        """
        slot = self._free.pop(0)
        self._started += 1
        self._processes[self._started] = _Process(number, slot)
        log = self.common.folder.absolute() / LOGS / f"{number}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        own = {**slot.environment, **(environment or {}), PATIENT: "1"}
        folder = str(self.common.folder).replace("\\", "\\\\").replace("'", "\\'")
        all_words = [*self.common.words, *words, f"hydra.sweep.dir='{folder}'"]
        request = {"number": number, "words": all_words, "environment": own, "log": str(log)}
        self._tell({"process": self._started, **request})
        if self.asked:  # while the server was being started
            self._tell({"signal": signal.SIGTERM})
        return slot

    def _ended(self, timeout: float | None) -> list[Ended]:
        """Wait until the server says something; the jobs that have ended, which may be none.

        Raises:
            SystemExit: if the server process was killed, and the jobs with it.
        """
        if not select.select([self._said], [], [], timeout)[0]:
            return []
        content = os.read(self._said, 2**16)
        if not content:
            print("error: the process that starts jobs was killed; repeat the same command to continue", flush=True)
            raise SystemExit(FAILED)
        *lines, self._unread = (self._unread + content).split(b"\n")
        return [found for line in lines if (found := self._take(json.loads(line)))]

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Ask all jobs to save and to end, and start no other one; a call after more than a second kills them."""
        heard.append(signal.Signals(number).name)
        again = bool(self.asked) and time.monotonic() > self._insists_from
        if not self.asked:  # `timeout` and schedulers send a signal to a process and to its group
            self._insists_from = time.monotonic() + _SAME_S
        self.asked = self.asked or heard[-1]
        self._tell({"signal": signal.SIGKILL if again else signal.SIGTERM})

    def close(self) -> None:
        """End the jobs that are left, and the server process."""
        if self._server is None:
            return
        requests, self._requests = self._requests, -1
        os.close(requests)  # the server asks its jobs to stop, and waits for them
        until = time.monotonic() + (math.inf if self.running else _ENDED_S)
        while not os.waitpid(self._server, os.WNOHANG)[0]:
            if time.monotonic() > until:
                os.kill(self._server, signal.SIGKILL)
            time.sleep(0.01)
        if self._process is not None:
            self._process.returncode = 0
        os.close(self._said)
        self._server = self._process = None

    def _tell(self, request: dict[str, Any]) -> None:
        """Write a request to the server, which the first job starts."""
        if self._server is None and "number" not in request:
            return
        if self._server is None:
            self._serve()
            self._tell({**asdict(self.common), "number": None, "folder": str(self.common.folder), "path": sys.path})
        with contextlib.suppress(OSError):  # the server is gone, and `run` says so
            os.write(self._requests, json.dumps(request).encode() + b"\n")

    def _serve(self) -> None:
        """Start the server: as a copy of this process if that has torch and no threads, which saves seconds of imports."""
        theirs, self._requests = os.pipe()
        self._said, says = os.pipe()
        if "torch" in sys.modules and not self.common.environment and _is_single():
            server: Any = importlib.import_module("runner.verbs._job_server")
            sys.stdout.flush()
            sys.stderr.flush()
            before = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # the server never takes them
            self._server = os.fork()
            if not self._server:
                os.close(self._requests)
                os.close(self._said)
                server.main(theirs, says)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        else:
            command = [sys.executable, "-m", "runner.verbs._job_server", str(theirs), str(says)]
            environment = {**os.environ, **self.common.environment}
            self._process = subprocess.Popen(
                command, pass_fds=(theirs, says), start_new_session=True, env=environment, stdin=subprocess.DEVNULL
            )
            self._server = self._process.pid
        os.close(theirs)
        os.close(says)

    def _take(self, said: dict[str, Any]) -> Ended | None:
        """Take what the server or a job says; returns how the job ended, if it has."""
        process = self._processes[said["process"]]
        if "value" in said:
            process.value = said["value"]
        elif "gone" in said:
            self._free.append(self._processes.pop(said["process"]).slot)
        else:
            process.ended = True
            return Ended(process.number, process.value, _sentence(said["status"]))
        return None


def _is_single() -> bool:
    """Whether this process has one thread only, as far as the system tells."""
    try:
        return len(os.listdir("/proc/self/task")) == 1  # noqa: PTH208
    except OSError:
        return False


def _sentence(status: int) -> str:
    """Why a process could not say how its job ended."""
    if status in (0, PREEMPTED):
        return ""
    if status > 0:
        unwritten = ": its log cannot be written: perhaps the disk is full" if status == _UNWRITTEN else ""
        return f"its process ended with status {status}{unwritten}"
    name = signal.Signals(-status).name
    reason = {"SIGKILL": ": perhaps out of memory", "SIGSEGV": ": a fault in compiled code"}.get(name, "")
    return f"killed by {name}{reason}"
