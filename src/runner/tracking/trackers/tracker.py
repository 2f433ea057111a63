"""A logger whose thread sends `metrics.jsonl` to a tracker. That file is the queue: nothing is lost while a server fails."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import itertools
import json
import os
import queue
import shlex
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from runner.config import stored
from runner.config.changes import other_run
from runner.config.errors import UserError
from runner.config.keys import flatten
from runner.config.reading import open_regular, read_json, read_regular, read_summary
from runner.config.secrets import is_masked, mask_text, mask_values
from runner.tracking.files import write_json
from runner.tracking.formats import clean
from runner.tracking.jsonl import parse
from runner.tracking.loggers import METRICS

Point = dict[str, Any]
"""A line of `metrics.jsonl`: `global_step`, `epoch`, `split` and the metrics, None for NaN and infinities."""

_IMPORT_S = 0.6  # CPU time that the first import is expected to take
_MOST_VALUES = 900  # in a request: MLflow takes at most 1,000
_MOST_TIMES = 100_000  # of points that wait, in memory
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0  # while there is nothing to send, and after failures
_IMPORTS = threading.RLock()
if hasattr(os, "register_at_fork"):
    # A process that is forked during an import would wait for ever once it imports the same module.
    os.register_at_fork(before=_IMPORTS.acquire, after_in_parent=_IMPORTS.release, after_in_child=_IMPORTS.release)


@dataclasses.dataclass
class State:
    """How far a run was sent to a tracker: the content of `trackers/NAME.json`."""

    settings: dict[str, Any]  # keys of the tracker, secrets masked
    config: str = ""  # digest of the keys that change metrics
    uid: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)  # of the tracker's run
    replaces: str = ""  # uid of the tracker's run whose points got other values
    sent: dict[str, int] = dataclasses.field(default_factory=dict)  # last step of each split that has arrived
    count: int = 0  # points that have arrived
    times: list[int] = dataclasses.field(default_factory=list)  # of points that may have arrived, in ms since 1970
    folders: list[str] = dataclasses.field(default_factory=list)  # complete ones of W&B's offline mode
    ended: str | None = None  # status that the tracker was given


class Tracker:
    """What the loggers of all trackers share; see `Logger` for what a run calls. `settings` identify the tracker's run."""

    name: ClassVar[str]  # of the tracker, and of the extra of this package
    address: str  # where points go, without secrets
    modules: list[str]  # of the client, imported one after the other
    connect: Callable[[], None]  # creates the tracker's run, or goes on with it
    send: Callable[[list[Point], int, list[int]], None]  # points, number of the first one, and times that stay the same
    end: Callable[
        [str, str], None
    ]  # the run as finished, failed, preempted or killed, with an error or an empty string

    def __init__(
        self, needs: Sequence[str], max_share: float, wait_s: float, warn: Callable[[str], None], **settings: Any
    ) -> None:
        if wait_s < 0:
            raise ValueError(f"wait_s must be at least 0, got {wait_s}")
        if not 0 < max_share <= 1:
            raise ValueError(f"max_share must be above 0 and at most 1, got {max_share}")
        if missing := [module for module in needs if importlib.util.find_spec(module) is None]:
            problem = f"needs {' and '.join(missing)}, which is not installed"
            raise UserError(f"logger.{self.name}", problem, f"pip install 'runner[{self.name}]', or logger=none")
        self.settings, self._max_share, self.wait_s, self._warn = settings, max_share, wait_s, warn
        self._live = settings.get("mode") != "offline"  # whether points are sent before the run ends
        self._connected = self._cancelled = self._warned = False
        self._trouble, self._thread = "", threading.Thread(target=self._work, name=f"runner-{self.name}", daemon=True)
        self._times = dict[tuple[str, int], float]()
        self._todo = queue.SimpleQueue[Callable[[], bool]]()

    def open(self, directory: Path, resume_step: int | None) -> None:
        """Start the thread, or let it know that the run was rolled back."""
        again = self._thread.is_alive()
        self._todo.put(functools.partial(self.begin, resume_step or 0, again))
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
            secret = is_masked(mask_values(self.settings).get("tracking_uri"))
            hint = " (with the address in MLFLOW_TRACKING_URI, as files do not store its password)" if secret else ""
            command = f"python -m runner sync {shlex.quote(str(self.directory))}{hint}"
            self._warn(
                f"{self.name}: {self._trouble}; the run is not affected, and what is missing is sent by: {command}"
            )

    def flush(self) -> None:
        """Nothing waits here."""

    def close(self) -> None:
        """How the run ended is not known yet, see `finish`."""

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
        begun, due, pause, work = time.monotonic(), 0.0, _PAUSE_S, self.advance
        while work != self.deliver:
            try:
                work = self._todo.get(timeout=max(0.0, due - time.monotonic()) if self._live else None)
            except queue.Empty:
                work = self.advance
            try:
                pause, self._trouble = (0.0 if work() else _PAUSE_S), ""
            except (Exception, SystemExit) as error:
                pause, self._trouble = min(max(2 * pause, 2.0), _LONGEST_PAUSE_S), sentence_of(error, self.address)
            used = time.thread_time() + (_IMPORT_S if self.modules else 0.0)
            due = max(time.monotonic() + pause, begun + used / self._max_share)

    def load(self, directory: Path) -> None:
        """Go on with what a run directory knows; with a new run of the tracker, if that is missing or damaged."""
        self.directory, self._path = directory, directory / "trackers" / f"{self.name}.json"
        try:
            self._use(State(**read_json(self._path)))
        except (TypeError, ValueError):
            self._use(State(mask_values(self.settings)))

    def _use(self, state: State) -> None:
        self.state, self._offset, self._left, self._read_until = state, 0, list[Point](), dict(state.sent)

    def _save(self) -> None:
        self._path.parent.mkdir(exist_ok=True)
        write_json(self._path, dataclasses.asdict(self.state))

    def begin(self, resume_step: int, again: bool) -> bool:
        """The run starts, resumes after a step, or was rolled back to it (`again`).

        It logs the steps after its checkpoint again. If they get other values now, since the config is another or the run
        was rolled back, the points go to a new run of the tracker.
        """
        old, settings = self.state, mask_values(self.settings)
        config = old.config if again else self._digest()
        elsewhere = settings | {"artifacts": None} != old.settings | {"artifacts": None}
        obsolete = old.times or any(step > resume_step for step in old.sent.values())
        fresh = elsewhere or (obsolete and (again or config != old.config))
        state = State(settings, replaces="" if elsewhere else old.uid) if fresh else old
        state.settings, state.config, state.ended = settings, config, None
        self._use(state)
        self._save()
        if fresh and self._connected:
            self._connected = False
            self.end("killed", "")
        return True

    def config(self) -> dict[str, Any]:
        """The resolved config of the run, flat."""
        return flatten(stored.load(read_regular(self.directory / "config.yaml").decode(), str(self.directory)))

    def _digest(self) -> str:
        """Of the keys that change the metrics; where the run computes and where its data lies are not among them."""
        config = sorted(
            (key, str(value)) for key, value in self.config().items() if other_run(key) and key != "data.root"
        )
        return hashlib.sha256(json.dumps(config).encode()).hexdigest()

    def next_points(self) -> list[Point]:
        """Points to send, as many as fit into a request; of those that a resumed run writes again, none that was sent."""
        if not self._left and (path := self.directory / METRICS).exists():
            with open_regular(path) as file:
                file.seek(self._offset)
                *lines, torn = (data := file.read()).split(b"\n")
            self._offset += len(data) - len(torn)
            for point in filter(None, map(parse, lines)):
                split, step = str(point.get("split", "")), point["global_step"]
                if self._read_until.get(split, -1) < step < 2**53:
                    self._read_until[split] = step
                    self._left.append(point | {"split": split})
        sizes = itertools.accumulate(map(len, self._left))
        return self._left[: max(1, sum(size <= _MOST_VALUES for size in sizes))]

    def advance(self) -> bool:
        """Import a module, connect, or send a request, whatever comes next; False if nothing is left."""
        state = self.state
        if self.modules:
            with _IMPORTS:
                importlib.import_module(self.modules[0])
            del self.modules[0]
        elif not self._connected:
            self.connect()
            self._use(state)
            self._connected = True
        elif points := self.next_points():
            # The points whose times are stored may have arrived, and then are there once only under the same time.
            logged = [(point["split"], point["global_step"]) for point in points[len(state.times) :]]
            state.times += [round(1000 * self._times.pop(each, time.time())) for each in logged]
            if self._live:
                self._save()
            self.send(points, state.count, state.times)
            state.sent |= {point["split"]: point["global_step"] for point in points}
            state.count += len(points)
            del self._left[: len(points)], state.times[: len(points)]
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


def sentence_of(error: BaseException, address: str) -> str:
    """What an error says in the end, on one line, without secrets; clients wrap that of the system several times."""
    deepest = error
    while (inner := deepest.__cause__ or deepest.__context__) is not None:
        deepest = inner
    system = (deepest.strerror or str(deepest)).lower() if isinstance(deepest, OSError) else ""
    text = " ".join(clean(mask_text(f"{address}: {system or error or type(error).__name__}")).split())
    return f"{text[:300].rpartition(' ')[0]} ..." if len(text) > 300 else text.removesuffix(".")
