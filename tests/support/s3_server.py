"""A server of S3 in a separate process, and a proxy in front of it that counts what is read and makes faults."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from local_server import LocalServer

_SERVE = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""
_ERROR = "<?xml version='1.0'?><Error><Code>{0}</Code><Message>{1}</Message></Error>"
_ANSWERS = {
    "unavailable": (503, _ERROR.format("ServiceUnavailable", "Please try again.")),
    "expired": (400, _ERROR.format("ExpiredToken", "The provided token has expired.")),
    "denied": (403, _ERROR.format("AccessDenied", "Access Denied")),
}


@dataclass(frozen=True)
class Seen:
    """A request for an object or list; `start` and `end` are the first byte and the one after the last that were asked for."""

    method: str
    key: str
    start: int | None = None
    end: int | None = None


@dataclass
class Fault:
    """What goes wrong with so many requests of keys that contain `key`; by default, with those of ranges of tar files.

    `kind`: a key of `_ANSWERS`; `delay`, by `amount` seconds; `cut`, the connection ends after `amount` bytes; `short`, an answer
    of as many; `flip`, the byte at `amount` is another; `endless`, an answer of 32 MiB without its length; `moved`, a redirect to
    another name of the host, and `renamed`, to the same one.
    """

    kind: str
    amount: float = 0
    times: float = float("inf")
    key: str = ".tar"


@dataclass
class Store:
    """The bucket `bucket`: `url` names it for the program."""

    port: int
    server: LocalServer = field(default_factory=LocalServer)
    seen: list[Seen] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    lock: Any = field(default_factory=threading.Lock)
    poured: int = 0  # bytes of endless answers so far
    url = "s3://bucket"

    def environment(self) -> dict[str, str]:
        """Variables for clients."""
        names = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1"}
        names |= {"AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": "/nonexistent"}
        return names | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.server.port}"}

    def put(self, key: str, content: bytes | None) -> None:
        """Write an object that anyone may read, or remove it; without a key, make the bucket."""
        method, path = "DELETE" if content is None else "PUT", f"/bucket/{key}".rstrip("/")
        # Without a signature, nobody may overwrite an object
        signed = {"Authorization": "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request, Signature=0"}
        status, body, _ = self.ask(method, path, content, signed | {"x-amz-acl": "public-read"})
        assert status in (200, 204), body

    def ask(self, method: str, path: str, body: bytes | None = None, headers: Any = None) -> tuple[int, bytes, Any]:
        """A request to the server itself: status, body and headers of the answer."""
        import urllib3

        url, headers = f"http://127.0.0.1:{self.port}{path}", headers or {}
        answer = urllib3.request(method, url, body=body, headers=headers, redirect=False, decode_content=False)
        return answer.status, answer.data, answer.headers

    def ranges(self) -> list[Seen]:
        """The requests of ranges so far."""
        return [each for each in self.seen if each.end is not None]

    def fault_of(self, seen: Seen) -> Fault | None:
        """The fault of a request, which counts."""
        with self.lock:
            self.seen.append(seen)
            for fault in self.faults:
                if (seen.end is not None or fault.key != ".tar") and fault.key in seen.key and fault.times > 0:
                    fault.times -= 1
                    return fault
        return None


def _handler(store: Store) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 60
        wbufsize = -1  # headers and body in one packet: the second would wait for the acknowledgement of the first

        def do_GET(self) -> None:
            found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            start, end = (int(found[1]), int(found[2]) + 1) if found else (None, None)
            fault = store.fault_of(Seen(self.command, self.path, start, end))
            kind, amount = (fault.kind, int(fault.amount)) if fault else ("", 0)
            if fault and kind == "delay":
                time.sleep(fault.amount)
            if kind in _ANSWERS:
                status, text = _ANSWERS[kind]
                self.answer(status, text.encode(), {"Content-Type": "application/xml"})
                return
            if kind in ("moved", "renamed"):
                where = f"http://localhost:{store.server.port}" if kind == "moved" else ""
                self.answer(302, b"", {"Location": f"{where}{self.path}"})
                return
            headers = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
            status, body, others = store.ask(self.command, self.path, None, headers)
            kept = {name: others[name] for name in others if name.lower() not in ("connection", "server", "date")}
            if kind == "short":
                body = body[:amount]
                kept["Content-Length"] = str(len(body))
            if kind == "flip":
                body = body[:amount] + bytes([body[amount] ^ 1]) + body[amount + 1 :]
            if kind == "endless":
                self.pour(status)
                return
            self.answer(status, body, kept, amount if kind == "cut" else None)

        do_HEAD = do_GET

        def pour(self, status: int) -> None:
            self.send_response(status)
            self.end_headers()
            self.close_connection = True
            for _ in range(2**9):
                self.wfile.write(bytes(2**16))
                store.poured += 2**16

        def answer(self, status: int, body: bytes, headers: dict[str, str], cut: int | None = None) -> None:
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(body))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body[:cut])
            self.close_connection = self.close_connection or cut is not None

        def handle(self) -> None:
            try:
                super().handle()
            except OSError:  # a client that was killed
                self.close_connection = True

    return Handler


@contextmanager
def s3_store() -> Iterator[Store]:
    """A server with an empty bucket."""
    command, pipe = [sys.executable, "-c", _SERVE], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        store = Store(int(child.stdout.readline()))
        store.server.listen(_handler(store))
        store.put("", b"")
        try:
            yield store
        finally:
            store.server.stop()
            child.stdin.close()


def upload(store: Store, path: Path, content: bytes | None = None) -> None:
    """Write a file, or other content in its place, below `store.url`."""
    key = f"{store.url.rpartition('/')[2]}/{path.parent.name}/{path.name}"
    store.put(key, path.read_bytes() if content is None else content)
