"""A checkpoint is one file that verifies itself: whole or not there, and never believed when it is damaged."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import resource
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.checkpoint import file
from runner.checkpoint.file import KEYS, DamagedCheckpoint, link, read, verify, write
from runner.config.errors import UserError

Make = Callable[..., dict[str, Any]]


def equal(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return type(first) is type(second) and len(first) == len(second) and all(map(equal, first, second))
    return type(first) is type(second) and first == second


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def sample(tmp_path: Path, contents: Make) -> Path:
    path = tmp_path / "sample.pt"
    write(path, contents())
    return path


def test_what_is_written_is_read_back(tmp_path: Path, contents: Make) -> None:
    made = contents(3, scaler={"scale": 2.0}, classes=[])
    made["model"] |= {
        "half": torch.randn(2, 2).to(torch.bfloat16), "empty": torch.zeros(0, 3), "flags": torch.tensor([True, False]),
    }  # fmt: skip
    write(tmp_path / "a.pt", made)
    assert equal(read(tmp_path / "a.pt"), made)
    assert names(tmp_path) == ["a.pt"]


def test_the_keys_are_the_documented_ones() -> None:
    documented = "format model optimizer scheduler scaler averaged rng position config classes metrics versions"
    assert list(KEYS) == documented.split()


def test_torch_reads_it_without_this_package(sample: Path, contents: Make) -> None:
    code = "import sys, torch; print(sorted(torch.load(sys.argv[1], weights_only=True)))"
    made = subprocess.run([sys.executable, "-c", code, str(sample)], capture_output=True, text=True, check=True)
    assert made.stdout.strip() == str(sorted(KEYS))


def test_any_zip_tool_reads_and_checks_it(sample: Path) -> None:
    with zipfile.ZipFile(sample) as archive:
        assert archive.testzip() is None
        assert any(name.endswith("data.pkl") for name in archive.namelist())
        comment = archive.comment.decode()
    mark, _, digest = comment.partition(":")
    data = sample.read_bytes()
    # The checksum is over the archive as it was before it had a comment, that is with a comment length of zero.
    body = data[: -len(comment) - 2] + b"\0\0"
    assert (mark, digest) == ("runner-sha256", hashlib.sha256(body).hexdigest())


def test_equal_contents_give_equal_files(tmp_path: Path, contents: Make) -> None:
    made = contents()
    write(tmp_path / "a.pt", made)
    write(tmp_path / "b.pt", made)
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()


def test_every_truncation_is_found_and_named(sample: Path, tmp_path: Path) -> None:
    data = sample.read_bytes()
    lengths = {*range(0, len(data), len(data) // 60), 1, len(data) - 1, len(data) - 64, len(data) - 78, len(data) - 80}
    short = tmp_path / "short.pt"
    for length in sorted(lengths):
        short.write_bytes(data[:length])
        for look in (verify, read):
            with pytest.raises(DamagedCheckpoint, match=r"short\.pt: (has no checksum|its contents do not fit)"):
                look(short)


def test_every_flipped_byte_is_found_and_named(sample: Path, tmp_path: Path) -> None:
    data, generator, flipped = sample.read_bytes(), random.Random(0), tmp_path / "flipped.pt"
    places = {generator.randrange(len(data)) for _ in range(200)} | set(range(len(data) - 85, len(data)))
    for place in places:
        damaged = bytearray(data)
        damaged[place] ^= 1 << generator.randrange(8)
        flipped.write_bytes(damaged)
        with pytest.raises(DamagedCheckpoint, match=r"flipped\.pt: "):
            read(flipped)


@pytest.mark.parametrize("extra", [b"x", b"\0" * 100], ids=["one", "many"])
def test_bytes_added_at_the_end_are_found(sample: Path, extra: bytes) -> None:
    sample.write_bytes(sample.read_bytes() + extra)
    with pytest.raises(DamagedCheckpoint):
        read(sample)


def test_a_missing_file_and_a_folder_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*nothing\.pt: No such file"):
        read(tmp_path / "nothing.pt")
    with pytest.raises(UserError, match="cannot read"):
        read(tmp_path)


def test_a_file_of_a_later_version_is_not_guessed_at(tmp_path: Path, contents: Make) -> None:
    write(tmp_path / "new.pt", contents(format=file.FORMAT + 1))
    with pytest.raises(UserError, match=r"has format 2, and this version reads up to 1: update runner"):
        read(tmp_path / "new.pt")


class Full:
    """A file on a disk that is full after some bytes."""

    def __init__(self, inner: Any, room: int) -> None:
        self.inner, self.room = inner, room

    def write(self, data: bytes) -> int:
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return int(self.inner.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __enter__(self) -> Full:
        return self

    def __exit__(self, *_: object) -> None:
        self.inner.close()


@pytest.mark.parametrize("room", [0, 100, 3000])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(
    room: int, sample: Path, contents: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, original = sample.read_bytes(), Path.open
    assert room < len(before)
    monkeypatch.setattr(Path, "open", lambda self, *a, **k: Full(original(self, *a, **k), room))
    with pytest.raises(UserError, match=r"cannot write .*sample\.pt.*earlier checkpoints are untouched"):
        write(sample, contents(8))
    monkeypatch.undo()
    assert sample.read_bytes() == before
    assert names(sample.parent) == ["sample.pt"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failure_at_the_last_moment_leaves_the_old_file_and_nothing_else(
    call: str, sample: Path, contents: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sample.read_bytes()

    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(UserError, match="Input/output error; earlier checkpoints are untouched"):
        write(sample, contents(8))
    monkeypatch.undo()
    assert sample.read_bytes() == before
    assert names(sample.parent) == ["sample.pt"]


def test_a_file_size_limit_is_a_sentence_and_loses_nothing(sample: Path, contents: Make) -> None:
    before = sample.read_bytes()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            import signal

            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
            write(sample, contents(8))
        except UserError as error:
            status = 42 if "untouched" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42
    assert sample.read_bytes() == before
    assert names(sample.parent) == ["sample.pt"]


def test_a_folder_that_is_not_there_is_a_sentence(tmp_path: Path, contents: Make) -> None:
    with pytest.raises(UserError, match="cannot write"):
        write(tmp_path / "no" / "a.pt", contents())


@pytest.mark.parametrize("limit", [100, 2_000, 300_000])
def test_a_limit_on_the_size_of_files_is_one_sentence_and_the_older_file_stays(
    tmp_path: Path, contents: Make, limit: int
) -> None:
    write(tmp_path / "a.pt", contents(step=1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    large = contents(step=2, model={"layer.weight": torch.zeros(100_000)})
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
            write(tmp_path / "a.pt", large)
        except UserError as error:
            os.write(writing, str(error).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    assert "ulimit -f" in said
    assert "earlier checkpoints are untouched" in said
    assert "unexpected pos" not in said
    assert len(said.splitlines()) == 1
    assert read(tmp_path / "a.pt")["position"]["global_step"] == 1
    assert names(tmp_path) == ["a.pt"]


def test_the_file_and_its_folder_are_on_the_disk_before_writing_returns(
    tmp_path: Path, contents: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def noting_sync(descriptor: int) -> None:
        kind = "folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file"  # noqa: PTH112
        events.append(f"sync {kind}")
        fsync(descriptor)

    def noting_replace(source: Any, target: Any) -> None:
        events.append(f"rename to {Path(target).name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noting_sync)
    monkeypatch.setattr(os, "replace", noting_replace)
    write(tmp_path / "a.pt", contents())
    assert events == ["sync file", "rename to a.pt", "sync folder"]


def test_the_temporary_file_lies_beside_the_target(
    tmp_path: Path, contents: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[Path] = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (moved.append(Path(a)), replace(a, b))[1])
    write(tmp_path / "a.pt", contents())
    assert [path.parent for path in moved] == [tmp_path]
    assert moved[0].name.startswith(".")
    assert moved[0].name.endswith(".tmp")


def test_a_link_is_the_same_checkpoint_and_can_be_made_twice(tmp_path: Path, sample: Path, contents: Make) -> None:
    for _ in range(2):
        link(sample, tmp_path / "last.pt")
        assert equal(read(tmp_path / "last.pt"), read(sample))
    assert names(tmp_path) == ["last.pt", "sample.pt"]
    write(tmp_path / "other.pt", contents(9))
    link(tmp_path / "other.pt", tmp_path / "last.pt")
    assert read(tmp_path / "last.pt")["position"]["global_step"] == 9
    assert read(sample)["position"]["global_step"] == 7


def test_where_the_file_system_has_no_links_a_copy_is_made(
    tmp_path: Path, sample: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    link(sample, tmp_path / "last.pt")
    assert (tmp_path / "last.pt").read_bytes() == sample.read_bytes()
    assert (tmp_path / "last.pt").stat().st_ino != sample.stat().st_ino
    assert names(tmp_path) == ["last.pt", "sample.pt"]


def test_what_could_not_be_read_back_is_not_written(tmp_path: Path, contents: Make) -> None:
    class Thing:
        pass

    made = contents()
    made["metrics"]["callbacks"] = {"mine": {"seen": [Thing()]}}
    with pytest.raises(UserError, match="mine"):
        write(tmp_path / "a.pt", made)
    assert names(tmp_path) == []


@pytest.mark.parametrize("change", [{"sharded": True}, {"model": None}, {"position": "elsewhere"}], ids=str)
def test_a_newer_format_with_other_contents_is_no_damage(
    change: dict[str, Any], tmp_path: Path, contents: Make, forge: Callable[[Path, Any], None]
) -> None:
    path = tmp_path / "new.pt"
    forge(path, contents(format=file.FORMAT + 1) | change)
    with pytest.raises(
        UserError, match=r"new\.pt: has format 2, and this version reads up to 1: update runner"
    ) as caught:
        read(path)
    assert not isinstance(caught.value, DamagedCheckpoint)


@pytest.mark.parametrize("written", [True, "2", 0, -1, None, 2.0], ids=str)
def test_a_format_that_is_no_number_from_1_on_is_refused(written: Any, tmp_path: Path, contents: Make) -> None:
    write(tmp_path / "odd.pt", contents(format=written))
    with pytest.raises(DamagedCheckpoint, match="its format is not a number from 1 on"):
        read(tmp_path / "odd.pt")
