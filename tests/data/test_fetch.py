"""Downloads from a server that breaks, sends other bytes, or does as it should."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from torchvision import datasets

from runner.base.errors import UserError
from runner.data import preparation
from runner.data.sources import fetch as module
from runner.data.sources.fetch import FetchFailed, FetchStopped, addresses, fetch

CONTENT = bytes(range(256)) * 4000  # 1,024,000 bytes
MD5 = hashlib.md5(CONTENT).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves `CONTENT` under every path, whose first part says how; `requests` are those parts."""

    daemon_threads = True
    requests: list[str]

    def url(self, kind: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{kind}/file"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        kind = self.path.split("/")[1]
        self.server.requests.append(kind)
        if kind == "gone":
            return self.send_error(404)
        self.send_response(200)
        if kind != "unknown":
            self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        body = b"x" * len(CONTENT) if kind == "wrong" else CONTENT[:300_000] if kind == "breaks" else CONTENT
        step = 40_000 if kind == "slow" else len(body)
        with contextlib.suppress(OSError):
            for place in range(0, len(body), step):
                self.wfile.write(body[place : place + step])
                time.sleep(0.02 if kind == "slow" else 0)
        return None

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as made:
        made.requests = []
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "file"


@pytest.mark.parametrize(
    "kinds", [["good"], ["unknown"], ["gone", "good"], ["wrong", "good"], ["breaks", "good"]], ids="-".join
)
def test_a_file_arrives_whole_from_the_first_server_that_gives_it(kinds: list[str], server: Server, path: Path) -> None:
    path.parent.mkdir()
    path.with_name(".file.partial").write_bytes(b"what a process that was killed left")
    fetch(path, MD5, [server.url(kind) for kind in kinds])
    assert path.read_bytes() == CONTENT
    assert server.requests == kinds
    assert list(path.parent.iterdir()) == [path]
    fetch(path, MD5, [server.url("gone")])
    assert server.requests == kinds, "a file that is there is not asked for"


def test_why_each_address_gives_nothing_is_said(server: Server, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SILENCE_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it accepts, and sends nothing
        urls = [*map(server.url, ("gone", "wrong", "breaks")), f"http://127.0.0.1:{silent.getsockname()[1]}/file"]
        with pytest.raises(FetchFailed) as caught:
            fetch(path, MD5, urls)
    assert str(caught.value).split("; ") == [
        f"{urls[0]}: HTTP Error 404: Not Found",
        f"{urls[1]}: another checksum than the published MD5 {MD5}",
        f"{urls[2]}: the connection broke after 0.3 MB",
        f"{urls[3]}: timed out",
    ]
    assert [each.name for each in path.parent.iterdir()] == [".file.lock"]


def test_the_rate_is_shown(
    server: Server, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preparation, "_SHOWN_AFTER_S", 0.0)
    monkeypatch.setattr(preparation, "_SHOWN_EVERY_S", 0.0)
    fetch(path, MD5, [server.url("slow")])
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("fetching file: 1.0 of 1.0 MB, ")
    assert last.endswith(" MB/s")


def test_a_full_disk_is_said(server: Server, path: Path) -> None:
    code = (
        "import resource, sys; from pathlib import Path; from runner.data.sources.fetch import fetch;"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000));"
        "fetch(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), MD5, server.url("good")], capture_output=True, text=True, check=False
    )
    assert f"data.root: cannot write {path.with_name('.file.partial')}: File too large" in done.stderr
    assert [each.name for each in path.parent.iterdir()] == [".file.lock"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"data.root: cannot write .*/file/file"):
        fetch(tmp_path / "file" / "file", MD5, [])


def test_a_signal_of_the_run_stops_it(server: Server, path: Path) -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        with pytest.raises(FetchStopped, match="a signal stopped it"):
            fetch(path, MD5, [server.url("slow")])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert [each.name for each in path.parent.iterdir()] == [".file.lock"]


def test_a_signal_while_another_process_fetches_leaves_what_that_one_writes(server: Server, path: Path) -> None:
    path.parent.mkdir()
    other = path.with_name(".file.partial")
    other.write_bytes(CONTENT[:1000])
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with path.with_name(".file.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
            with pytest.raises(FetchStopped, match="before it began"):
                fetch(path, MD5, [server.url("good")])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert other.read_bytes() == CONTENT[:1000]
    assert server.requests == []


def test_processes_that_fetch_one_file_at_once_ask_for_it_once(server: Server, path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from runner.data.sources.fetch import fetch;"
        "fetch(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]); print(Path(sys.argv[1]).stat().st_size)"
    )
    words = [sys.executable, "-c", code, str(path), MD5, server.url("slow")]
    both = [subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    ends = [process.communicate() for process in both]
    assert [out.strip() for out, _ in ends] == [str(len(CONTENT))] * 2, ends
    assert server.requests == ["slow"]
    assert list(path.parent.iterdir()) == [path]


def test_addresses_are_the_users_first() -> None:
    published = ["https://a/file"]
    assert addresses("file", None, published) == published
    assert addresses("file", "http://b/c/", published) == ["http://b/c/file", *published]
    assert addresses("file", ["http://b", "file:///c"], published)[:2] == ["http://b/file", "file:///c/file"]
    with pytest.raises(UserError, match=r"data.mirror: '/a/folder' is not an address\n.*allowed: .*file:///"):
        addresses("file", "/a/folder", published)


def test_the_key_reaches_the_data_set(
    server: Server, workdir: Path, run: Any, rejected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.KMNIST, "mirrors", ["file:///published/"])
    mirror = server.url("gone").removesuffix("/file")
    words = ("data=kmnist", "data.download=true", f"data.mirror=[{mirror},file:///nowhere]")
    result = rejected("train", *words, "logger=none")
    assert "data.download: fetching KMNIST failed: " in result.err
    assert f"{mirror}/train-images-idx3-ubyte.gz: HTTP Error 404" in result.err
    assert "file:///nowhere/train-images-idx3-ubyte.gz: " in result.err
    assert result.err.index("HTTP Error 404") < result.err.index("file:///published/train")
    assert run("train", "data=kmnist", "data.mirror=[1,{a: 2}]").status == 2
