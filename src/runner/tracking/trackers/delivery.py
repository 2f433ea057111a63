"""Brings the points of one run to one tracker, from wherever an earlier attempt stopped."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from runner.config.errors import UserError
from runner.config.reading import read_summary
from runner.config.secrets import is_masked, mask_values
from runner.tracking.run_directory import hold, works
from runner.tracking.trackers.clients import CLIENTS, Client
from runner.tracking.trackers.spool import Spool


class Busy(UserError):
    """Another process feeds the tracker with this run: that of an earlier attempt, which does not live long."""


class Delivery:
    """The points of one run on their way to a tracker.

    Args:
        directory: the run directory.
        name: of the tracker.
        settings: keys of the tracker; those of the state if None.

    Raises:
        UserError: the state cannot be read.
    """

    def __init__(self, directory: Path, name: str, settings: dict[str, Any] | None = None) -> None:
        self.directory, self.name = directory, name
        self.over = False  # the run has ended, as far as it is known here
        self.dead = False  # and its process too, or has to prove the opposite
        self._settings = settings
        self._client: Client | None = None
        self._lock: int | None = None
        self._spool: Spool | None = None
        self._beginning: tuple[int, bool] | None = None

    def begin(self, resume_step: int, again: bool) -> None:
        """The run starts, or resumes after a step; see `Spool.begin`."""
        self._beginning, self.over = (resume_step, again), False

    @property
    def address(self) -> str:
        """Where the tracker is, secrets masked; its name if it has only one place."""
        state = self._spool.state["settings"] if self._spool else {}
        return str(mask_values(self._settings or state).get("tracking_uri", self.name))

    @property
    def left(self) -> int:
        """How many points are not confirmed."""
        return self._spool.left() if self._spool else 0

    @property
    def ended(self) -> bool:
        """Whether the tracker knows that the run has ended, and has all points."""
        return self._beginning is None and self._spool is not None and self._spool.state["ended"] is not None

    def advance(self) -> bool:
        """Send what there is, and how the run ended once it has; returns whether the tracker was asked for anything.

        Raises:
            Busy: another process feeds this run.
        Exception: whatever the client raises; call again later.
        """
        spool = self._spool = self._spool or self._opened()
        if self._beginning is not None:
            before = spool.state["uid"]
            spool.begin(self._settings or {}, *self._beginning)
            self._beginning = None
            if self._client is not None and spool.state["uid"] != before:
                replaced, self._client = self._client, None
                replaced.end("killed", None)
        if self.ended and not spool.left():
            return False
        status = spool.status(self.dead and not works(self.directory)) if self.over else None
        if status is None and self._client is not None and not (self._client.live and spool.left()):
            return False
        settings = self._settings or spool.state["settings"]
        client = self._client or CLIENTS[self.name](settings)
        if status is None and not client.live:
            self._client = client
            return False
        if self._client is None or not client.live:
            client.open(spool, settings)
            self._client = client
        while points := spool.take():
            client.send(points, spool.state["count"], spool.state["outbox"]["time"])
            spool.confirm()
        if status is not None:
            error = (read_summary(self.directory) or {}).get("error")
            spool.save(**client.end(status, str(error) if error else None), ended=status)
            self._client = None
        return True

    def sync(self) -> tuple[int, bool]:
        """Send everything from a process that is not the run's: how many points that were, and whether there was anything.

        Raises:
            UserError: another process does so, or the address is secret.
            Exception: whatever the client raises.
        """
        spool = self._spool = self._opened()
        settings = spool.state["settings"]
        if is_masked(settings.get("tracking_uri")):
            if "MLFLOW_TRACKING_URI" not in os.environ:
                problem = f"its address {settings['tracking_uri']} has a password, which is never stored in files"
                raise UserError("sync", problem, "the address in MLFLOW_TRACKING_URI")
            self._settings = settings | {"tracking_uri": os.environ["MLFLOW_TRACKING_URI"]}
        before = spool.state["count"]
        asked = self.advance()
        return spool.state["count"] - before, asked

    def close(self) -> None:
        """Let another process feed the tracker."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _opened(self) -> Spool:
        folder = Spool(self.directory, self.name).folder
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = self._lock if self._lock is not None else hold(folder)
        except UserError as error:
            raise Busy(str(error)) from None
        return Spool(self.directory, self.name)  # read again: nobody else writes it now


def stored_trackers(folder: Path) -> list[Delivery]:
    """What was given to trackers by the runs in a folder, at any depth.

    Raises:
        UserError: if there is none.
    """
    found = [(path.parents[2], path.parent.name) for path in sorted(folder.glob("**/trackers/*/state.json"))]
    if not found:
        raise UserError("sync", f"{folder} has no run with a tracker", "a run of logger=mlflow or logger=wandb")
    return [Delivery(directory, name) for directory, name in found if name in CLIENTS]
