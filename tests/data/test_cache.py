"""The cache of decoded images: the same bits with it as without, never half of it, never another's."""

from __future__ import annotations

import errno
import json
import os
import pickle
import resource
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import forked
import numpy as np
import psutil
import pytest
import torch
from small_loaders import Listed
from torch import Tensor
from torch.utils.data import Dataset

from runner.base.errors import UserError
from runner.data import preparation
from runner.data.cache import Cache, Opened
from runner.data.sources.arrays import CachedImages


class Made(Dataset[Any]):
    """Images out of nothing; counts how often it is read, and calls a function before, which may give the image."""

    def __init__(self, samples: int = 150, before: Callable[[int], Tensor | None] = lambda index: None) -> None:
        self.samples, self.before, self.read = samples, before, 0

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        self.read += 1
        image = torch.arange(index, index + 48, dtype=torch.int64).to(torch.uint8).view(3, 4, 4)
        return image if (given := self.before(index)) is None else given, index % 5


def cache(folder: Path, **recipe: Any) -> Cache:
    return Cache(folder, "made/up", recipe)


def opened(folder: Path, dataset: Dataset[Any] | None = None, workers: int = 0, **recipe: Any) -> Opened:
    return cache(folder, **recipe).open(Made() if dataset is None else dataset, "train", workers)


def check(images: CachedImages | None, dataset: Dataset[Any]) -> None:
    assert images is not None
    assert len(images) == len(dataset)  # type: ignore[arg-type]
    for index in range(len(images)):
        image, target = dataset[index]
        assert torch.equal(images.images[index], image)
        assert torch.equal(images.targets[index], torch.as_tensor(target))


@pytest.mark.parametrize("workers", [0, 2])
def test_it_holds_what_the_data_set_gives_whoever_decodes(tmp_path: Path, workers: int) -> None:
    found = opened(tmp_path, workers=workers)
    check(found.images, Made())
    assert found.done.startswith("made in ")
    assert found.complaint == ""
    path = cache(tmp_path).path("train")
    assert path.name.startswith("made_up-train-")
    images, targets = arrays_in(tmp_path)
    assert set(tmp_path.iterdir()) == {path.parent / f".{path.name}.lock", path, images, targets}
    assert np.array_equal(np.load(images)[3], Made()[3][0].numpy())
    assert np.load(targets).tolist() == [index % 5 for index in range(150)]
    # Once made it is opened, and few images are read again
    dataset = Made()
    found = opened(tmp_path, dataset)
    assert (found.done, found.complaint) == ("opened", "")
    assert 1 <= dataset.read <= 4
    check(found.images, Made())


@pytest.mark.parametrize(
    ("target", "dtype"),
    [
        (2.5, torch.float32),
        (torch.tensor([0.5, 1.5]), torch.float32),
        (torch.tensor(True), torch.bool),
        (np.uint16(7), torch.int64),
        (np.uint32(7), torch.int64),
    ],
    ids=["number", "vector", "truth", "uint16", "uint32"],
)
def test_targets_of_other_kinds_are_kept(tmp_path: Path, target: Any, dtype: torch.dtype) -> None:
    dataset = Listed([(torch.full((1, 2, 2), index, dtype=torch.uint8), target) for index in range(3)])
    for done in ("made", "opened"):
        found = opened(tmp_path, dataset)
        assert found.done.startswith(done)
        assert found.images is not None
        assert found.images.targets.dtype == dtype
        assert found.images.targets.tolist() == [torch.as_tensor(target).tolist()] * 3


def arrays_in(folder: Path) -> list[Path]:
    """The images, and the targets."""
    return sorted(folder.glob("*.npy"), key=lambda path: len(path.name))


def _overwrite(path: Path, content: bytes, place: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(place, os.SEEK_END if place < 0 else os.SEEK_SET)
        file.write(content)


def _lie(path: Path, **others: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | others))


Damage = Callable[[Path, Path, Path], Any]
CHANGED = "was changed after it was made"
DAMAGES: dict[str, tuple[Damage, str]] = {
    "empty": (lambda path, *_: path.write_bytes(b""), "rebuilt: it is not JSON, or cut short"),
    "text": (lambda path, *_: path.write_text("hello"), "rebuilt: it is not JSON, or cut short"),
    "other JSON": (lambda path, *_: path.write_text("[]"), "list indices"),
    "deep JSON": (lambda path, *_: path.write_text("[" * 10**5), "nested too deeply"),
    "not UTF-8": (lambda path, *_: path.write_bytes(b"\xff" * 99), "not UTF-8 text"),
    "a FIFO": (lambda path, *_: (path.unlink(), os.mkfifo(path)), "not a regular file"),
    "no arrays": (lambda path, *_: _lie(path, arrays={}), "rebuilt: not enough values"),
    "arrays elsewhere": (lambda path, *_: _lie(path, arrays={"a/b": [], "..": []}), "Invalid name"),
    "huge numbers": (lambda path, *_: _lie(path, unreadable=[2**99]), "Overflow"),
    "another key": (lambda path, *_: _lie(path, key="0"), "made from other files, settings or library versions"),
    "images gone": (lambda _, images, __: images.unlink(), "no such file"),
    "targets gone": (lambda *paths: paths[2].unlink(), "no such file"),
    "images cut": (lambda _, images, __: os.truncate(images, 5000), CHANGED),
    "images longer": (lambda _, images, __: _overwrite(images, b"x" * 9999), CHANGED),
    "images overwritten": (lambda _, images, __: _overwrite(images, b"x", -1), CHANGED),
    "targets overwritten": (lambda *paths: _overwrite(paths[2], b"x", -8), CHANGED),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_rebuilt_and_reported(tmp_path: Path, damage: str) -> None:
    opened(tmp_path)
    path = cache(tmp_path).path("train")
    hurt, complaint = DAMAGES[damage]
    hurt(path, *arrays_in(tmp_path))
    found = opened(tmp_path)
    assert complaint in found.complaint
    assert found.complaint.startswith(f"{path} was rebuilt: ")
    check(found.images, Made())
    assert opened(tmp_path).done == "opened"
    assert len(arrays_in(tmp_path)) == 2


def test_another_recipe_has_another_file_and_other_data_replace_the_file(tmp_path: Path) -> None:
    opened(tmp_path, image_size=4)
    before = opened(tmp_path, image_size=5)
    assert before.complaint == ""
    found = opened(tmp_path, Made(151), image_size=5)
    assert "made from other files" in found.complaint
    check(found.images, Made(151))
    assert len(list(tmp_path.glob("*.json"))) == 2
    check(before.images, Made())  # who has the old files open can read them


def test_a_data_set_may_say_itself_what_its_images_depend_on(tmp_path: Path) -> None:
    class Told(Made):
        version = "1"

        def fingerprint(self) -> str:
            return self.version

    opened(tmp_path, Told())
    assert opened(tmp_path, Told()).done == "opened"
    Told.version = "2"
    assert "made from other files" in opened(tmp_path, Told()).complaint


def test_a_sample_is_a_copy_and_another_process_opens_the_file(tmp_path: Path) -> None:
    images = opened(tmp_path).images
    assert images is not None
    for part in images[3]:  # as a transform may do
        part.zero_()
    check(images, Made())
    text = pickle.dumps(images)
    assert len(text) < 150 * 48
    check(pickle.loads(text), Made())


def test_a_file_larger_than_the_memory_can_be_used(tmp_path: Path) -> None:
    count = 2 * psutil.virtual_memory().total // 2**24
    header = {"descr": "|u1", "fortran_order": False, "shape": (count, 1, 2**12, 2**12)}
    with (tmp_path / "large.npy").open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        file.truncate(file.tell() + count * 2**24)  # nothing but a hole
    images = CachedImages(tmp_path / "large.npy", torch.zeros(count), torch.zeros(0).long())
    assert len(images) == count
    assert not images[count - 1][0].any()


def test_an_image_that_the_data_set_gives_differently_rebuilds_it(tmp_path: Path) -> None:
    opened(tmp_path, Listed([(torch.full((1, 2, 2), 1, dtype=torch.uint8), 0)] * 3))
    found = opened(tmp_path, Listed([(torch.full((1, 2, 2), 2, dtype=torch.uint8), 0)] * 3))
    assert "image 0 differs from the data set" in found.complaint


ITEM = (torch.zeros(1, 4, 4, dtype=torch.uint8), 0)


def gone(index: int) -> None:
    if index == 100:
        raise FileNotFoundError("no such picture")


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (Listed([ITEM] * 64 + [(torch.zeros(1, 4, 5, dtype=torch.uint8), 0)]), r"one size.*gives uint8 1x4x4 and uint8 1x4x5"),
        (Listed([ITEM, (torch.zeros(1, 4, 5, dtype=torch.uint8), 0)]), r"different shapes.*\n.*data\.image_size"),
        (Listed([(ITEM[0], 1j)] * 3), r"data.cache: 'disk' keeps targets that are real numbers"),
        (Listed([(torch.zeros(1, 4, 4), 0)] * 3), r"data.cache: 'disk' keeps uint8 images, and this data set gives float32"),
        (Made(before=lambda index: torch.randint(0, 256, (1, 4, 4), dtype=torch.uint8)), "one random version of each image"),
        (Listed([(torch.zeros(3, 200, 200, dtype=torch.uint8), 0)] * 9000),
         r"9,000 images of uint8 3x200x200 need 1\.01 GiB, and .* has 0\.00 GiB free\n.*data.cache_dir on another disk"),
        (Listed([(torch.zeros(3, 100, 100, dtype=torch.uint8), 0)] * 100), r"data.cache_dir: cannot write .*: File too large"),
        # Not taken for an error of writing
        (Made(before=gone), r"^data.dataset: sample 100 cannot be read: FileNotFoundError: no such picture"),
    ],
    ids=["sizes", "shapes", "complex", "floats", "random", "space", "full", "gone"],
)  # fmt: skip
def test_images_that_cannot_be_kept_are_reported_and_leave_nothing(
    tmp_path: Path, dataset: Dataset[Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "GiB" in message:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 5000))  # type: ignore[attr-defined]
    before, limits = torch.get_rng_state(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        with pytest.raises(UserError, match=message):
            opened(tmp_path, dataset)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert torch.equal(before, torch.get_rng_state())
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".lock"]


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"data.cache_dir: cannot write .*Not a directory"):
        opened(tmp_path / "file" / "folder")


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_cache import Made, opened

def kill(index):
    if index == 100:
        os.kill(os.getpid(), signal.SIGKILL)

opened(Path(sys.argv[1]), Made(before=kill))
"""


def test_a_process_killed_at_work_leaves_nothing_that_is_read(tmp_path: Path) -> None:
    script = tmp_path / "script" / "killed.py"
    script.parent.mkdir()
    script.write_text(KILLED.format(tests=str(Path(__file__).parent)))
    done = forked.run([str(tmp_path / "caches")], script=str(script))
    assert done.returncode == -signal.SIGKILL
    (left,) = (tmp_path / "caches").glob(".*.tmp")
    found = opened(tmp_path / "caches")
    assert found.complaint == ""
    check(found.images, Made())
    assert not left.exists()


@pytest.mark.parametrize("locks", [True, False])
def test_of_two_at_once_one_makes_it_and_the_other_waits_or_without_locks_makes_it_too(
    locks: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not locks:
        unsupported = OSError(errno.ENOLCK, "No locks available")
        monkeypatch.setattr(preparation.fcntl, "flock", Mock(side_effect=unsupported))
    dataset = Made(before=lambda index: time.sleep(0.002))
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: opened(tmp_path, dataset), range(2)))
    for each in found:
        check(each.images, Made())
    assert sorted(each.done.split()[0] for each in found) == ["made", "opened" if locks else "made"]
    assert (dataset.read < 200) if locks else (dataset.read > 250)
    if locks:
        assert capsys.readouterr().err.startswith("waiting for another process that makes ")


def test_a_signal_that_the_run_handles_ends_the_making_and_is_passed_on(tmp_path: Path, handled: list[int]) -> None:
    handler = signal.getsignal(signal.SIGTERM)
    found = opened(tmp_path, Made(before=lambda index: os.kill(os.getpid(), signal.SIGTERM) if index == 70 else None))
    assert found.images is None
    assert handled == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is handler
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".lock"]


def test_progress_is_shown_once_it_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preparation, "_SHOWN_AFTER_S", 0.0)
    monkeypatch.setattr(preparation, "_SHOWN_EVERY_S", 0.0)
    opened(tmp_path)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" images")[0] for line in lines] == [f"caching train: {n} of 150" for n in (64, 128, 150)]
