"""Loggers that send a run to MLflow or W&B. `metrics.jsonl` is their queue: nothing is lost while a server fails."""

from __future__ import annotations

import hashlib
import importlib.util
import math
import os
import queue
import re
import shlex
import shutil
import textwrap
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from runner.base.errors import UserError, nearest
from runner.base.files import write_json
from runner.base.reading import open_regular, read_json, read_regular, read_summary
from runner.base.secrets import is_masked, mask_text, mask_values
from runner.config import stored
from runner.config.changes import other_run
from runner.config.keys import at, flatten
from runner.tracking.formats import clean
from runner.tracking.jsonl import parse
from runner.tracking.loggers import METRICS

_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
_SCHEMES = ("http", "https", *_DATABASES, "file", "databricks", "uc", "databricks-uc")
_FILES = ("config.yaml", "overrides.yaml", "environment.json", "summary.json", "run.log", "plots/curves.png")
_IMPORT_S, _MOST_POINTS, _MOST_TIMES = 0.6, 100, 100_000  # CPU time of the first import; in a request, and in memory
_LONGEST, _MOST_PARAMS, _MOST_METRICS = 6000, 100, 1000  # characters that MLflow stores, and values in a request
_IMPORTS = threading.RLock()
# A process that is forked during an import would wait for ever once it imports the same module.
os.register_at_fork(before=_IMPORTS.acquire, after_in_parent=_IMPORTS.release, after_in_child=_IMPORTS.release)


@dataclass
class State:
    """The points of a run that a tracker has: the content of `trackers/NAME.json`."""

    settings: dict[str, Any]  # that identify the tracker's run, secrets masked
    config: str = ""  # digest of the keys that change metrics
    uid: str = field(default_factory=lambda: uuid.uuid4().hex)  # of the tracker's run
    replaces: str = ""  # uid of the tracker's run whose points got other values
    sent: dict[str, int] = field(default_factory=dict)  # last step of each split that has arrived
    count: int = 0  # points that have arrived
    times: list[int] = field(default_factory=list)  # of the points after these that may have arrived, in ms since 1970
    ended: str | None = None  # status that the tracker was given


@dataclass(kw_only=True, eq=False)
class Tracker:
    """Base of the loggers of all trackers; see `Logger` for what a run calls, and `conf/logger/` for the keys."""

    max_share: float = 0.005
    wait_s: float = 10.0
    warn: Callable[[str], None] = print
    name: ClassVar[str]  # of the tracker, and of the extra of this package
    connect: ClassVar[Callable[..., None]]  # creates the tracker's run, or continues it
    send: ClassVar[Callable[..., None]]  # points, number of the first one, and times that stay the same
    end: ClassVar[Callable[..., None]]  # as finished, failed, preempted or killed, with an error or an empty string

    def prepare(self, address: str, modules: list[str], needs: list[str], **settings: Any) -> None:
        """Set where points go (without secrets), modules to import, those that must be installed, and what identifies the run."""
        if self.wait_s < 0 or not 0 < self.max_share <= 1:
            raise ValueError(
                f"wait_s={self.wait_s} must be at least 0, max_share={self.max_share} above 0 and at most 1"
            )
        if missing := [module for module in needs if importlib.util.find_spec(module) is None]:
            problem = f"needs {' and '.join(missing)}, which is not installed"
            raise UserError(f"logger.{self.name}", problem, f"pip install 'runner[{self.name}]', or logger=none")
        self.address, self.modules, self.settings = address, modules, settings
        self.live = settings.get("mode") != "offline"  # whether points are sent before the run ends
        self._connected = self._cancelled = self._warned = False
        self._trouble, self._thread = "", threading.Thread(target=self._work, name=f"runner-{self.name}", daemon=True)
        self._times = dict[tuple[str, int], float]()
        self._todo = queue.SimpleQueue[Callable[[], bool]]()

    def open(self, directory: Path, resume_step: int | None) -> None:
        """Start the thread, or let it know that the run was rolled back."""
        again = self._thread.is_alive()
        self._todo.put(lambda: self.begin(resume_step or 0, again))
        if not again:
            self.load(directory)
            self._thread.start()

    def log(self, split: str, metrics: dict[str, float], global_step: int, epoch: int) -> None:
        """Note the time, and warn if there is a reason; the point itself is in `metrics.jsonl`."""
        if len(self._times) < _MOST_TIMES:
            self._times[split, global_step] = time.time()
        self._report()

    def _report(self) -> None:
        if self._trouble and not self._warned:
            self._warned = True
            secret = " (with the address in MLFLOW_TRACKING_URI, as files do not store its password)"
            command = f"python -m runner sync {shlex.quote(str(self.directory))}{secret * is_masked(self.address)}"
            self.warn(f"{self.name}: {self._trouble}; the run is not affected, and the rest is sent by: {command}")

    def flush(self) -> None:
        """Nothing waits here."""

    def close(self) -> None:
        """Nothing to do before it is known how the run ended, see `finish`."""

    def finish(self) -> None:
        """The run has ended, and its summary says how: wait a little until the tracker knows."""
        self._todo.put(self.deliver)
        self._thread.join(self.wait_s)
        if self._thread.is_alive():
            self._cancelled = True  # another process may send the rest from now on
            self._trouble = self._trouble or f"{self.address}: not everything was sent within {self.wait_s:g} s"
        self._report()

    def _work(self) -> None:
        """The thread: do one thing after the other, slowly enough, until the run has ended."""
        begun, due, pause, work = time.monotonic(), 0.0, 1.0, self.advance
        while work != self.deliver:
            try:
                work = self._todo.get(timeout=max(0.0, due - time.monotonic()) if self.live else None)
            except queue.Empty:
                work = self.advance
            try:
                pause, self._trouble = (0.0 if work() else 1.0), ""
            except (Exception, SystemExit) as error:
                pause, self._trouble = min(max(2 * pause, 2.0), 60.0), sentence_of(error, self.address)
            used = time.thread_time() + (_IMPORT_S if self.modules else 0.0)
            due = max(time.monotonic() + pause, begun + used / self.max_share)

    def load(self, directory: Path) -> None:
        """Read the state in a run directory; a missing or damaged one begins a new run of the tracker."""
        self.directory, self._path = directory, directory / "trackers" / f"{self.name}.json"
        try:
            self._use(State(**read_json(self._path)))
        except (TypeError, ValueError):
            self._use(State(mask_values(self.settings)))

    def _use(self, state: State) -> None:
        self.state, self._offset, self._left, self._read_until = state, 0, list[dict[str, Any]](), dict(state.sent)

    def _save(self) -> None:
        self._path.parent.mkdir(exist_ok=True)
        write_json(self._path, asdict(self.state))

    def begin(self, resume_step: int, again: bool) -> bool:
        """The run starts, resumes after a step, or was rolled back to it (`again`)."""
        old, settings, config = self.state, mask_values(self.settings), self.state.config
        if not again:  # where the run computes and where its data lies does not change its metrics
            kept = sorted((k, str(v)) for k, v in self.shown()[1].items() if other_run(k) and k != "data.root")
            config = hashlib.sha256(repr(kept).encode()).hexdigest()
        elsewhere = settings | {"artifacts": None} != old.settings | {"artifacts": None}
        obsolete = old.times or any(step > resume_step for step in old.sent.values())
        # Steps that were sent are logged again; with other values, they go to a new run of the tracker.
        fresh = elsewhere or (obsolete and (again or config != old.config))
        state = State(settings, replaces="" if elsewhere else old.uid) if fresh else old
        state.settings, state.config, state.ended = settings, config, None
        self._use(state)
        self._save()
        if fresh and self._connected:
            self._connected = False
            self.end("killed", "")
        return True

    def next_points(self) -> list[dict[str, Any]]:
        """Lines of `metrics.jsonl` to send; of those that a resumed run writes again, none that was sent."""
        if not self._left and (path := self.directory / METRICS).exists():
            with open_regular(path) as file:
                file.seek(self._offset)
                while len(self._left) < _MOST_POINTS and (line := file.readline()).endswith(b"\n"):
                    self._offset += len(line)
                    point = parse(line) or {"global_step": -1}
                    split, step = str(point.get("split", "")), point["global_step"]
                    if self._read_until.get(split, -1) < step < 2**53:
                        self._read_until[split] = step
                        self._left.append(point | {"split": split})
        return [*self._left]

    def advance(self) -> bool:
        """Import a module, connect, or send a request, whatever comes next; False if nothing is left."""
        state = self.state
        if self.modules:
            with _IMPORTS:
                importlib.import_module(self.modules.pop(0))
        elif not self._connected:
            self.connect()
            self._use(state)
            self._connected = True
        elif points := self.next_points():
            # The points whose times are stored may have arrived, and then are there once only under the same time.
            logged = [(point["split"], point["global_step"]) for point in points[len(state.times) :]]
            state.times += [round(1000 * self._times.pop(each, time.time())) for each in logged]
            if self.live:
                self._save()
            self.send(points, state.count, state.times)
            state.sent |= {point["split"]: point["global_step"] for point in points}
            state.count += len(points)
            del self._left[:], state.times[: len(points)]
        else:
            return False
        return True

    def deliver(self) -> bool:
        """Send everything, and how the run ended, as its summary says; without one, it was killed."""
        while not self._cancelled and self.advance():
            pass
        if not self._cancelled:
            summary = read_summary(self.directory) or {}
            status = summary["status"] if summary.get("status") in ("finished", "failed", "preempted") else "killed"
            self.end(status, str(summary.get("error") or ""))
            self.state.ended = status
            self._save()
        return False

    def shown(self) -> tuple[str, dict[str, Any], dict[str, str]]:
        """Name (in a sweep with that of its folder), flat config, and tags of the run."""
        state, directory, parent = self.state, self.directory.absolute(), self.directory.absolute().parent
        in_sweep = (parent / "sweep.jsonl").exists()
        commit = at(read_json(directory / "environment.json"), "git.commit")
        tags = {"runner.uid": state.uid, "runner.replaces": state.replaces, "mlflow.source.git.commit": commit}
        tags |= {"runner.directory": str(directory), "runner.sweep": str(parent) * in_sweep}
        name = f"{parent.name}/{directory.name}" if in_sweep else directory.name
        config = flatten(stored.load(read_regular(directory / "config.yaml").decode(), str(directory)))
        return name, config, {key: value for key, value in tags.items() if value and type(value) is str}


@dataclass(kw_only=True, eq=False)
class MLflow(Tracker):
    """Params, metrics, status and files of a run for MLflow."""

    tracking_uri: str | None = None
    experiment: str | None = None
    artifacts: bool = True
    name = "mlflow"

    def __post_init__(self) -> None:
        uri = self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
        if uri.startswith("sqlite:///"):
            uri = f"sqlite:///{Path(uri.removeprefix('sqlite:///')).absolute()}"  # sync may be called elsewhere
        elif "://" not in uri and not uri.startswith("databricks"):
            raise ValueError(f"tracking_uri must be an address such as http://localhost:5000, got {uri}")
        scheme = uri.partition(":")[0].partition("+")[0]
        # Packages may add others, so only what looks like a slip is refused.
        if "://" in uri and scheme not in _SCHEMES and (close := nearest(scheme, _SCHEMES, 0.75)):
            raise ValueError(f"tracking_uri begins with {scheme}:, got {uri}; did you mean {close}:?")
        needs = ["mlflow", *(["sqlalchemy", "alembic"] if scheme == "sqlite" else [])]
        modules = ["mlflow.tracking", *["mlflow.store.tracking.sqlalchemy_store"] * (scheme in _DATABASES)]
        settings = {"tracking_uri": uri, "experiment": self.experiment, "artifacts": self.artifacts}
        self.prepare(mask_text(uri), modules, needs, **settings)
        # Its own retries take minutes, it prints into the output of the run, and its telemetry starts threads.
        quiet = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
        quiet |= {"MLFLOW_LOGGING_LEVEL": "ERROR", "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true"}
        os.environ |= quiet | {"MLFLOW_DISABLE_TELEMETRY": "true"} | os.environ

    def connect(self) -> None:
        """Create the run with its params, or find it by its tag, as one may be created without an answer."""
        from mlflow.entities import Param, RunTag
        from mlflow.tracking import MlflowClient

        self._client = client = MlflowClient(tracking_uri=self.settings["tracking_uri"])
        name, config, tags = self.shown()
        experiment = self.experiment or str(config.get("name", "data"))
        known = client.get_experiment_by_name(experiment)
        number = known.experiment_id if known else client.create_experiment(experiment)
        found = client.search_runs([number], f"tags.`runner.uid` = '{self.state.uid}'", max_results=1)
        tags |= {str(label): "true" for label in config.get("tags") or []}
        tags |= {"mlflow.note.content": config["notes"]} if config.get("notes") else {}
        run = found[0] if found else client.create_run(number, tags=tags, run_name=name)
        self._id, old = str(run.info.run_id), run.data.params
        client.update_run(self._id, status="RUNNING")
        now = {_allowed(key): str(value)[:_LONGEST] for key, value in config.items()}
        params = [Param(key, value) for key, value in now.items() if key not in old]
        # MLflow refuses to change a parameter.
        changed = [RunTag(f"changed.{key}", now[key]) for key in now if old.get(key, now[key]) != now[key]]
        for start in range(0, max(len(params), len(changed)), _MOST_PARAMS):
            part = slice(start, start + _MOST_PARAMS)
            client.log_batch(self._id, params=params[part], tags=changed[part])

    def send(self, points: list[dict[str, Any]], first: int, times: list[int]) -> None:
        """Send points; MLflow stores metrics of one time, step and value once."""
        from mlflow.entities import Metric

        found = [(point["global_step"], time_ms, _values(point)) for point, time_ms in zip(points, times, strict=False)]
        metrics = [
            Metric(_allowed(key), x, time_ms, step) for step, time_ms, values in found for key, x in values.items()
        ]
        for start in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._id, metrics=metrics[start : start + _MOST_METRICS])

    def end(self, status: str, error: str) -> None:
        """Upload files, and set the status."""
        if error:
            self._client.set_tag(self._id, "runner.error", error[:_LONGEST])
        for name in _FILES if self.artifacts else ():
            # A directory that comes from someone else may have links to other files.
            if (path := self.directory / name).is_file() and not path.is_symlink():
                self._client.log_artifact(self._id, str(path), name.rpartition("/")[0] or None)
        self._client.set_terminated(self._id, {"finished": "FINISHED", "failed": "FAILED"}.get(status, "KILLED"))


@dataclass(kw_only=True, eq=False)
class WandB(Tracker):
    """Config, metrics and status of a run for Weights & Biases; files of the mode `offline` are written when it ends."""

    project: str | None = None
    entity: str | None = None
    mode: Literal["online", "offline"] | None = None
    name = "wandb"

    def __post_init__(self) -> None:
        mode = self.mode or ("offline" if os.environ.get("WANDB_MODE") == "offline" else "online")
        address = f"Weights & Biases, {mode}, project {self.project or 'of the name of the run'}"
        modules = ["wandb", "wandb.sdk.wandb_init"]
        self.prepare(address, modules, ["wandb"], project=self.project, entity=self.entity, mode=mode)
        # Unless it is silent, it asks for a key on the terminal; its reports of errors start threads.
        os.environ |= {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"} | os.environ

    def connect(self) -> None:
        """Create the run, or continue it."""
        import wandb

        # A directory may come from someone else, and its state be made for the line after the next.
        number, (name, config, tags) = re.sub(r"\W", "", self.state.uid)[:16], self.shown()
        for folder in (self.directory / "wandb").glob(f"offline-run-*-{number}"):
            shutil.rmtree(folder)  # the new one has everything
        quiet: dict[str, Any] = {"console": "off", "silent": True, "disable_git": True, "disable_code": True}
        quiet |= {"x_disable_stats": True, "x_disable_meta": True, "init_timeout": 10}
        # Otherwise a process waits for a dead server when it ends.
        quiet |= {"finish_timeout": max(self.wait_s, 1.0), "finish_timeout_raises": True}
        given: dict[str, Any] = {"project": self.project or str(config.get("name", "data")), "entity": self.entity}
        given |= {"id": number, "name": name, "group": name.rpartition("/")[0] or None, "notes": config.get("notes")}
        given |= {"tags": [str(label)[:64] for label in config.get("tags") or []], "config": config | tags}
        given |= {"dir": str(self.directory.absolute()), "mode": self.settings["mode"]}
        given |= {"resume": "allow" if self.live else None, "reinit": "create_new"}  # jobs of a sweep follow each other
        self._run = wandb.init(settings=wandb.Settings(**quiet), **given)
        self._run.define_metric("global_step")
        self._run.define_metric("*", step_metric="global_step")
        if not self.live or self._run.step < self.state.count:  # some did not arrive; W&B drops steps that it has
            self.state.sent, self.state.count = {}, 0

    def send(self, points: list[dict[str, Any]], first: int, times: list[int]) -> None:
        """Send points; W&B's steps are their numbers."""
        for number, (point, time_ms) in enumerate(zip(points, times, strict=False), start=first):
            fixed = {"global_step": point["global_step"], "epoch": point.get("epoch"), "_timestamp": time_ms / 1000}
            self._run.log(fixed | _values(point), step=number, commit=True)

    def end(self, status: str, error: str) -> None:
        """Set the status, and complete the files."""
        import wandb

        if error:
            self._run.summary["error"] = error
        if status == "preempted":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if status == "finished" else 1)
        if not self.live and wandb.run is None:  # not if the user has a run, which would end too
            wandb.teardown()  # finish() returns before the file is written, which takes seconds on a busy machine


TRACKERS: dict[str, type[MLflow] | type[WandB]] = {"mlflow": MLflow, "wandb": WandB}


def stored_settings(directory: Path, name: str) -> dict[str, Any]:
    """Keys of a tracker, from its state or, if that is missing or damaged, from the config; empty without such a tracker."""
    settings = read_json(directory / "trackers" / f"{name}.json").get("settings")
    path, target = directory / "config.yaml", f"{TRACKERS[name].__module__}.{TRACKERS[name].__name__}"
    if settings or not path.exists() or target not in (text := read_regular(path).decode()):
        return settings or {}
    nodes = stored.load(text, str(path))["logger"].values()
    return next((node for node in nodes if node.pop("_target_") == target), {})


def sentence_of(error: BaseException, address: str) -> str:
    """The innermost message of an error, on one line, without secrets; clients wrap that of the system several times."""
    deepest = error
    while (inner := deepest.__cause__ or deepest.__context__) is not None:
        deepest = inner
    system = (deepest.strerror or str(deepest)).lower() if isinstance(deepest, OSError) else ""
    text = clean(mask_text(f"{address}: {system or error or type(error).__name__}"))
    return textwrap.shorten(text.strip().removesuffix("."), 300, placeholder=" ...")


def _values(point: dict[str, Any]) -> dict[str, float]:
    """The metrics of a point, such as `val/accuracy`; NaN for what is null or no number."""
    metrics = {key: value for key, value in point.items() if key not in ("global_step", "epoch", "split")}
    numbers = {key: value for key, value in metrics.items() if type(value) in (int, float) and abs(value) < 2**1023}
    return {f"{point['split']}/{key}": float(numbers.get(key, math.nan)) for key in metrics}


def _allowed(name: str) -> str:
    """A name with the characters that MLflow allows."""
    return re.sub(r"[^\w\-. /]", "_", name)
