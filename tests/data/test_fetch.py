"""Downloads from a server that breaks, is slow, sends other bytes, or does as it should."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import gaierror
from typing import Any
from urllib.error import URLError

import pytest
from torchvision import datasets

from runner.config.errors import UserError
from runner.data import long_work
from runner.data.sources import fetch as module
from runner.data.sources.fetch import FetchFailed, FetchStopped, addresses, fetch

CONTENT = bytes(range(256)) * 4000  # 1,024,000 bytes
MD5 = hashlib.md5(CONTENT).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves `CONTENT` under every path, whose first part says how; `requests` are the paths with their ranges."""

    daemon_threads = True
    requests: list[tuple[str, str]]

    def url(self, kind: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{kind}/file"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        kind, asked = self.path.split("/")[1], self.headers.get("Range", "")
        self.server.requests.append((kind, asked))
        if kind == "gone" or (kind == "busy" and len(self.server.requests) < 3):
            return self.send_error(404 if kind == "gone" else 503)
        start = int(asked[6:-1]) if asked and kind != "rangeless" else 0
        if start >= len(CONTENT):
            return self.send_error(416)
        body = (b"x" * len(CONTENT) if kind == "wrong" else CONTENT)[start:]
        self.send_response(206 if start else 200)
        if kind != "unknown":
            self.send_header("Content-Length", str(len(body)))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}")
        self.end_headers()
        body = body[:300_000] if kind in ("breaks", "stuck") else body
        body = b"" if kind == "stuck" and asked else body
        step = 10_000 if kind == "slow" else len(body) or 1
        with contextlib.suppress(OSError):
            for place in range(0, len(body), step):
                self.wfile.write(body[place : place + step])
                time.sleep(0.02 if kind == "slow" else 0)
        return None

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(module, "_PAUSE_S", 0.01)
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


def partial(path: Path) -> Path:
    return path.with_name(".file.partial")


RANGES = ["", "bytes=300000-", "bytes=600000-", "bytes=900000-"]


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (["good"], [("good", "")]),
        (["unknown"], [("unknown", "")]),
        (["breaks"], [("breaks", asked) for asked in RANGES]),
        (["gone", "good"], [("gone", ""), ("good", "")]),
        (["wrong", "good"], [("wrong", ""), ("good", "")]),
        (["busy"], [("busy", "")] * 3),
        # What one address gave, another one continues.
        (["stuck", "good"], [("stuck", ""), *[("stuck", RANGES[1])] * 3, ("good", RANGES[1])]),
        (["stuck", "rangeless"], [("stuck", ""), *[("stuck", RANGES[1])] * 3, ("rangeless", RANGES[1])]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value[0], str) else "",
)
def test_a_file_arrives_whole_whatever_the_servers_do(
    kinds: list[str], expected: list[tuple[str, str]], server: Server, path: Path
) -> None:
    fetch(path, MD5, [server.url(kind) for kind in kinds])
    assert path.read_bytes() == CONTENT
    assert server.requests == expected
    assert list(path.parent.iterdir()) == [path]
    fetch(path, MD5, [server.url("gone")])
    assert server.requests == expected, "a file that is there is not asked for"


@pytest.mark.parametrize(
    ("left", "expected"),
    [
        (CONTENT[:1000], ["bytes=1000-"]),
        (CONTENT, []),
        (b"x" * 1000, ["bytes=1000-", ""]),
        (CONTENT + b"x", ["bytes=1024001-", ""]),
    ],
    ids=["a part", "everything", "other bytes", "too much"],
)
def test_what_an_earlier_run_left_is_continued_or_fetched_again(
    left: bytes, expected: list[str], server: Server, path: Path
) -> None:
    path.parent.mkdir()
    partial(path).write_bytes(left)
    fetch(path, MD5, [server.url("good")])
    assert path.read_bytes() == CONTENT
    assert [asked for _, asked in server.requests] == expected


@pytest.mark.parametrize(
    ("kind", "reason", "kept"),
    [
        ("gone", "HTTP 404", 0),
        ("wrong", f"another checksum than the published MD5 {MD5} (1,024,000 bytes, deleted)", 0),
        ("stuck", "the connection broke after 0.3 MB, 3 times in a row", 300_000),
    ],
)
def test_why_an_address_gives_nothing_is_said(kind: str, reason: str, kept: int, server: Server, path: Path) -> None:
    with pytest.raises(FetchFailed) as caught:
        fetch(path, MD5, [server.url(kind)])
    assert str(caught.value).startswith(f"{server.url(kind)}: {reason}")
    assert not path.exists()
    assert (partial(path).stat().st_size if partial(path).exists() else 0) == kept


def test_without_a_network_each_address_is_tried_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    causes = [
        gaierror(-2, "Name or service not known"),
        ConnectionRefusedError(111, "Connection refused"),
        TimeoutError(),
    ]

    def unreachable(*_: Any, **__: Any) -> None:
        raise URLError(causes.pop(0))  # type: ignore[arg-type]

    monkeypatch.setattr(module, "urlopen", unreachable)
    with pytest.raises(FetchFailed) as caught:
        fetch(path, MD5, ["http://a/file", "http://b/file", "http://c/file"])
    assert str(caught.value).split("; ") == [
        "http://a/file: its host was not found, check the network connection (Name or service not known)",
        "http://b/file: Connection refused",
        "http://c/file: no data for 30 s",
    ]


def test_a_slow_address_comes_last_and_another_continues_it(
    server: Server, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "_SLOW_AFTER_S", 0.1)
    monkeypatch.setattr(module, "_SLOW", 10**8)
    fetch(path, MD5, [server.url("slow"), server.url("good")])
    assert path.read_bytes() == CONTENT
    (slow, first), (good, asked) = server.requests
    assert (slow, first, good) == ("slow", "", "good")
    assert int(asked[6:-1]) > 0
    path.unlink()
    server.requests.clear()
    fetch(path, MD5, [server.url("slow"), server.url("gone")])
    assert [kind for kind, _ in server.requests] == ["slow", "gone", "slow"], "it is better than nothing"
    assert "kB/s is slow; trying" in capsys.readouterr().err


def test_the_rate_and_the_time_left_are_shown(
    server: Server, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(long_work, "_SHOWN_AFTER_S", 0.0)
    monkeypatch.setattr(long_work, "_SHOWN_EVERY_S", 0.0)
    path.parent.mkdir()
    partial(path).write_bytes(CONTENT[:800_000])
    fetch(path, MD5, [server.url("slow")])
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("fetching file: 1.0 of 1.0 MB, ")
    assert lines[-1].endswith(" MB/s, 0:00:00 left")
    assert lines[0].startswith("fetching file: 0.8 of 1.0 MB, ")


def test_a_full_disk_is_said_and_what_there_is_is_kept(
    server: Server, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 100_000})
    monkeypatch.setattr(module.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UserError, match=r"data.root: .*folder has 0.1 MB free, and 1.0 MB are to be fetched"):
        fetch(path, MD5, [server.url("good")])
    monkeypatch.undo()
    code = (
        "import resource, sys; from pathlib import Path; from runner.data.sources.fetch import fetch;"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000));"
        "fetch(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), MD5, server.url("good")], capture_output=True, text=True, check=False
    )
    assert f"data.root: cannot write {partial(path)}: File too large" in done.stderr
    assert partial(path).stat().st_size == 500_000
    fetch(path, MD5, [server.url("good")])
    assert server.requests[-1] == ("good", "bytes=500000-")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"data.root: cannot write .*/file/file"):
        fetch(tmp_path / "file" / "file", MD5, [])


def test_a_signal_of_the_run_stops_and_the_next_call_continues(server: Server, path: Path) -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
        with pytest.raises(FetchStopped, match="the next run continues it"):
            fetch(path, MD5, [server.url("slow")])
    finally:
        signal.signal(signal.SIGTERM, before)
    assert 0 < partial(path).stat().st_size < len(CONTENT)
    fetch(path, MD5, [server.url("good")])
    assert server.requests[-1][1] != ""


def test_processes_that_fetch_one_file_at_once_ask_for_it_once(server: Server, path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from runner.data.sources.fetch import fetch;"
        "fetch(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]); print(Path(sys.argv[1]).stat().st_size)"
    )
    words = [sys.executable, "-c", code, str(path), MD5, server.url("slow")]
    both = [subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    ends = [process.communicate() for process in both]
    assert [out.strip() for out, _ in ends] == [str(len(CONTENT))] * 2, ends
    assert server.requests == [("slow", "")]
    assert list(path.parent.iterdir()) == [path]


def test_addresses_are_the_users_first() -> None:
    published = ["https://a/file"]
    assert addresses("file", None, published) == published
    assert addresses("file", "http://b/c/", published) == ["http://b/c/file", *published]
    assert addresses("file", ["http://b", "file:///c"], published)[:2] == ["http://b/file", "file:///c/file"]
    with pytest.raises(UserError, match=r"data.mirror: '/a/folder' is not an address\n.*allowed: .*file:///"):
        addresses("file", "/a/folder", published)


def test_the_key_reaches_the_data_set(
    server: Server, workdir: Path, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.KMNIST, "mirrors", ["file:///published/"])
    mirror = server.url("gone").removesuffix("/file")
    words = ("data=kmnist", "data.download=true", f"data.mirror=[{mirror},file:///nowhere]")
    result = run("train", *words, "logger=none")
    assert result.status == 2
    assert "data.download: fetching KMNIST failed: " in result.err
    assert f"{mirror}/train-images-idx3-ubyte.gz: HTTP 404" in result.err
    assert "file:///nowhere/train-images-idx3-ubyte.gz: " in result.err
    assert result.err.index("HTTP 404") < result.err.index("file:///published/train")
    assert run("train", "data=kmnist", "data.mirror=[1,{a: 2}]").status == 2
