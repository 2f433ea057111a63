"""A server in this process that speaks as much of the Hugging Face Hub's protocol as models need that are uploaded and read.

As there, `.safetensors` files are uploaded by Git LFS and read from another host.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import yaml
from local_server import LocalServer

TOKEN = "hf_right"
Files = dict[str, bytes]


class Hub(LocalServer):
    """Files by repository and revision; `user` is the only owner that `TOKEN` may write for."""

    def __init__(self) -> None:
        self.repositories: dict[str, dict[str, Files]] = {}
        self.asked: list[str] = []
        self.large: Files = {}  # contents by SHA-256
        self.sizes: dict[str, int] = {}  # of files that are said to have another size

    def environment(self, cache: Path) -> dict[str, str]:
        """Variables for clients."""
        given = {"HF_ENDPOINT": f"http://127.0.0.1:{self.port}", "HF_HOME": str(cache), "HF_TOKEN": TOKEN}
        # Xet, which large files take otherwise, is a protocol of its own
        given |= {"HF_HUB_DISABLE_XET": "1"}
        return given | {"NO_PROXY": "127.0.0.1,localhost", "HF_HUB_DISABLE_TELEMETRY": "1"}

    def post(self, path: str, body: bytes, token: str | None) -> tuple[int, Any]:
        """The status and the answer of a request that writes."""
        if token != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid username or password."}
        lines = [json.loads(line) for line in body.splitlines()]
        if path == "/api/repos/create":
            name = f"{lines[0]['organization']}/{lines[0]['name']}"
            if name in self.repositories or not name.startswith("user/"):
                return (
                    (409, {"error": "You already created this model repo"}) if name in self.repositories else (403, {})
                )
            self.repositories[name] = {"main": {}}
            return 200, {"url": f"http://127.0.0.1:{self.port}/{name}"}
        if path == "/api/validate-yaml":
            assert isinstance(yaml.safe_load(lines[0]["content"].split("---\n")[1]), dict)
            return 200, {"errors": [], "warnings": []}
        if path.endswith(".git/info/lfs/objects/batch"):
            upload = f"http://localhost:{self.port}/large/"
            objects = lines[0]["objects"]
            return 200, {
                "objects": [each | {"actions": {"upload": {"href": upload + each["oid"]}}} for each in objects]
            }
        _, name, action = re.split("/api/models/|/(?=preupload|commit)", path)
        if action == "preupload/main":
            modes = {True: "lfs", False: "regular"}
            files = [(each["path"], modes[each["path"].endswith(".safetensors")]) for each in lines[0]["files"]]
            return 200, {"files": [{"path": p, "uploadMode": mode, "shouldIgnore": False} for p, mode in files]}
        files = self.repositories[name]["main"]
        files |= {v["path"]: base64.b64decode(v["content"]) for v in (x["value"] for x in lines if x["key"] == "file")}
        files |= {v["path"]: self.large[v["oid"]] for v in (x["value"] for x in lines if x["key"] == "lfsFile")}
        return 200, {"commitUrl": f"http://127.0.0.1:{self.port}/{name}/commit/{'0' * 40}", "commitOid": "0" * 40}

    def resolve(self, name: str, revision: str, path: str) -> tuple[int, dict[str, str], bytes]:
        """The status, headers and content of a file."""
        revisions = self.repositories.get(name, {})
        if revision not in revisions:
            return 404, {"X-Error-Code": f"{'Revision' if revisions else 'Repo'}NotFound"}, b""
        files = revisions[revision]
        headers = {"X-Repo-Commit": hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()}
        if path not in files:
            return 404, headers | {"X-Error-Code": "EntryNotFound"}, b""
        digest, size = hashlib.sha256(files[path]).hexdigest(), str(self.sizes.get(name, len(files[path])))
        self.large[digest] = files[path]
        headers |= {"X-Linked-ETag": f'"{digest}"', "X-Linked-Size": size}
        return 302, headers | {"Location": f"http://localhost:{self.port}/large/{digest}"}, b""

    def open(self) -> None:
        """Answer requests."""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status, answer = hub.post(self.path, body, self.headers["Authorization"])
                self.reply(status, {}, json.dumps(answer).encode())

            def do_PUT(self) -> None:
                hub.large[self.path.removeprefix("/large/")] = self.rfile.read(int(self.headers["Content-Length"]))
                self.reply(200, {}, b"")

            def do_GET(self) -> None:
                hub.asked.append(f"{self.command} {self.path}")
                if content := hub.large.get(self.path.removeprefix("/large/")):
                    assert self.headers["Authorization"] is None, "the token is for the hub alone"
                    return self.reply(200, {}, content)
                found = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self.path)
                return self.reply(*(hub.resolve(*found.groups()) if found else (404, {}, b"")))

            do_HEAD = do_GET

            def reply(self, status: int, headers: dict[str, str], body: bytes) -> None:
                self.send_response(status)
                for header in ({"Content-Length": str(len(body))} | headers).items():
                    self.send_header(*header)
                self.end_headers()
                self.wfile.write(b"" if self.command == "HEAD" else body)

        self.listen(Handler)
