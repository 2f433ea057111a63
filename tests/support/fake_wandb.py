"""A server of Weights & Biases in this process that knows the few requests of one run, and can die."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

from local_server import LocalServer


class FakeWandB(LocalServer):
    """Keeps what it gets of runs in memory: rows by their place in the history, and exit codes."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[int, dict[str, Any]]] = {}
        self.exit_codes: dict[str, list[int]] = {}

    def start(self) -> None:
        """Listen, on the same port as before."""
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                data = gzip.decompress(data) if self.headers.get("Content-Encoding") == "gzip" else data
                answer = json.dumps(fake.answer(self.path, data)).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            do_PUT = do_POST

        self.listen(Handler)

    def answer(self, path: str, data: bytes) -> dict[str, Any]:
        if path == "/graphql":
            given = json.loads(data)
            return {"data": self._graphql(given["query"], given.get("variables") or {})}
        if path.endswith("/file_stream"):
            self._stream(path.split("/")[-2], json.loads(data))
        return {"exitcode": None, "limits": {}}

    def _graphql(self, query: str, given: dict[str, Any]) -> dict[str, Any]:
        if "createRunFiles" in query:
            files = [{"name": name, "uploadUrl": f"http://127.0.0.1:{self.port}/{name}"} for name in given["files"]]
            return {"createRunFiles": {"runID": "1", "uploadHeaders": [], "files": files}}
        if "upsertBucket" in query:
            return {"upsertBucket": {"bucket": self._shown(given["name"]), "inserted": True}}
        if "bucket(" in query:
            known = given["name"] in self.rows
            return {"model": {"id": "1", "name": "p", "bucket": self._shown(given["name"]) if known else None}}
        return {"serverInfo": {"features": []}, "viewer": {"entity": "me", "flags": "{}"}}

    def _shown(self, run: str) -> dict[str, Any]:
        rows = self.rows.setdefault(run, {})
        tail = [json.dumps(rows[max(rows)])] if rows else []
        project = {"id": "1", "name": "p", "entity": {"id": "1", "name": "me"}}
        shown: dict[str, Any] = {"id": run, "name": run, "displayName": run, "project": project, "tags": []}
        shown |= {"config": "{}", "summaryMetrics": "{}", "eventsTail": "[]", "historyTail": json.dumps(tail)}
        return shown | {"historyLineCount": len(rows), "logLineCount": 0, "eventsLineCount": 0}

    def _stream(self, run: str, sent: dict[str, Any]) -> None:
        part = (sent.get("files") or {}).get("wandb-history.jsonl")
        for number, line in enumerate(part["content"] if part else [], part["offset"] if part else 0):
            self.rows.setdefault(run, {})[number] = json.loads(line)
        if sent.get("complete"):
            self.exit_codes.setdefault(run, []).append(sent["exitcode"])


@contextmanager
def fake_wandb() -> Iterator[FakeWandB]:
    """A server that listens until the block ends."""
    server = FakeWandB()
    server.start()
    try:
        yield server
    finally:
        server.stop()
