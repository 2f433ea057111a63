"""Loggers that send a run to MLflow, and to Weights & Biases. Their keys are explained in `conf/logger/`."""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from runner.config.errors import nearest
from runner.config.keys import at
from runner.config.reading import read_json
from runner.config.secrets import mask_text
from runner.tracking.trackers.tracker import Point, Tracker

_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
_SCHEMES = ("http", "https", *_DATABASES, "file", "databricks", "uc", "databricks-uc")
_FILES = ("config.yaml", "overrides.yaml", "environment.json", "summary.json", "run.log", "plots/curves.png")
_STATUS = {"finished": "FINISHED", "failed": "FAILED", "preempted": "KILLED", "killed": "KILLED"}
_LONGEST, _MOST_PARAMS, _MOST_METRICS = 6000, 100, 1000  # characters that MLflow stores, and values in a request


def _name_and_tags(tracker: Tracker) -> tuple[str, dict[str, str]]:
    """The name of a run, in a sweep with that of the sweep's folder, and what identifies it."""
    directory, parent = tracker.directory.absolute(), tracker.directory.absolute().parent
    in_sweep = (parent / "sweep.jsonl").exists() or (parent / "multirun.yaml").exists()
    commit = at(read_json(directory / "environment.json"), "git.commit")
    tags = {
        "runner.directory": str(directory),
        "runner.uid": tracker.state.uid,
        "runner.replaces": tracker.state.replaces,
    }
    tags |= {"runner.sweep": str(parent) if in_sweep else "", "mlflow.source.git.commit": str(commit or "").strip(".")}
    return f"{parent.name}/{directory.name}" if in_sweep else directory.name, {k: v for k, v in tags.items() if v}


def _values(point: Point) -> dict[str, float]:
    """The metrics of a point, such as `val/accuracy`; NaN for what is null or no number."""
    metrics = {key: value for key, value in point.items() if key not in ("global_step", "epoch", "split")}
    numbers = {key: value for key, value in metrics.items() if type(value) in (int, float) and abs(value) < 2**1023}
    return {f"{point['split']}/{key}": float(numbers.get(key, math.nan)) for key in metrics}


def _allowed(name: str) -> str:
    """A name with the characters that MLflow allows."""
    return re.sub(r"[^\w\-. /]", "_", name)


class MLflow(Tracker):
    """Params, metrics, status and files of a run for MLflow."""

    name = "mlflow"

    def __init__(
        self,
        tracking_uri: str | None = None,
        experiment: str | None = None,
        artifacts: bool = True,
        max_share: float = 0.005,
        wait_s: float = 10.0,
        warn: Callable[[str], None] = print,
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
        needs = ["mlflow", *(["sqlalchemy", "alembic"] if scheme == "sqlite" else [])]
        super().__init__(needs, max_share, wait_s, warn, tracking_uri=uri, experiment=experiment, artifacts=artifacts)
        self.address = mask_text(uri)
        self.modules = ["mlflow.tracking", *["mlflow.store.tracking.sqlalchemy_store"] * (scheme in _DATABASES)]
        # Its own retries take minutes, it prints into the output of the run, and its telemetry starts threads.
        quiet = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
        quiet |= {"MLFLOW_LOGGING_LEVEL": "ERROR", "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true"}
        os.environ |= quiet | {"MLFLOW_DISABLE_TELEMETRY": "true"} | os.environ

    def connect(self) -> None:
        """Create the run with its params, or find it by its tag, as one may be created without an answer."""
        from mlflow.entities import Param, RunTag
        from mlflow.tracking import MlflowClient

        self._client = client = MlflowClient(tracking_uri=self.settings["tracking_uri"])
        config, (name, tags) = self.config(), _name_and_tags(self)
        experiment = self.settings["experiment"] or str(config.get("name", "data"))
        known = client.get_experiment_by_name(experiment)
        number = known.experiment_id if known else client.create_experiment(experiment)
        found = client.search_runs([number], f"tags.`runner.uid` = '{self.state.uid}'", max_results=1)
        tags |= {str(label): "true" for label in config.get("tags") or []}
        tags |= {"mlflow.note.content": config["notes"]} if config.get("notes") else {}
        run = found[0] if found else client.create_run(number, tags=tags, run_name=name)
        self._id, old = str(run.info.run_id), run.data.params
        if run.info.status != "RUNNING":
            client.update_run(self._id, status="RUNNING")
        # A parameter cannot change.
        now = {_allowed(key): str(value)[:_LONGEST] for key, value in config.items()}
        params = [Param(key, value) for key, value in now.items() if key not in old]
        changed = [RunTag(f"changed.{key}", now[key]) for key in now if old.get(key, now[key]) != now[key]]
        for start in range(0, max(len(params), len(changed)), _MOST_PARAMS):
            part = slice(start, start + _MOST_PARAMS)
            client.log_batch(self._id, params=params[part], tags=changed[part])

    def send(self, points: list[Point], first: int, times: list[int]) -> None:
        """Send points; MLflow stores metrics of one time, step and value once."""
        from mlflow.entities import Metric

        metrics = [
            Metric(_allowed(key), value, time_ms, point["global_step"])
            for point, time_ms in zip(points, times, strict=False)
            for key, value in _values(point).items()
        ]
        for start in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._id, metrics=metrics[start : start + _MOST_METRICS])

    def end(self, status: str, error: str) -> None:
        """Upload files, and set the status."""
        if error:
            self._client.set_tag(self._id, "runner.error", error[:_LONGEST])
        for name in _FILES if self.settings["artifacts"] else ():
            # A directory that comes from someone else may have links to other files.
            if (path := self.directory / name).is_file() and not path.is_symlink():
                self._client.log_artifact(self._id, str(path), name.rpartition("/")[0] or None)
        self._client.set_terminated(self._id, _STATUS[status])


class WandB(Tracker):
    """Config, metrics and status of a run for Weights & Biases.

    Files of the mode `offline` are complete only once W&B has finished, so that all points are written when the run ends.
    """

    name = "wandb"

    def __init__(
        self,
        project: str | None = None,
        entity: str | None = None,
        mode: Literal["online", "offline"] | None = None,
        max_share: float = 0.005,
        wait_s: float = 10.0,
        warn: Callable[[str], None] = print,
    ) -> None:
        mode = mode or ("offline" if os.environ.get("WANDB_MODE") == "offline" else "online")
        super().__init__(["wandb"], max_share, wait_s, warn, project=project, entity=entity, mode=mode)
        self.address = f"Weights & Biases, {mode}, project {project or 'of the name of the run'}"
        self.modules = ["wandb", "wandb.sdk.wandb_init"]
        # Unless it is silent, it asks for a key on the terminal; its reports of errors start threads.
        os.environ |= {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false"} | os.environ

    def connect(self) -> None:
        """Create the run, or go on with it."""
        import wandb

        config, number, offline = self.config(), self.state.uid[:16], self.settings["mode"] == "offline"
        for folder in [*(self.directory / "wandb").glob("offline-run-*")] if offline else []:
            if folder.name.endswith(f"-{number}") and folder.name not in self.state.folders:
                shutil.rmtree(folder)  # of an attempt that did not finish
        name, tags = _name_and_tags(self)
        quiet: dict[str, Any] = {
            "console": "off",
            "silent": True,
            "disable_git": True,
            "disable_code": True,
            "x_disable_stats": True,
        }
        # Without the last two, a process waits for a dead server when it ends.
        quiet |= {"x_disable_meta": True, "init_timeout": 10}
        quiet |= {"finish_timeout": max(self.wait_s, 1.0), "finish_timeout_raises": True}
        self._run = wandb.init(
            project=self.settings["project"] or str(config.get("name", "data")),
            entity=self.settings["entity"],
            mode=self.settings["mode"],
            id=number,
            resume=None if offline else "allow",
            name=name,
            group=name.rpartition("/")[0] or None,
            tags=[str(label)[:64] for label in config.get("tags") or []],
            notes=config.get("notes"),
            config=config | tags,
            dir=str(self.directory.absolute()),
            reinit="create_new",  # jobs of a sweep follow each other
            settings=wandb.Settings(**quiet),
        )
        self._run.define_metric("global_step")
        self._run.define_metric("*", step_metric="global_step")
        if not offline and self._run.step < self.state.count:  # some did not arrive; W&B drops steps that it has
            self.state.sent, self.state.count = {}, 0

    def send(self, points: list[Point], first: int, times: list[int]) -> None:
        """Send points; W&B's steps are their numbers."""
        for number, (point, time_ms) in enumerate(zip(points, times, strict=False), start=first):
            fixed = {"global_step": point["global_step"], "epoch": point.get("epoch"), "_timestamp": time_ms / 1000}
            self._run.log(fixed | _values(point), step=number, commit=True)

    def end(self, status: str, error: str) -> None:
        """Set the status, and complete the files."""
        if error:
            self._run.summary["error"] = error
        if status == "preempted":
            self._run.mark_preempting()
        folder = Path(self._run.dir).parent.name
        self._run.finish(exit_code=0 if status == "finished" else 1)
        if self.settings["mode"] == "offline":
            import wandb

            if wandb.run is None:  # otherwise this would end a run of the user's own
                wandb.teardown()  # finish() returns before the file is written, which takes seconds on a busy machine
            self.state.folders.append(folder)


TRACKERS: dict[str, type[MLflow] | type[WandB]] = {"mlflow": MLflow, "wandb": WandB}
"""The loggers by the names of their trackers."""
