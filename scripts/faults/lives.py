"""Runs of the program as forked processes: the imports are paid once, and each life can be ended anywhere."""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

Prepare = Callable[[], None]
"""A change to the program, made in the forked process before it starts."""
OF_THE_CLOCK = ("samples_per_s", "data_wait", "peak_memory_mib", "mfu")
"""Metrics that differ when a run is repeated."""
_LONGEST_S = 300.0
# The compiler starts threads when it is imported.
_NOT_SHARED = ("torch._inductor", "__main__", "__mp_main__")


@dataclass
class Life:
    """One process that runs the program.

    Attributes:
        pid: its number, and that of its process group.
        log: takes what it prints.
        began: when it was started.
        status: exit status; negative for the signal that ended it.
    """

    pid: int
    log: Path
    began: float = field(default_factory=time.perf_counter)
    status: int | None = None

    def ended(self) -> bool:
        """Whether it is over."""
        if self.status is None:
            found, code = os.waitpid(self.pid, os.WNOHANG)
            if found:
                self._end(code)
        return self.status is not None

    def wait(self, longest_s: float = _LONGEST_S) -> int:
        """Wait until it is over; one that hangs is killed, which counts as broken."""
        deadline = time.perf_counter() + longest_s
        while not self.ended():
            if time.perf_counter() > deadline:
                self.log.open("a").write(f"\nhung for {longest_s} s\n")
                self.kill()
            time.sleep(0.002)
        assert self.status is not None
        return self.status

    def kill(self) -> None:
        """SIGKILL to the process alone, as a scheduler or the system short of memory does it."""
        if not self.ended():
            os.kill(self.pid, signal.SIGKILL)
            self._end(os.waitpid(self.pid, 0)[1])

    def said(self) -> str:
        """What it printed."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def _end(self, code: int) -> None:
        self.status = os.waitstatus_to_exitcode(code)
        # Worker processes notice only after seconds that their parent is gone.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


def begin(words: Sequence[str], log: Path, prepare: Prepare | None = None, verb: str = "train") -> Life:
    """Start the program in a forked process."""

    def work() -> int:
        # Pictures take half of the time of a short run, and are not part of training. Another commit, which
        # scripts/same_bits.py starts too, may have them elsewhere.
        with contextlib.suppress(ImportError):
            from runner.run import run_directory

            run_directory.learning_curves = lambda *_: None  # type: ignore[assignment]
        if prepare is not None:
            prepare()
        from runner.cli import main

        # Jobs of a sweep come from the fork server of the parent, if it has one: starting another takes seconds.
        server: Any = forkserver._forkserver
        if server._forkserver_pid is not None:
            server.ensure_running = forkserver.ensure_running = lambda: None
        return main([verb, *words])

    return fork(work, log)


def fork(work: Callable[[], int], log: Path) -> Life:
    """Do some work in a forked process; what it returns is the exit status."""
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)
        return Life(pid, log)
    status = 1
    try:
        with contextlib.suppress(PermissionError):
            os.setpgid(0, 0)
        _redirect(log)
        status = work()
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _redirect(log: Path) -> None:
    """Send what is printed to a file; a limit on the size of files, if one is set later, holds for that file, too."""
    with log.open("wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # The streams of the parent may be others than 1 and 2, as under pytest.
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr


def preload(folder: Path, *jobs: Sequence[str]) -> None:
    """Import here what some runs import, so that no later one has to: most of a short run's time is imports."""
    listed = folder / "modules.json"

    def prepare() -> None:
        leave = os._exit

        def list_and_leave(status: int) -> None:
            listed.write_text(json.dumps([name for name in sys.modules if not name.startswith(_NOT_SHARED)]))
            leave(status)

        os._exit = list_and_leave  # type: ignore[assignment]

    for number, (verb, *words) in enumerate(jobs):
        life = live(words, folder / f"preload_{number}.log", prepare, verb)
        assert life.status == 0, life.said()[-2000:]
        for name in json.loads(listed.read_text()):
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    multiprocessing.set_forkserver_preload(["runner.launch.processes", "runner.verbs._preloaded"])
    forkserver.ensure_running()
    threads = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Threads:")]
    assert threads[0].split()[1] == "1", "threads would be missing in a forked process"


def live(words: Sequence[str], log: Path, prepare: Prepare | None = None, verb: str = "train") -> Life:
    """Run the program to its end."""
    life = begin(words, log, prepare, verb)
    life.wait()
    return life


def marking(path: Path) -> Prepare:
    """A change that makes a file when the first step is about to begin."""

    def prepare() -> None:
        from runner.engine.loop import Loop

        run = Loop.run

        def mark_and_run(self: Loop) -> None:
            path.touch()
            run(self)

        Loop.run = mark_and_run  # type: ignore[method-assign]

    return prepare


def fingerprint(run: Path) -> str:
    """SHA-256 of the final weights of a run that has finished; otherwise how it ended."""
    try:
        summary = json.loads((run / "summary.json").read_text())
    except (OSError, ValueError) as error:
        return f"no summary: {error}"
    if summary["status"] not in ("finished", "pruned"):
        return f"{summary['status']}: {summary['error']}"
    return str(summary["weights_sha256"])


def without_clock(record: dict[str, Any]) -> dict[str, Any]:
    """The metrics of a record that are the same when a run is repeated."""
    return {name: value for name, value in record.items() if name not in OF_THE_CLOCK}


def leftovers(run: Path) -> list[str]:
    """Temporary files in a run directory."""
    return sorted(str(path.relative_to(run)) for path in run.rglob(".*.tmp"))
