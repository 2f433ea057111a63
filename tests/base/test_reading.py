"""Files that anybody may have put there are read without blocking, and only if they are small regular files."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from runner.base.reading import read_overrides, read_regular, read_summary, start_time


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    """Opening a named pipe blocks for ever, so a test that would hang fails."""

    def fail(*_: object) -> None:
        raise AssertionError("blocked")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def make_special(kind: str, path: Path) -> None:
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(os.path.relpath(path))  # names of sockets are short
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "dangling link":
        path.symlink_to("nowhere")
    else:
        assert kind == "huge file"
        with path.open("wb") as file:
            file.truncate(2**40)


KINDS = ("pipe", "socket", "device", "folder", "dangling link", "huge file")


@pytest.mark.parametrize("kind", KINDS)
def test_only_small_regular_files_are_read(kind: str, tmp_path: Path) -> None:
    make_special(kind, tmp_path / "summary.json")
    make_special(kind, tmp_path / "overrides.yaml")
    with pytest.raises(OSError, match=r"regular file|larger than|No such file"):
        read_regular(tmp_path / "summary.json")
    assert read_summary(tmp_path) is None
    with pytest.raises(OSError, match=r"regular file|larger than|No such file"):
        read_overrides(tmp_path)


@pytest.mark.parametrize("text", ["- 2024-99-99", "- " + "9" * 5000], ids=["impossible date", "huge number"])
def test_overrides_of_anybody_are_a_list_of_texts(text: str, tmp_path: Path) -> None:
    (tmp_path / "overrides.yaml").write_text(text)
    assert read_overrides(tmp_path) == [text.removeprefix("- ")]


@pytest.mark.parametrize(
    "text",
    ["[" * 50_000, "- !!python/object/apply:os.system [x]", "a: b", "- {a: b}", "\0"],
    ids=["deep", "tag", "mapping", "list of mappings", "control character"],
)
def test_what_is_no_list_of_texts_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "overrides.yaml").write_text(text)
    with pytest.raises(ValueError, match=r"."):
        read_overrides(tmp_path)


def test_the_start_time_is_that_of_the_summary_else_when_it_was_written(tmp_path: Path) -> None:
    assert start_time(tmp_path) is None
    summary = tmp_path / "summary.json"
    for started in ("x", 5, None, "2026-11-20", ["2026"]):
        summary.write_text(json.dumps({"started": started}))
        os.utime(summary, (1000, 1000))
        assert start_time(tmp_path) == datetime.fromtimestamp(1000, UTC)
    summary.write_text(json.dumps({"started": "2026-11-20T10:31:07+00:00"}))
    assert start_time(tmp_path) == datetime(2026, 11, 20, 10, 31, 7, tzinfo=UTC)
