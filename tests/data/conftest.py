"""An object store with shards, images with objects, a handler of signals, and numbers of threads."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import drawn_objects
import pytest
import torch
from extras import needs
from s3_server import Store, s3_store, upload
from tar_files import cls, samples, write_tar

from runner.base.signals import heard
from runner.data.sources import remote


@pytest.fixture(scope="session")
def server() -> Iterator[Store]:
    with s3_store() as store:
        yield store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards of twelve images to train on, and one to validate."""
    for split, starts in (("train", (0, 12)), ("val", (24,))):
        for start in starts:
            write_tar(tmp_path / "shards" / split / f"{start:03d}.tar", samples(range(start, start + 12), cls))
    return tmp_path / "shards"


@pytest.fixture
def store(server: Store, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """The server with the shards, at a URL for this test; clients do not wait before they try again."""
    for name, value in {**server.environment(), "XDG_CACHE_HOME": str(tmp_path / "user")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(remote, "DELAY_S", 0.01)
    server.url = f"s3://bucket/{tmp_path.name}"
    for path in folder.rglob("*.tar"):
        upload(server, path)
    server.faults.clear()
    server.seen.clear()
    return server


@pytest.fixture(params=["folder", pytest.param("store", marks=needs("remote"))])
def root(request: pytest.FixtureRequest, folder: Path) -> str:
    """The shards, in a folder or in a store."""
    return str(folder) if request.param == "folder" else str(request.getfixturevalue("store").url)


@pytest.fixture
def put(root: str, folder: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[Path, bytes], None]:
    """Write a file of the folder of shards, and below `root`."""

    def call(path: Path, content: bytes) -> None:
        path.write_bytes(content)
        if "://" in root:
            request.getfixturevalue("server").put(f"{tmp_path.name}/{path.relative_to(folder)}", content)

    return call


@pytest.fixture
def handled() -> Iterator[list[int]]:
    """The signals SIGTERM that a handler of the test received, and noted as that of a run does."""
    received: list[int] = []

    def note(number: int, frame: Any) -> None:
        received.append(number)
        heard.append("SIGTERM")

    before = signal.signal(signal.SIGTERM, note)
    yield received
    signal.signal(signal.SIGTERM, before)
    heard.clear()


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Set the number of threads of torch for this test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def drawn(tmp_path: Path) -> Path:
    drawn_objects.draw(tmp_path, "train", 5, 0)
    drawn_objects.draw(tmp_path, "val", 3, 1)
    (tmp_path / "classes.txt").write_text("tall\nwide\n")
    return tmp_path
