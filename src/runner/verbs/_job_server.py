"""The server process of `runner.sweeps.pool`: imports torch once, and forks a process for each job.

It computes nothing and has no threads, so that a forked process is like a new one. Requests come as lines of JSON, and what
happens goes back as lines of JSON. When the launcher is gone, it asks its jobs to stop, and waits.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import select
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from runner.config.signals import STOPPING

_LOOK_S = 0.05  # between two looks at the jobs
_DEATH_OF_PARENT, _ADOPT_ORPHANS = 1, 36  # PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER
_USED_LATER = (
    *(
        "hydra.core.utils",
        "runner.config.app",
        "runner.sweeps.launch",
        "runner.sweeps.resume",
        "torchmetrics.classification",
    ),
    *("matplotlib.figure", "matplotlib.backends.backend_agg", "torch.utils.tensorboard"),
)


def main(input: int, said: int) -> NoReturn:
    """Serve until the launcher closes the input; in the process of a job, run it. Either way the process ends here.

    Args:
        input: the descriptor that requests come from.
        said: the one that gets what happens.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)  # the launcher passes on what the jobs shall get
    with suppress(PermissionError):
        os.setsid()
    _prctl(_ADOPT_ORPHANS, 1)
    gc.disable()
    requests = _Requests(input)
    common = requests.first()
    sys.path[:] = common["path"]
    from runner.verbs._table import VERBS

    for name in (VERBS[common["verb"]].module, *_USED_LATER):
        importlib.import_module(name)
    importlib.import_module("hydra.core.plugins").Plugins.instance()  # looks through all installed plugins
    gc.freeze()
    request = _serve(requests, said)
    status = 0
    if request is not None:
        atexit._clear()
        try:
            status = _work(common, request, said)
        except SystemExit as stop:
            status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        except BaseException:
            traceback.print_exc()
            status = 1
        # As an interpreter ends, but without what only the launcher may do, such as removing its temporary folders.
        for module, end in (("multiprocessing.util", "_exit_function"), ("threading", "_shutdown")):
            getattr(importlib.import_module(module), end)()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    # Taking the imports apart takes long, and the launcher that this process may be a copy of must not go on here.
    os._exit(status)


class _Requests:
    """Lines of JSON that come from the launcher."""

    def __init__(self, input: int) -> None:
        self._input = input
        self._unread = b""
        self._launcher = os.getppid()

    def first(self) -> dict[str, Any]:
        while True:
            found = self.new(None)
            if found is None:
                raise SystemExit(0)
            if found:
                self._unread = b"".join(json.dumps(each).encode() + b"\n" for each in found[1:]) + self._unread
                return found[0]

    def new(self, timeout: float | None) -> list[dict[str, Any]] | None:
        """What has come, or None if the launcher is gone."""
        if b"\n" not in self._unread and select.select([self._input], [], [], timeout)[0]:
            content = os.read(self._input, 2**16)
            if not content:
                return None
            self._unread += content
        *lines, self._unread = self._unread.split(b"\n")
        # Another process may have the other end of the pipe too.
        return [json.loads(line) for line in lines] if lines or os.getppid() == self._launcher else None


def _serve(requests: _Requests, said: int) -> dict[str, Any] | None:
    """Fork and reap until the launcher is gone; the request in the process of a job."""
    jobs: dict[int, int] = {}  # what the launcher calls each process of a job, by its real number
    leaving: dict[int, int] = {}  # the same of those of which a child may be left
    serving = True
    while serving or jobs:
        new = requests.new(_LOOK_S if jobs or leaving else 1.0) if serving else _nothing()
        if new is None:
            serving = False
            _signal(jobs, signal.SIGTERM)
        for request in new or ():
            if "signal" in request:
                _signal(jobs, request["signal"])
                continue
            process = os.fork()
            if not process:
                return request
            jobs[process] = request["process"]
        for process, status in _ended():
            if process in jobs:
                leaving[process] = jobs.pop(process)
                _say(said, process=leaving[process], status=status)
        for process in list(leaving):
            try:
                os.killpg(process, signal.SIGKILL)  # data workers would notice after seconds that their parent is gone
            except (ProcessLookupError, PermissionError):
                _say(said, process=leaving.pop(process), gone=True)
    return None


def _nothing() -> list[dict[str, Any]]:
    select.select([], [], [], _LOOK_S)
    return []


def _ended() -> list[tuple[int, int]]:
    """Processes that have ended, with their exit status; adopted ones too."""
    found = []
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            found.append((ended[0], os.waitstatus_to_exitcode(ended[1])))
    return found


def _signal(jobs: dict[int, int], number: int) -> None:
    for process in jobs:
        with suppress(ProcessLookupError):
            os.kill(process, number)


def _say(said: int, **content: Any) -> None:
    with suppress(BrokenPipeError):  # the launcher is gone
        os.write(said, json.dumps(content).encode() + b"\n")


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value)


def _work(common: dict[str, Any], request: dict[str, Any], said: int) -> int:
    """Run one job; returns the exit status of its process."""
    server = os.getppid()
    os.setsid()
    _prctl(_DEATH_OF_PARENT, signal.SIGTERM)
    if os.getppid() != server:
        return 1
    _redirect(request["log"])
    for number in STOPPING:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
    os.environ.update(request["environment"])
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")  # a system short of memory ends a job, and not the launcher
    faulthandler.enable()
    sys.argv = ["runner", common["verb"], *request["words"]]
    value = _run(common, request)
    _say(said, process=request["process"], value=value)
    return 0


def _redirect(path: str) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0), 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout, sys.stderr = (os.fdopen(stream, "w", buffering=1, closefd=False) for stream in (1, 2))


def _run(common: dict[str, Any], request: dict[str, Any]) -> float | None:
    """Compose one job as Hydra's own launcher does, and run it."""
    from hydra._internal.callbacks import Callbacks
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.utils import run_job
    from hydra.types import HydraContext, RunMode
    from omegaconf import open_dict

    from runner.config.app import application
    from runner.config.schema import VERBS
    from runner.config.sources import Sources
    from runner.verbs._launch import job_of

    GlobalHydra.instance().clear()  # of the launcher
    task = job_of(common["verb"])
    with application(task, Sources([Path(each) for each in common["sources"]]), VERBS[common["verb"]]) as app:
        config = app.compose_config(common["primary"], request["words"], RunMode.RUN)
        with open_dict(config):
            config.hydra.mode = RunMode.MULTIRUN
            config.hydra.job.id = config.hydra.job.num = request["number"]
        context = HydraContext(config_loader=app.config_loader, callbacks=Callbacks(config))
        result = run_job(
            task_function=task,
            config=config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
            hydra_context=context,
        )
    value = result.return_value
    return float(value) if isinstance(value, int | float) else None


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
