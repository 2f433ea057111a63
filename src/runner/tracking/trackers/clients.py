"""The trackers' own clients behind one small interface; used only in the process that feeds them."""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Protocol

from runner.tracking.trackers.facts import Facts
from runner.tracking.trackers.spool import Point, Spool

_TIMEOUT_S = 10
_LONGEST_PARAM = 6000  # characters that MLflow stores
_MOST_PARAMS = 100  # in a request
_FIXED = ("global_step", "epoch", "split")
_FILES = ("config.yaml", "overrides.yaml", "environment.json", "summary.json", "run.log", "plots/curves.png")


class Client(Protocol):
    """One run of a tracker. Every method may raise anything; it is called again later, maybe in another process."""

    live: bool
    """Whether points are sent while the run goes on, or all at its end."""

    def open(self, spool: Spool, settings: dict[str, Any]) -> None:
        """Create the tracker's run, or go on with it, and correct the position if the tracker knows better."""
        ...

    def send(self, points: list[Point], first: int, time_s: float) -> None:
        """Send points; the same ones sent twice must be there once.

        Args:
            points: to send.
            first: number of the first one among all points of the run, from 0.
            time_s: seconds since 1970, the same for the same points.
        """
        ...

    def end(self, status: str, error: str | None) -> dict[str, Any]:
        """The run ended as finished, failed, preempted or killed; returns what to keep in the state."""
        ...


def values_of(point: Point) -> dict[str, float]:
    """The metrics of a point, `val/accuracy`; NaN for what is null."""
    return {
        f"{point['split']}/{name}": math.nan if value is None else float(value)
        for name, value in point.items()
        if name not in _FIXED and isinstance(value, int | float | None)
    }


class MLflowClient:
    """MLflow, through its `MlflowClient`."""

    live = True
    _STATUS: ClassVar = {"finished": "FINISHED", "failed": "FAILED", "preempted": "KILLED", "killed": "KILLED"}

    def open(self, spool: Spool, settings: dict[str, Any]) -> None:
        """See `Client.open`."""
        # Its own retries take minutes, and the feeder has its own.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(_TIMEOUT_S))
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
        os.environ.setdefault("MLFLOW_ENABLE_ASYNC_LOGGING", "false")
        from mlflow.tracking import MlflowClient as Official

        facts = Facts.of(spool)
        self._spool, self._settings = spool, settings
        self._client = client = Official(tracking_uri=settings["tracking_uri"])
        if spool.state["id"] is None:
            spool.save(id=self._find_or_create(facts))
        self._id: str = spool.state["id"]
        known = client.get_run(self._id)
        if known.info.status != "RUNNING":
            client.update_run(self._id, status="RUNNING")
        self._log_params(facts, known.data.params)
        for old in filter(None, spool.state["superseded"]):
            client.set_tag(old, "runner.replaced_by", self._id)

    def _find_or_create(self, facts: Facts) -> str:
        """The id of the run; one that was created by a request without an answer is found by its tag."""
        client, name = self._client, self._settings["experiment"] or facts.experiment
        found = client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else client.create_experiment(name)
        uid = facts.tags["runner.uid"]
        if runs := client.search_runs([experiment], f"tags.`runner.uid` = '{uid}'", max_results=1):
            return str(runs[0].info.run_id)
        tags = facts.tags | dict.fromkeys(facts.words, "true")
        tags |= {"mlflow.note.content": facts.notes} if facts.notes else {}
        return str(client.create_run(experiment, tags=tags, run_name=facts.name).info.run_id)

    def _log_params(self, facts: Facts, known: dict[str, str]) -> None:
        """Log the config; a parameter cannot change, so a changed one becomes a tag."""
        from mlflow.entities import Param, RunTag

        now = {_allowed(key): str(value)[:_LONGEST_PARAM] for key, value in facts.config.items()}
        params = [Param(key, value) for key, value in now.items() if key not in known]
        tags = [RunTag(f"changed.{key}", now[key]) for key in now if known.get(key, now[key]) != now[key]]
        for start in range(0, max(len(params), len(tags)), _MOST_PARAMS):
            part = slice(start, start + _MOST_PARAMS)
            self._client.log_batch(self._id, params=params[part], tags=tags[part])

    def send(self, points: list[Point], first: int, time_s: float) -> None:
        """See `Client.send`; MLflow stores metrics of one time, step and value once."""
        from mlflow.entities import Metric

        metrics = [
            Metric(_allowed(name), value, round(time_s * 1000), point["global_step"])
            for point in points
            for name, value in values_of(point).items()
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def end(self, status: str, error: str | None) -> dict[str, Any]:
        """See `Client.end`."""
        if error:
            self._client.set_tag(self._id, "runner.error", error[:_LONGEST_PARAM])
        if self._settings["artifacts"]:
            for name in _FILES:
                if (path := self._spool.directory / name).is_file():
                    self._client.log_artifact(self._id, str(path), name.rpartition("/")[0] or None)
        kept = {}
        if status == "finished" and (self._settings.get("model") or self._settings.get("register")):
            kept = {"model": self._spool.state.get("model") or self._log_model()}
        self._client.set_terminated(self._id, self._STATUS[status])
        return kept

    def _log_model(self) -> str:
        """Upload the best checkpoint as a model; returns its address."""
        from runner.tracking.trackers.mlflow_model import log_model

        best = self._spool.directory / "checkpoints" / "best.safetensors"
        last = best.with_name("last.safetensors")
        uri, name = self._settings["tracking_uri"], self._settings.get("register")
        address = log_model(best if best.exists() else last, uri, self._id, name)
        self._spool.save(model=address)
        return address


class WandBClient:
    """Weights & Biases: online, or into files in `wandb/` of the run directory that `wandb sync` uploads.

    Offline, its files are complete only once it has finished, so that all points are written when the run ends; files of an
    attempt that did not finish are removed.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.live = settings["mode"] == "online"

    def open(self, spool: Spool, settings: dict[str, Any]) -> None:
        """See `Client.open`."""
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self._spool, facts, mode = spool, Facts.of(spool), settings["mode"]
        if spool.state["id"] is None:
            spool.save(id=spool.state["uid"][:16])
        self._segments: list[str] = list(spool.state.get("segments", []))
        if mode == "offline":
            for folder in (spool.directory / "wandb").glob(f"offline-run-*-{spool.state['id']}"):
                if folder.name not in self._segments:
                    shutil.rmtree(folder)
            spool.go_back()
        self._run = wandb.init(
            project=settings["project"] or facts.experiment,
            entity=settings["entity"],
            mode=mode,
            id=spool.state["id"],
            resume="allow" if mode == "online" else None,
            name=facts.name,
            group=facts.group,
            tags=[word[:64] for word in facts.words],
            notes=facts.notes,
            config=facts.config,
            dir=str(spool.directory.absolute()),
            reinit="create_new",  # jobs of a sweep follow each other
            settings=wandb.Settings(
                console="off",
                silent=True,
                init_timeout=_TIMEOUT_S,
                disable_git=True,
                disable_code=True,
                x_disable_stats=True,
                x_disable_meta=True,
            ),
        )
        self._run.define_metric("global_step")
        self._run.define_metric("*", step_metric="global_step")
        if mode == "online":
            spool.recount(self._run.step)

    def send(self, points: list[Point], first: int, time_s: float) -> None:
        """See `Client.send`; W&B drops steps that it has, and its steps are the numbers of the points."""
        for number, point in enumerate(points, start=first):
            fixed = {"global_step": point["global_step"], "epoch": point.get("epoch")}
            self._run.log(fixed | values_of(point), step=number, commit=True)

    def end(self, status: str, error: str | None) -> dict[str, Any]:
        """See `Client.end`."""
        if error:
            self._run.summary["error"] = error
        if status == "preempted":
            self._run.mark_preempting()
        folder = Path(self._run.dir).parent.name
        self._run.finish(exit_code=0 if status == "finished" else 1)
        return {} if self.live else {"segments": [*self._segments, folder], **self._spool.settle()}


def _allowed(name: str) -> str:
    """A name with the characters that MLflow allows."""
    return re.sub(r"[^\w\-. /]", "_", name)


CLIENTS: dict[str, Callable[[dict[str, Any]], Client]] = {
    "mlflow": lambda settings: MLflowClient(),
    "wandb": WandBClient,
}
"""How the client of a tracker is made from its settings."""
