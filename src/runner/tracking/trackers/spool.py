"""Which points of `metrics.jsonl` a tracker has, and which are still to be sent.

`metrics.jsonl` is the spool: a run only appends to it. `trackers/NAME/state.json` is written by the process that feeds the
tracker, and by nothing else.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
import uuid
from pathlib import Path
from typing import Any

from runner.config import stored
from runner.config.changes import changes_result
from runner.config.keys import flatten, within
from runner.config.reading import read_regular, read_summary
from runner.config.secrets import mask_values
from runner.tracking.files import write_json
from runner.tracking.jsonl import parse, read_records

FOLDER = "trackers"
_LARGEST = 2**24  # bytes of a state; ours have a few thousand
_MOST_VALUES = 900  # in a batch: MLflow takes at most 1,000

Point = dict[str, Any]
"""A line of `metrics.jsonl`: `global_step`, `epoch`, `split` and the metrics, None for NaN and infinities."""


class Spool:
    """The points of one run for one tracker.

    Attributes:
        state: what `state.json` holds: `id` of the tracker's run, `uid` that its creation is recognised by, `sent` (the last
            step of each split) and `count` of the confirmed points, `outbox` (points that may or may not have arrived, with
            the time they are sent under), `ended` (the status that the tracker was told), and what else a client needs.

    Args:
        directory: the run directory.
        name: of the tracker, such as `mlflow`.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self.directory, self.name = directory, name
        self.folder = directory / FOLDER / name
        self._path = self.folder / "state.json"
        self.state: dict[str, Any] = {
            "settings": {},
            "uid": uuid.uuid4().hex,
            "id": None,
            "sent": {},
            "count": 0,
            "outbox": None,
            "settled": None,
            "ended": None,
            "config": None,
            "superseded": [],
        }
        if self._path.exists():
            self.state |= json.loads(read_regular(self._path, _LARGEST))
        self._forget()

    def save(self, **changes: Any) -> None:
        """Change the state; atomic.

        Raises:
            UserError: it cannot be written; then nothing has changed.
        """
        write_json(self._path, self.state | changes)
        self.state |= changes

    def begin(self, settings: dict[str, Any], resume_step: int, again: bool) -> None:
        """A run starts or resumes.

        A resumed run logs the steps after its checkpoint again, with the same values: they stay as they were sent. If they
        get other values, since the config is another or the run was rolled back, the points go to a new run of the tracker.

        Args:
            settings: keys of the tracker.
            resume_step: the last step that is still valid.
            again: whether this process has begun with the run before: it was rolled back.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        config = self._config_that_matters()
        obsolete = any(step > resume_step for step in self._reached().values())
        fresh: dict[str, Any] = {}
        if obsolete and (again or config != self.state["config"]):
            fresh = {"uid": uuid.uuid4().hex, "id": None, "sent": {}, "count": 0, "outbox": None, "settled": None}
            fresh["superseded"] = [*self.state["superseded"], self.state["id"]]
        # A model that was uploaded is not that of the steps to come.
        self.save(settings=mask_values(settings), config=config, ended=None, model=None, **fresh)
        self._forget()

    def take(self) -> list[Point]:
        """The next points to send: those of the outbox, or new ones, which are put there first; empty if there are none."""
        if self.state["outbox"] is None:
            self._read()
            if not self._waiting:
                return []
            values, count = 0, 0
            for point in self._waiting:
                values += len(point)
                if count and values > _MOST_VALUES:
                    break
                count += 1
            self.save(outbox={"time": time.time(), "points": self._waiting[:count]})
            del self._waiting[:count]
        return list(self.state["outbox"]["points"])

    def confirm(self, count: int | None = None) -> None:
        """The points of the outbox have arrived, or the first `count` of them."""
        points = self.state["outbox"]["points"]
        arrived, rest = points[:count], points[len(points[:count]) :]
        outbox = self.state["outbox"] | {"points": rest} if rest else None
        self.save(sent=_reached(self.state["sent"], arrived), count=self.state["count"] + len(arrived), outbox=outbox)

    def recount(self, known: int) -> None:
        """The tracker says how many points it has: put the position there."""
        more = known - self.state["count"]
        if more > 0 and self.state["outbox"]:
            self.confirm(more)
        elif more < 0:
            records = _unique(read_records(self.directory / "metrics.jsonl"), {})
            self.save(sent=_reached({}, records[:known]), count=known, outbox=None)
            self._forget()

    def settle(self) -> dict[str, Any]:
        """What to keep in the state so that `go_back` comes back to this position."""
        return {"settled": {"sent": self.state["sent"], "count": self.state["count"]}}

    def go_back(self) -> None:
        """Go back to the position that was settled last, or to the start: what was confirmed since has not arrived."""
        settled = self.state["settled"] or {"sent": {}, "count": 0}
        self.save(**settled, outbox=None)
        self._forget()

    def left(self) -> int:
        """How many points are not confirmed."""
        self._read()
        return len(self._waiting) + len((self.state["outbox"] or {"points": []})["points"])

    def status(self, dead: bool) -> str | None:
        """How the run ended, None while it goes on; `dead` says that its process does not live, whatever the summary says."""
        status = (read_summary(self.directory) or {}).get("status")
        if status in ("finished", "failed", "preempted"):
            return str(status)
        return "killed" if dead else None

    def config(self) -> dict[str, Any]:
        """The resolved config, flat."""
        text = read_regular(self.directory / "config.yaml").decode()
        return flatten(stored.load(text, str(self.directory)))

    def _config_that_matters(self) -> str:
        """Digest of the keys that change the metrics; where the run computes is not one of them."""
        config = {key: str(value) for key, value in self.config().items() if changes_result(key)}
        elsewhere = ("device", "devices", "strategy", "threads", "dist", "fsdp")
        matters = sorted(item for item in config.items() if not within(item[0], elsewhere))
        return hashlib.sha256(json.dumps(matters).encode()).hexdigest()

    def _forget(self) -> None:
        self._identity, self._offset = (0, 0), 0
        self._waiting: list[Point] = []
        self._seen = self._reached()

    def _reached(self) -> dict[str, int]:
        """The last step of each split that may have arrived."""
        return _reached(self.state["sent"], (self.state["outbox"] or {"points": []})["points"])

    def _read(self) -> None:
        """Add new lines to what waits; from the start if the file was replaced, as a resumed run does."""
        try:
            file = (self.directory / "metrics.jsonl").open("rb")
        except FileNotFoundError:
            return
        with file:
            info = os.fstat(file.fileno())
            if (info.st_dev, info.st_ino) != self._identity or info.st_size < self._offset:
                self._forget()
                self._identity = info.st_dev, info.st_ino
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        self._waiting += _unique([record for line in whole.splitlines() if (record := parse(line))], self._seen)


def _reached(sent: dict[str, int], points: list[Point]) -> dict[str, int]:
    return sent | {point["split"]: point["global_step"] for point in points}


def _unique(records: list[Point], seen: dict[str, int]) -> list[Point]:
    """The points after those that were `seen`, the last step of each split; it is brought up to date."""
    found = []
    for record in records:
        split = str(record.setdefault("split", ""))
        if record["global_step"] > seen.get(split, -1):
            seen[split] = record["global_step"]
            found.append(record)
    return found
