"""A tracking server in this process that knows the few requests of MLflow that the program sends, and fails on demand."""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

from local_server import LocalServer


class FakeMLflow(LocalServer):
    """Keeps runs in memory; like MLflow's database, it keeps a metric of one time, step and value once.

    Attributes:
        failure: how requests are answered: "" as they should be, "hang" after `hang_s`, "500", "die" without an answer
            after the request was obeyed, "slow" obeyed and answered after `slow_s`, "full" as a server whose disk is full
            answers.
    """

    def __init__(self, artifacts: Path) -> None:
        self.runs: dict[str, dict[str, Any]] = {}
        self.experiments: list[str] = []
        self.failure, self.hang_s, self.slow_s, self.requests = "", 60.0, 1.5, 0
        self.script: list[str] = []  # failures of the next requests, which come first
        self._artifacts = artifacts
        self._free = threading.Event()

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen, on the same port as before."""
        fake, self._free = self, threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                url = urlparse(self.path)
                fake.handle(self, url.path, {key: value[0] for key, value in parse_qs(url.query).items()})

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                fake.handle(self, self.path, json.loads(body or b"{}"))

        self.listen(Handler)

    def stop(self) -> None:
        """Refuse connections from now on."""
        self._free.set()
        super().stop()

    def handle(self, request: BaseHTTPRequestHandler, path: str, given: dict[str, Any]) -> None:
        self.requests += 1
        failure = self.script.pop(0) if self.script else self.failure
        name = path.partition("/mlflow/")[2]
        if failure in ("500", "full"):
            message = "disk full" if failure == "full" else "broken"
            return self._answer(request, 500, {"error_code": "INTERNAL_ERROR", "message": message})
        if failure == "hang":
            self._free.wait(self.hang_s)
            return None
        if failure == "slow":
            time.sleep(self.slow_s)
        status, answer = self._obey(name.replace("/", "_").replace("-", "_"), given)
        if failure == "die":
            request.close_connection = True
            request.connection.close()
            return None
        return self._answer(request, status, answer)

    def _answer(self, request: BaseHTTPRequestHandler, status: int, answer: dict[str, Any]) -> None:
        data = json.dumps(answer).encode()
        try:
            request.send_response(status)
            request.send_header("Content-Type", "application/json")
            request.send_header("Content-Length", str(len(data)))
            request.end_headers()
            request.wfile.write(data)
        except OSError:
            pass

    def _obey(self, name: str, given: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        found = getattr(self, f"_on_{name}", None)
        if found is None:
            return 404, {"error_code": "ENDPOINT_NOT_FOUND", "message": name}
        return found(given)

    def _on_experiments_get_by_name(self, given: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if given["experiment_name"] not in self.experiments:
            return 404, {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "no experiment"}
        number = str(self.experiments.index(given["experiment_name"]))
        return 200, {"experiment": {"experiment_id": number, "name": given["experiment_name"]}}

    def _on_experiments_create(self, given: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.experiments.append(given["name"])
        return 200, {"experiment_id": str(len(self.experiments) - 1)}

    def _on_runs_create(self, given: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        number = uuid.uuid4().hex  # the client remembers what it knows of an id
        tags = {tag["key"]: tag["value"] for tag in given.get("tags", [])}
        place = str(self._artifacts / number)
        self.runs[number] = {"tags": tags, "params": {}, "metrics": {}, "status": "RUNNING", "artifacts": place}
        self.runs[number] |= {"name": given.get("run_name", ""), "experiment": given["experiment_id"]}
        return 200, {"run": self._shown(number)}

    def _on_runs_search(self, given: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        uid = given["filter"].split("'")[1]
        return 200, {"runs": [self._shown(each) for each, run in self.runs.items() if run["tags"]["runner.uid"] == uid]}

    def _on_runs_get(self, given: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return 200, {"run": self._shown(given["run_id"])}

    def _on_runs_update(self, given: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.runs[given["run_id"]]["status"] = given["status"]
        return 200, {"run_info": self._shown(given["run_id"])["info"]}

    def _on_runs_set_tag(self, given: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.runs[given["run_id"]]["tags"][given["key"]] = given["value"]
        return 200, {}

    def _on_runs_log_batch(self, given: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        run = self.runs[given["run_id"]]
        run["params"] |= {each["key"]: each["value"] for each in given.get("params", [])}
        run["tags"] |= {each["key"]: each["value"] for each in given.get("tags", [])}
        for each in given.get("metrics", []):
            point = (int(each["step"]), str(each["value"]), int(each["timestamp"]))
            run["metrics"].setdefault(each["key"], {})[point] = None
        return 200, {}

    def _shown(self, number: str) -> dict[str, Any]:
        run = self.runs[number]
        info = {"run_id": number, "run_uuid": number, "experiment_id": run["experiment"], "status": run["status"]}
        info |= {"artifact_uri": run["artifacts"], "lifecycle_stage": "active", "run_name": run["name"]}
        data = {kind: [{"key": key, "value": value} for key, value in run[kind].items()] for kind in ("params", "tags")}
        return {"info": info, "data": data, "inputs": {}}

    def steps(self, run: str, key: str) -> list[int]:
        """The steps of a metric in the order in which they came."""
        return [step for step, _, _ in self.runs[run]["metrics"].get(key, {})]

    @property
    def only(self) -> str:
        """The id of the only run."""
        [number] = self.runs
        return number


@contextmanager
def fake_mlflow(artifacts: Path) -> Iterator[FakeMLflow]:
    """A server that listens until the block ends."""
    server = FakeMLflow(artifacts)
    server.start()
    try:
        yield server
    finally:
        server.stop()
