"""Loggers that hand a run to a tracker: MLflow and Weights & Biases.

They send nothing themselves. A process beside the run reads `metrics.jsonl` and feeds the tracker, see
`runner.tracking.trackers.feeder`; a server that fails costs the run one warning.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

from runner.config.errors import UserError, nearest

_UPLOAD_S = 60  # more to wait for a model, which needs torch and is large
_SCHEMES = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "file", "databricks", "uc", "databricks-uc")
_PROCESSES: dict[str, FeederProcess] = {}


class FeederProcess:
    """The process that feeds one kind of tracker; the runs of a process share it, as importing a client takes seconds.

    Args:
        name: of the tracker.
    """

    def __init__(self, name: str) -> None:
        self.owner = os.getpid()
        self.ended: set[str] = set()
        self.troubles: dict[str, str] = {}
        self.runs: list[str] = []
        self._rest = b""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "runner.tracking.trackers.feeder", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            # Ctrl-C is for the run. Linux may give each session its share of a core, so the feeder gets none of its own.
            process_group=0,
        )
        _yield_to_others(self._process.pid)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)
        os.set_blocking(self._out, False)

    @classmethod
    def of(cls, name: str) -> FeederProcess:
        """The process of a tracker, started if it does not run."""
        found = _PROCESSES.get(name)
        if found is None or found.owner != os.getpid() or found.gone:
            found = _PROCESSES[name] = cls(name)
        return found

    @property
    def gone(self) -> bool:
        """Whether it has ended."""
        return self._process.poll() is not None

    def tell(self, **message: Any) -> None:
        """Send a message, if anybody listens."""
        with contextlib.suppress(OSError):
            os.write(self._in, json.dumps(message).encode() + b"\n")

    def hear(self, wait_s: float = 0.0) -> None:
        """Take in what it has to say, and wait for that at most so long."""
        if wait_s:
            select.select([self._out], [], [], wait_s)
        try:
            data = os.read(self._out, 2**16)
        except OSError:
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for message in map(json.loads, lines):
            run = message.get("run", "")
            if message.get("recovered"):
                self.troubles.clear()
            elif "trouble" in message:
                self.troubles[run] = message["trouble"]
            else:
                self.ended.add(run)

    def close(self, timeout_s: float | None = None) -> None:
        """Let it finish and end; with a time, wait for that."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        if timeout_s is not None:
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process.stdout.close()


def _yield_to_others(pid: int) -> None:
    """Give a process the lowest priority: with SCHED_IDLE it has 0.3% of a core that another process uses."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, 19)
        if sys.platform == "linux":
            os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))


def close_feeders(timeout_s: float) -> None:
    """End the processes that feed trackers; tests do."""
    while _PROCESSES:
        _PROCESSES.popitem()[1].close(timeout_s)


class Tracker:
    """A logger whose points another process sends.

    Args:
        needs: modules that must be installed.
        wait_s: seconds that a run waits at its end for its last points to be sent, at least 0.
        warn: called with a sentence, once, if the tracker cannot be reached.
        settings: what the client needs.
    """

    name: ClassVar[str]  # of the tracker, and of the extra of this package

    def __init__(self, needs: Sequence[str], wait_s: float, warn: Callable[[str], None], **settings: Any) -> None:
        if wait_s < 0:
            raise ValueError(f"wait_s must be at least 0, got {wait_s}")
        if missing := [module for module in needs if importlib.util.find_spec(module) is None]:
            problem = f"needs {' and '.join(missing)}, which is not installed"
            raise UserError(f"logger.{self.name}", problem, f"pip install 'runner[{self.name}]', or logger=none")
        self._wait_s, self._warn, self._settings = wait_s, warn, settings
        self._process: FeederProcess | None = None
        self._directory, self._warned = Path(), False

    def open(self, directory: Path, resume_step: int | None) -> None:
        """See `Logger.open`."""
        again, self._directory = self._process is not None, directory
        if self._process is None or self._process.gone:
            self._process = FeederProcess.of(self.name)
        run = str(directory.absolute())
        self._process.ended.discard(run)
        self._process.tell(begin=run, settings=self._settings, resume_step=resume_step or 0, again=again)

    def log(self, split: str, metrics: dict[str, float], global_step: int, epoch: int) -> None:
        """Look whether there is something to warn of; the point itself is in `metrics.jsonl`."""
        if self._process is not None:
            self._process.hear()
            self._look()

    def flush(self) -> None:
        """See `Logger.flush`; nothing waits here."""

    def close(self) -> None:
        """See `Logger.close`; how the run ended is not known yet, see `finish`."""

    def finish(self) -> None:
        """The run has ended, and its summary says how: wait a little until the tracker knows."""
        if self._process is None:
            return
        uploads = self._settings.get("model") or self._settings.get("register")
        wait_s = self._wait_s + (_UPLOAD_S if uploads else 0)
        run, until = str(self._directory.absolute()), time.monotonic() + wait_s
        process, self._process = self._process, None
        process.tell(end=run)
        while run not in process.ended and run not in process.troubles and not process.gone:
            if (left := until - time.monotonic()) <= 0:
                break
            process.hear(min(left, 0.2))
        if run not in process.ended:
            trouble = process.troubles.get(run) or f"it did not accept all data within {wait_s:g} s"
            self._report(trouble)

    def _look(self) -> None:
        process = self._process
        if process is None or self._warned:
            return
        if trouble := process.troubles.get(str(self._directory.absolute())):
            self._report(trouble)
        elif process.gone:
            self._report("its process has ended")

    def _report(self, trouble: str) -> None:
        if not self._warned:
            self._warned = True
            later = f"missing data is sent when it answers, or by: python -m runner sync {self._directory}"
            trouble = trouble.removeprefix(f"{self.name}: ")
            self._warn(f"{self.name}: {trouble}; the run continues, and {later}")


def _ignore(text: str) -> None:
    """Report nothing."""


class MLflow(Tracker):
    """Params, metrics, status and files of a run for MLflow.

    Args:
        tracking_uri: server or database, such as `http://localhost:5000`; None is `MLFLOW_TRACKING_URI`, else `mlflow.db` here.
        experiment: name of the experiment; None is the run's `name`.
        artifacts: whether config, summary, log and curves are uploaded when the run ends.
        model: whether the best checkpoint is uploaded as a model with a signature when the run has finished.
        register: the name under which that model is registered; None registers nothing.
        wait_s: see `Tracker`.
        warn: see `Tracker`.
    """

    name = "mlflow"

    def __init__(
        self,
        tracking_uri: str | None = None,
        experiment: str | None = None,
        artifacts: bool = True,
        model: bool = False,
        register: str | None = None,
        wait_s: float = 5.0,
        warn: Callable[[str], None] = _ignore,
    ) -> None:
        uri = tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
        if uri.startswith("sqlite:///"):
            uri = f"sqlite:///{Path(uri.removeprefix('sqlite:///')).absolute()}"  # sync may be called elsewhere
        elif "://" not in uri and not uri.startswith("databricks"):
            raise ValueError(f"tracking_uri must be an address such as http://localhost:5000, got {uri}")
        scheme = uri.partition(":")[0].partition("+")[0]
        # Packages may add others, so only what looks like a slip is refused.
        if "://" in uri and scheme not in _SCHEMES and (close := nearest(scheme, _SCHEMES, 0.75)):
            raise ValueError(f"tracking_uri begins with {scheme}:, got {uri}; did you mean {close}:?")
        needs = ["mlflow", *(["sqlalchemy", "alembic"] if uri.startswith("sqlite:") else [])]
        needs += ["pandas"] if model or register else []
        settings = {"experiment": experiment, "artifacts": artifacts, "model": model, "register": register}
        super().__init__(needs, wait_s, warn, tracking_uri=uri, **settings)


class WandB(Tracker):
    """Config, metrics and status of a run for Weights & Biases.

    Args:
        project: name of the project; None is the run's `name`.
        entity: user or team; None is the default of the account.
        mode: `offline` writes files that `wandb sync` uploads; None is `WANDB_MODE`, else `online`.
        wait_s: see `Tracker`.
        warn: see `Tracker`.
    """

    name = "wandb"

    def __init__(
        self,
        project: str | None = None,
        entity: str | None = None,
        mode: Literal["online", "offline"] | None = None,
        wait_s: float = 5.0,
        warn: Callable[[str], None] = _ignore,
    ) -> None:
        mode = mode or ("offline" if os.environ.get("WANDB_MODE") == "offline" else "online")
        super().__init__(["wandb"], wait_s, warn, project=project, entity=entity, mode=mode)
