"""Jobs of a sweep side by side on one machine: slots with devices and threads, and a process with a log for each job.

    with Pool(slots_of(["0", "1"], per_device=2), common) as pool:
        pool.start(0, ["seed=0"])
        for ended in pool.wait():
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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from runner.config.errors import PREEMPTED
from runner.config.signals import STOPPING

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
        status: exit status; negative for the signal that killed it.
        value: what the job returned, the value that sweepers optimise.
        sentence: why the process could not say itself how the job ended; empty if it could.
    """

    number: int
    status: int
    value: float | None = None
    sentence: str = ""


class PoolBroken(Exception):
    """The server process was killed."""

    exit_code = 1


def slots_of(devices: Sequence[str], per_device: int, environment: Mapping[str, str] | None = None) -> list[Slot]:
    """Slots for jobs.

    Args:
        devices: numbers of GPUs among those that this process sees, or `cpu`.
        per_device: how many jobs share one.
        environment: variables for all of them.
    """
    visible = [each for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each]
    slots = list[Slot]()
    for _ in range(per_device):  # neighbours are filled last
        for device in devices:
            own = "" if device == "cpu" else visible[int(device)] if visible else device
            name = f"CPU {len(slots)}" if device == "cpu" else f"GPU {device}"
            slots.append(Slot(name, {**(environment or {}), "CUDA_VISIBLE_DEVICES": own}))
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
        self._leases: dict[int, Slot] = {}
        self._running: dict[int, int | None] = {}  # process of each job by its number, once it is known
        self._values: dict[int, float | None] = {}
        self._server: int | None = None  # its process
        self._process: subprocess.Popen[bytes] | None = None  # the same, if it is not a copy of this one
        self._requests, self._said = -1, -1  # pipes to it, and from it
        self._unread = b""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Pool:
        if threading.current_thread() is threading.main_thread():
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
        return list(self._running)

    def start(self, number: int, words: Sequence[str], environment: Mapping[str, str] | None = None) -> Slot:
        """Start a job in a free slot, and return the slot.

        Args:
            number: tells the jobs of the sweep apart; `hydra.job.num`, and the name of its folder unless the ledger has another.
            words: its overrides.
            environment: variables for it alone.
        """
        slot = self._free.pop(0)
        self._leases[number], self._running[number] = slot, None
        log = self.log_of(number)
        log.parent.mkdir(parents=True, exist_ok=True)
        own = {**slot.environment, **(environment or {}), PATIENT: "1"}
        folder = str(self.common.folder).replace("\\", "\\\\").replace("'", "\\'")
        all_words = [*self.common.words, *words, f"hydra.sweep.dir='{folder}'"]
        self._tell({"number": number, "words": all_words, "environment": own, "log": str(log)})
        if self.asked:  # while the server was being started
            self._tell({"signal": signal.SIGTERM})
        return slot

    def log_of(self, number: int) -> Path:
        """The file that gets what a job prints."""
        return self.common.folder.absolute() / LOGS / f"{number}.log"

    def wait(self, timeout: float | None = None) -> list[Ended]:
        """The jobs that ended, as soon as one has or a slot has become free; none once `timeout` seconds have passed.

        Raises:
            PoolBroken: if the server process was killed, and the jobs with it.
        """
        ended: list[Ended] = []
        until = None if timeout is None else time.monotonic() + timeout
        while self._running or self._leases:
            left = None if until is None else max(0.0, until - time.monotonic())
            if not select.select([self._said], [], [], left)[0]:
                break
            content = os.read(self._said, 2**16)
            if not content:
                raise PoolBroken("the process that starts jobs was killed; give the same command again to continue")
            *lines, self._unread = (self._unread + content).split(b"\n")
            free = len(self._free)
            ended += [found for line in lines if (found := self._take(json.loads(line)))]
            if ended or len(self._free) > free:
                break
        return ended

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Ask all jobs to save and to end, and start no other one; a call after more than a second kills them."""
        again = bool(self.asked) and time.monotonic() > self._insists_from
        if not self.asked:  # `timeout` and schedulers send a signal to a process and to its group
            self._insists_from = time.monotonic() + _SAME_S
        self.asked = self.asked or signal.Signals(number).name
        self._tell({"signal": signal.SIGKILL if again else signal.SIGTERM})

    def close(self) -> None:
        """End the jobs that are left, and the server process."""
        if self._server is None:
            return
        requests, self._requests = self._requests, -1
        os.close(requests)  # the server asks its jobs to stop, and waits for them
        until = time.monotonic() + (math.inf if self._running else _ENDED_S)
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
        with contextlib.suppress(OSError):  # the server is gone, and `wait` says so
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
        number = said["number"]
        if "process" in said:
            self._running[number] = said["process"]
        elif "value" in said:
            self._values[number] = said["value"]
        elif "gone" in said:
            self._free.append(self._leases.pop(number))
        elif "status" in said:
            del self._running[number]
            status = said["status"]
            return Ended(number, status, self._values.pop(number, None), _sentence(status))
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
