"""Loggers that send a run to MLflow or W&B, in a thread; see `Background` for what happens if a server fails."""

from __future__ import annotations

import hashlib
import html
import math
import os
import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from runner.base.errors import nearest, require
from runner.base.files import write_json
from runner.base.reading import read_json, read_regular, read_summary
from runner.base.secrets import mask_text, mask_values
from runner.config import stored
from runner.config.changes import other_run
from runner.config.keys import at, flatten
from runner.tracking.loggers import Background, Row

_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
_SCHEMES = ("http", "https", *_DATABASES, "file", "databricks", "uc", "databricks-uc")
_FILES = (
    "config.yaml", "overrides.yaml", "environment.json", "summary.json", "run.log", "plots/curves.png",
    "pictures/train_batch.png", "pictures/predictions.png",
)  # fmt: skip
_LONGEST, _MOST_PARAMS, _MOST_METRICS = 6000, 100, 1000  # characters that MLflow stores, and values in a request


@dataclass(kw_only=True, eq=False)
class Tracker(Background):
    """Base of the loggers of trackers; `trackers/NAME.json` in the run directory names the tracker's run.

    A resumed run continues the tracker's run. Steps that an earlier attempt sent are not sent again, unless the config has
    changed, as they have other values then.
    """

    uid: str = field(init=False, default="")  # of the tracker's run
    deliver: ClassVar[Callable[..., None]]  # a list of rows

    def prepare(self, address: str, modules: list[str], needs: list[str], **settings: Any) -> None:
        """Set where rows go (without secrets), modules to import, those that must be installed, and what identifies the run."""
        if self.wait_s < 0:
            raise ValueError(f"wait_s must be at least 0, got {self.wait_s}")
        require(f"logger.{self.name}", f"runner[{self.name}]", *needs, otherwise=", or logger=none")
        self.address, self.modules, self.settings = address, modules, settings
        self._sent = dict[str, int]()  # last step of each split that has arrived
        super().__post_init__()

    def shown(self) -> tuple[str, dict[str, Any], dict[str, str]]:
        """Find the tracker's run; gives its name (in a sweep with that of its folder), the flat config, and tags."""
        directory, parent = self.directory.absolute(), self.directory.absolute().parent
        config = flatten(stored.load(read_regular(directory / "config.yaml").decode(), str(directory)))
        # Where the run computes and where its data lies does not change its metrics
        kept = sorted((key, str(value)) for key, value in config.items() if other_run(key) and key != "data.root")
        facts = {"settings": mask_values(self.settings), "config": hashlib.sha256(repr(kept).encode()).hexdigest()}
        self._path, self._facts = directory / "trackers" / f"{self.name}.json", facts
        if not self.uid:
            old = read_json(self._path) or {}
            settings, uid, sent = (old.get(key) for key in ("settings", "uid", "sent"))
            here = isinstance(settings, dict) and facts["settings"].items() <= settings.items() and uid
            # A directory may come from someone else
            self.uid = re.sub(r"\W", "", str(uid))[:32] if here else uuid.uuid4().hex
            if here and isinstance(sent, dict) and old.get("config") == facts["config"]:
                self._sent = {split: step for split, step in sent.items() if type(step) is int}
            self._save()
        in_sweep = (parent / "sweep.jsonl").exists()
        commit = at(read_json(directory / "environment.json"), "git.commit")
        tags = {"runner.uid": self.uid, "mlflow.source.git.commit": commit, "runner.directory": str(directory)}
        tags |= {"runner.sweep": str(parent) * in_sweep}
        name = f"{parent.name}/{directory.name}" if in_sweep else directory.name
        return name, config, {key: value for key, value in tags.items() if value and type(value) is str}

    def send(self, rows: list[Row]) -> None:
        """Send rows but those that an earlier attempt sent, and note it."""
        if new := [row for row in rows if row.global_step > self._sent.get(row.split, -1)]:
            self.deliver(new)
            self._sent |= {row.split: row.global_step for row in new}
            self._save()

    def _save(self) -> None:
        self._path.parent.mkdir(exist_ok=True)
        write_json(self._path, {"uid": self.uid, **self._facts, "sent": self._sent})

    def outcome(self) -> tuple[str, str]:
        """How the run ended, as its summary says (killed without one), and its error, which may be empty."""
        summary = read_summary(self.directory) or {}
        status = summary["status"] if summary.get("status") in ("finished", "failed", "preempted") else "killed"
        return status, str(summary.get("error") or "")


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
            uri = f"sqlite:///{Path(uri.removeprefix('sqlite:///')).absolute()}"  # a run may be resumed from elsewhere
        elif "://" not in uri and not uri.startswith("databricks"):
            raise ValueError(f"tracking_uri must be an address such as http://localhost:5000, got {uri}")
        scheme = uri.partition(":")[0].partition("+")[0]
        # Packages may add others, so only what looks like a slip is refused.
        if "://" in uri and scheme not in _SCHEMES and (close := nearest(scheme, _SCHEMES, 0.75)):
            raise ValueError(f"tracking_uri begins with {scheme}:, got {uri}; did you mean {close}:?")
        needs = ["mlflow", *(["sqlalchemy", "alembic"] if scheme == "sqlite" else [])]
        modules = ["mlflow.tracking", *["mlflow.store.tracking.sqlalchemy_store"] * (scheme in _DATABASES)]
        self.prepare(mask_text(uri), modules, needs, tracking_uri=uri, experiment=self.experiment)
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
        experiment = self.experiment or str(config["name"])
        known = client.get_experiment_by_name(experiment)
        number = known.experiment_id if known else client.create_experiment(experiment)
        found = client.search_runs([number], f"tags.`runner.uid` = '{self.uid}'", max_results=1)
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

    def deliver(self, rows: list[Row]) -> None:
        """Send rows; samples as files of the run."""
        from mlflow.entities import Metric

        metrics = [
            Metric(_allowed(key), value, round(1000 * row.time), row.global_step)
            for row in rows
            if row.split != "sample"
            for key, value in _values(row).items()
        ]
        for start in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._id, metrics=metrics[start : start + _MOST_METRICS])
        # Files come last, as they may have another server, whose failure costs no metrics
        for row in rows:
            for path in row.metrics.values() if row.split == "sample" and self.artifacts else ():
                self._client.log_artifact(self._id, str(path), "samples")

    def end(self) -> None:
        """Upload files, and set the status."""
        status, error = self.outcome()
        if error:
            self._client.set_tag(self._id, "runner.error", error[:_LONGEST])
        for name in _FILES if self.artifacts else ():
            # A directory that comes from someone else may have links to other files.
            if (path := self.directory / name).is_file() and not path.is_symlink():
                self._client.log_artifact(self._id, str(path), name.rpartition("/")[0] or None)
        self._client.set_terminated(self._id, {"finished": "FINISHED", "failed": "FAILED"}.get(status, "KILLED"))


@dataclass(kw_only=True, eq=False)
class WandB(Tracker):
    """Config, metrics and status of a run for Weights & Biases, whose client keeps them in `wandb/` of the run directory, too."""

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

        name, config, tags = self.shown()
        quiet: dict[str, Any] = {"console": "off", "silent": True, "disable_git": True, "disable_code": True}
        quiet |= {"x_disable_stats": True, "x_disable_meta": True, "init_timeout": 10}
        # Otherwise a process waits for a dead server when it ends.
        quiet |= {"finish_timeout": max(self.wait_s, 1.0), "finish_timeout_raises": True}
        given: dict[str, Any] = {"project": self.project or str(config["name"]), "entity": self.entity}
        given |= {"id": self.uid[:16], "name": name, "group": name.rpartition("/")[0] or None}
        given |= {"tags": [str(label)[:64] for label in config.get("tags") or []], "notes": config.get("notes")}
        given |= {"config": config | tags, "dir": str(self.directory.absolute()), "mode": self.settings["mode"]}
        given |= {"resume": "allow" if self.settings["mode"] == "online" else None}
        given |= {"reinit": "create_new"}  # jobs of a sweep follow each other
        self._run = wandb.init(settings=wandb.Settings(**quiet), **given)
        self.rest = f"; its client has them in a file: wandb sync {Path(self._run.dir).parent}"
        self._run.define_metric("global_step")
        self._run.define_metric("*", step_metric="global_step")

    def deliver(self, rows: list[Row]) -> None:
        """Send rows; pictures as images, and texts as HTML."""
        import wandb

        def shown(path: Path) -> Any:
            if path.suffix == ".png":
                return wandb.Image(str(path))
            return wandb.Html(f"<pre>{html.escape(path.read_bytes().decode())}</pre>")

        for row in rows:
            fixed = {"global_step": row.global_step, "epoch": row.epoch, "_timestamp": row.time}
            samples = {f"sample/{name}": shown(path) for name, path in row.metrics.items() if row.split == "sample"}
            self._run.log(fixed | (samples or _values(row)), commit=True)

    def end(self) -> None:
        """Set the status, and complete the files."""
        import wandb

        status, error = self.outcome()
        if error:
            self._run.summary["error"] = error
        if status == "preempted":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if status == "finished" else 1)
        if self.settings["mode"] == "offline" and wandb.run is None:  # not if the user has a run, which would end too
            wandb.teardown()  # finish() returns before the file is written, which takes seconds on a busy machine


def _values(row: Row) -> dict[str, float]:
    """The metrics of a row, such as `val/accuracy`; NaN for infinity, as in `metrics.jsonl`."""
    return {
        f"{row.split}/{key}": x if math.isfinite(x := float(value)) else math.nan for key, value in row.metrics.items()
    }


def _allowed(name: str) -> str:
    """A name with the characters that MLflow allows."""
    return re.sub(r"[^\w\-. /]", "_", name)
