"""The program in processes that are forked from one with torch loaded: real processes without seconds of imports."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from multiprocessing import forkserver
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
PRELOAD = ["runner.launch.processes", "runner.verbs._preloaded", "torch._dynamo"]
CONTEXT.set_forkserver_preload(PRELOAD)


class ForkedProgram:
    """`python -m runner` with some words, used as a `subprocess.Popen` with text pipes is.

    Args:
        words: after `python -m runner`.
        terminal: path of a terminal that becomes the controlling one; without it, what is printed goes to files.
        ignored: signals that the program is started with as ignored.
        script: path of a Python file that runs instead of the program.
    """

    def __init__(
        self, words: Sequence[str], terminal: str = "", ignored: Sequence[signal.Signals] = (), script: str = ""
    ) -> None:
        folder = tempfile.mkdtemp()
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        streams = (terminal, terminal) if terminal else (f"{folder}/out", f"{folder}/err")
        self._paths = [Path(path) for path in streams]
        arguments = (tuple(words), str(Path.cwd()), dict(os.environ), streams, tuple(ignored), script)
        self._process = CONTEXT.Process(target=_work, args=arguments)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("runner", timeout or 0)
        return self.returncode

    def out(self) -> str:
        """What it has printed so far."""
        return self._paths[0].read_text() if self._paths[0].exists() else ""

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        return self.out(), self._paths[1].read_text() if self._paths[1].exists() else ""

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()


def run(words: Sequence[str], timeout: float = 300, script: str = "") -> subprocess.CompletedProcess[str]:
    """Run the program, or a script, to its end in the current folder."""
    program = ForkedProgram(words, script=script)
    try:
        out, err = program.communicate(timeout)
    except subprocess.TimeoutExpired:
        program.kill()
        raise
    return subprocess.CompletedProcess(["runner", *words], program.wait(), out, err)


def _work(
    words: tuple[str, ...],
    folder: str,
    environment: dict[str, str],
    streams: tuple[str, str],
    ignored: tuple[int, ...],
    script: str,
) -> None:
    multiprocessing.set_start_method(None, force=True)  # workers start as in any other process, not by this server
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a sweep that started the server had blocked some
    # Jobs of a sweep come from the server that this process came from: starting another one takes seconds.
    server = forkserver._forkserver
    server.ensure_running = lambda: None  # type: ignore[method-assign]
    forkserver.ensure_running = lambda: None
    os.setsid()
    for number, path in enumerate(streams, 1):  # a terminal that the leader of a session opens becomes its own
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    if streams[0] == streams[1]:
        os.dup2(1, 0)
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU):
        signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    sys.stdout = sys.__stdout__ = open(1, "w", buffering=1 if os.isatty(1) else -1, closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    # It reads its variables when it is imported, which a module that the server loaded may have done
    for name in [name for name in sys.modules if name.partition(".")[0] == "huggingface_hub"]:
        del sys.modules[name]
    time.tzset()
    os.chdir(folder)
    sys.path[:0] = [folder, *environment.get("PYTHONPATH", "").split(os.pathsep)]
    sys.argv, sys.orig_argv = ["runner", *words], [sys.executable, "-m", "runner", *words]
    try:
        if script:
            runpy.run_path(script, run_name="__main__")
        else:
            runpy.run_module("runner", run_name="__main__", alter_sys=True)
    finally:
        sys.stdout.flush()
        atexit._run_exitfuncs()
