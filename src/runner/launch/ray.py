"""Jobs of a sweep as tasks of Ray, on its cluster or on this machine; they save and end when the sweep does."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.base.errors import UserError, blame, first_line, require
from runner.launch.jobs import Ended, Job, Launcher

_POLLED_S = 0.1
# Ray kills the children of a worker that ends, so that the job is a grandchild: its parent waits for it, and its sibling
# asks it to stop when nothing writes to the pipe any more, as the worker has closed it or is gone.
_START = 'exec 3<&0; "$@" </dev/null 3<&- & job=$!; { read -r _; kill -TERM $job; } <&3 & wait $job'


class Ray(Launcher):
    """A launcher for Ray; `conf/hydra/launcher/ray.yaml` explains its keys. Its jobs save and end when the sweep does.

    Args:
        address: of a cluster; None for one on this machine, which ends with the sweep.
        num_cpus: CPUs of a job.
        num_gpus: GPUs of a job.
        init: further arguments of `ray.init`.
        remote: further arguments of `ray.remote`.
        values: the composed config of the first job.

    Raises:
        UserError: Ray is not installed.
    """

    slots: int | None = None  # Ray starts a task once there are free resources

    def __init__(
        self,
        *,
        values: Mapping[str, Any],
        address: str | None = None,
        num_cpus: float = 1,
        num_gpus: float = 0,
        init: Mapping[str, Any] | None = None,
        remote: Mapping[str, Any] | None = None,
    ) -> None:
        require("hydra/launcher", "runner[ray]", "ray", otherwise=", or hydra/launcher=pool")
        import ray

        self._ray: Any = ray
        quiet = {"include_dashboard": False, "log_to_driver": False}  # what jobs print is in their logs
        self._init = {**quiet, "address": address or "local", **(init or {})}
        # The ledger of the sweep decides what starts again, and not Ray.
        options = {"num_cpus": num_cpus, "num_gpus": num_gpus, "max_calls": 1, "max_retries": 0, **(remote or {})}
        try:
            self._task = ray.remote(**options)(_work)
        except (TypeError, ValueError) as error:
            raise UserError("hydra.launcher", str(error)) from error
        self._running: dict[Any, int] = {}
        self._stops: list[bool] = []

    def start(self, jobs: Sequence[Job]) -> list[str]:
        """See `Launcher.start`.

        Raises:
            UserError: Ray cannot be started, or there is no cluster at the address.
        """
        # Ray starts with the first job, as a sweep with nothing to do needs no cluster
        if not self._ray.is_initialized():
            handler = signal.getsignal(signal.SIGTERM)
            try:
                with blame("hydra.launcher", "ray.init fails"):
                    self._ray.init(**self._init)
            finally:
                signal.signal(signal.SIGTERM, handler)  # Ray's own would end this process
        for job in jobs:
            words, log = list(job.command), str(job.log.absolute())
            reference = self._task.remote(words, str(Path.cwd()), log, dict(job.environment))
            self._running[reference] = job.number
        return ["Ray"] * len(jobs)

    def wait(self, timeout_s: float) -> list[Ended]:
        """See `Launcher.wait`."""
        while self._stops:
            self._stops.pop()
            for reference in self._running:
                self._ray.cancel(reference)
        if not self._running:
            time.sleep(timeout_s)
            return []
        ready, _ = self._ray.wait(list(self._running), num_returns=1, timeout=timeout_s)
        return [self._ended(self._running.pop(reference), reference) for reference in ready]

    def stop(self, kill: bool) -> None:
        """See `Launcher.stop`."""
        self._stops.append(kill)  # for `wait`, as Ray may be in the middle of something

    def close(self) -> None:
        """See `Launcher.close`."""
        self.stop(kill=False)  # none runs, unless an error ends the sweep
        while self._running:
            self.wait(_POLLED_S)
        self._ray.shutdown()

    def _ended(self, number: int, reference: Any) -> Ended:
        try:
            return Ended.with_status(number, self._ray.get(reference))
        except self._ray.exceptions.TaskCancelledError:
            return Ended(number)
        except self._ray.exceptions.RayError as error:
            return Ended(number, f"its Ray worker is gone: {first_line(error)}")


def _work(command: list[str], folder: str, log: str, environment: dict[str, str]) -> int:
    """Run a command in a session of its own; the first cancellation asks it to stop, the second one kills it."""
    # The log is on the file system that the jobs share
    Path(log).parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as output:  # noqa: PTH123
        # The shell watches its input: when this process dies, the pipe closes and the job ends
        process = subprocess.Popen(
            ["sh", "-c", _START, "sh", *command],
            cwd=folder,
            env={**os.environ, **environment},
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    assert process.stdin is not None
    while process.poll() is None:
        try:
            time.sleep(_POLLED_S)  # a cancellation does not interrupt `process.wait`
        # A closed input is the first request to stop, and a kill the second
        except KeyboardInterrupt:
            if process.stdin.closed:
                os.killpg(process.pid, signal.SIGKILL)
            process.stdin.close()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # data workers notice after seconds that their parent is gone
    return process.returncode if process.returncode <= 128 else 128 - process.returncode
