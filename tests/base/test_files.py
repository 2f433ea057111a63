import errno
import json
import os
import resource
import subprocess
import sys

import pytest

from runner.base.errors import UserError
from runner.base.files import append, write_atomically, write_json


def test_a_written_file_holds_exactly_the_bytes_and_leaves_nothing_beside_it(tmp_path):
    target = tmp_path / "a.bin"
    write_atomically(target, b"one")
    write_atomically(target, b"two")
    assert target.read_bytes() == b"two"
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]


@pytest.mark.parametrize(
    ("name", "error", "raised"),
    [
        ("replace", OSError(errno.EIO, "Input/output error"), UserError),
        ("fsync", KeyboardInterrupt(), KeyboardInterrupt),
    ],
)
def test_what_cannot_be_written_or_is_interrupted_keeps_the_old_content(tmp_path, monkeypatch, name, error, raised):
    def fail(*_):
        raise error

    target = tmp_path / "a.bin"
    write_atomically(target, b"old")
    monkeypatch.setattr(os, name, fail)
    with pytest.raises(raised, match=r"a\.bin: input/output error" if raised is UserError else None):
        write_atomically(target, b"new")
    with pytest.raises(TypeError):
        write_json(target, {"a": object()})
    assert target.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.bin"]


def test_the_data_and_then_the_folder_are_flushed_around_the_rename(tmp_path, monkeypatch):
    events = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(descriptor):
        events.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "data")  # noqa: PTH112
        fsync(descriptor)

    def noted_replace(source, destination):
        name = os.fspath(source).rpartition("/")[2]
        assert name.startswith(".")
        assert name.endswith(".tmp")
        events.append("rename")
        replace(source, destination)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    write_atomically(tmp_path / "a", b"x")
    assert events == ["data", "rename", "folder"]


@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        (errno.ENOSPC, "no space left on the disk that holds"),
        (errno.EDQUOT, "the quota is used up on the disk that holds"),
        (errno.EACCES, "cannot write .*permission denied"),
        (errno.EROFS, "cannot write .*read-only"),
    ],
)
def test_a_disk_error_is_a_sentence_with_the_path_and_the_reason(tmp_path, monkeypatch, number, sentence):
    def fail(descriptor):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(UserError, match=sentence) as caught:
        write_atomically(tmp_path / "a.bin", b"x")
    assert str(tmp_path / "a.bin") in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_file_where_a_folder_is_needed_is_a_sentence(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="a file exists where a folder is needed"):
        write_atomically(tmp_path / "file" / "a.bin", b"x")


def test_what_fits_on_the_disk_is_appended_before_the_rest_is_a_sentence(tmp_path):
    path = tmp_path / "log"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with path.open("ab", buffering=0) as file:
        append(file, b"one\n")
        resource.setrlimit(resource.RLIMIT_FSIZE, (6, limits[1]))
        try:
            with pytest.raises(UserError, match=f"cannot write {path}: it would exceed the largest file size"):
                append(file, b"two\n")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert path.read_bytes() == b"one\ntw"


def test_json_keeps_order_and_writes_nan_and_infinity_as_null(tmp_path):
    target = tmp_path / "a.json"
    write_json(target, {"z": float("nan"), "a": [float("inf"), (1, 2.5)], "name": "Zürich", "path": tmp_path})
    text = target.read_text(encoding="utf-8")
    assert json.loads(text) == {"z": None, "a": [None, [1, 2.5]], "name": "Zürich", "path": str(tmp_path)}
    assert text.index('"z"') < text.index('"a"')
    assert text.startswith('{\n  "z"')


def test_only_a_name_of_the_users_is_followed_to_the_file_that_a_link_leads_to(tmp_path):
    there, link = tmp_path / "there", tmp_path / "link"
    for named in (True, False):
        there.unlink(missing_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to("there")
        for content in (b"new", b"newer"):  # a link to nothing, and one to a file
            write_atomically(link, content, named=named)
            assert link.read_bytes() == content
        assert link.is_symlink() is there.exists() is named
    link.unlink()
    os.mkfifo(link)
    write_atomically(link, b"x")
    assert link.is_file(), "a run directory may come from someone else"


def test_a_file_that_the_shell_has_opened_gets_what_is_written_where_it_is(tmp_path):
    link, script = tmp_path / "link", tmp_path / "script.py"
    link.symlink_to("/proc/self/fd/1")
    script.write_text(
        "from pathlib import Path\nfrom runner.base.files import write_atomically\n"
        f"print('before')\nwrite_atomically(Path({str(link)!r}), b'written\\n', named=True)\nprint('after')\n"
    )
    with (tmp_path / "out").open("wb") as out:
        subprocess.run([sys.executable, script], stdout=out, check=True, timeout=60)
    assert (tmp_path / "out").read_text() == "before\nwritten\nafter\n"
    done = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, check=True, timeout=60)
    assert done.stdout == b"before\nwritten\nafter\n"
    assert link.is_symlink()
