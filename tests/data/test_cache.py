"""The cache of decoded images: the same bits with it as without, never half of it, never another's."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked
import numpy as np
import psutil
import pytest
import torch
from extended import some
from PIL import Image
from read_splits import read_splits
from torch import Tensor
from torch.utils.data import Dataset

from runner.base.errors import UserError
from runner.config.schema.sections import Data, Normalize, Split, Transform
from runner.data import cache as cache_module
from runner.data import preparation
from runner.data.cache import Cache, Opened
from runner.data.loaders import MemoryLoader
from runner.data.module import DataModule
from runner.data.sources.arrays import CachedImages
from runner.data.workers import WorkerLoader

CPU = torch.device("cpu")


class Made(Dataset[Any]):
    """Images out of nothing; counts how often it is read, and calls a function before."""

    def __init__(self, samples: int = 150, before: Callable[[int], None] = lambda index: None) -> None:
        self.samples, self.before, self.read = samples, before, 0

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        self.read += 1
        self.before(index)
        return torch.arange(index, index + 48, dtype=torch.int64).to(torch.uint8).view(3, 4, 4), index % 5


class Listed(Dataset[Any]):
    """A data set made of a list."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


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


def test_once_made_it_is_opened_and_few_images_are_read_again(tmp_path: Path) -> None:
    opened(tmp_path)
    dataset = Made()
    found = opened(tmp_path, dataset)
    assert (found.done, found.complaint) == ("opened", "")
    assert 1 <= dataset.read <= 4
    check(found.images, Made())


@pytest.mark.parametrize(
    ("target", "dtype"),
    [(2.5, torch.float32), (torch.tensor([0.5, 1.5]), torch.float32), (torch.tensor(True), torch.bool)],
    ids=["number", "vector", "truth"],
)
def test_targets_of_other_kinds_are_kept_as_they_are(tmp_path: Path, target: Any, dtype: torch.dtype) -> None:
    dataset = Listed([(torch.full((1, 2, 2), index, dtype=torch.uint8), target) for index in range(3)])
    found = opened(tmp_path, dataset).images
    check(found, dataset)
    assert found is not None
    assert found.targets.dtype == dtype


@pytest.mark.parametrize("kind", [np.uint16, np.uint32])
def test_wide_unsigned_targets_are_kept_as_int64(tmp_path: Path, kind: Any) -> None:
    dataset = Listed([(torch.full((1, 2, 2), index, dtype=torch.uint8), kind(index)) for index in range(3)])
    for done in ("made", "opened"):
        found = opened(tmp_path, dataset)
        assert found.done.startswith(done)
        assert found.images is not None
        assert torch.equal(found.images.targets, torch.arange(3))


def arrays_in(folder: Path) -> list[Path]:
    """The images, and the targets."""
    return sorted(folder.glob("*.npy"), key=lambda path: len(path.name))


def _overwrite(path: Path, content: bytes, place: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(place, os.SEEK_END if place < 0 else os.SEEK_SET)
        file.write(content)


def _lie(path: Path, **others: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | others))


DAMAGES: dict[str, tuple[Callable[[Path, Path, Path], Any], str]] = {
    "empty": (lambda path, *_: path.write_bytes(b""), "rebuilt: it is damaged (Expecting value"),
    "text": (lambda path, *_: path.write_text("hello"), "rebuilt: it is damaged (Expecting value"),
    "other JSON": (lambda path, *_: path.write_text("[]"), "list indices"),
    "deep JSON": (lambda path, *_: path.write_text("[" * 10**5), "recursion"),
    "not UTF-8": (lambda path, *_: path.write_bytes(b"\xff" * 99), "decode"),
    "a FIFO": (lambda path, *_: (path.unlink(), os.mkfifo(path)), "not a regular file"),
    "no arrays": (lambda path, *_: _lie(path, arrays={}), "rebuilt: it is damaged (not enough values"),
    "arrays elsewhere": (lambda path, *_: _lie(path, arrays={"a/b": [], "..": []}), "Invalid name"),
    "huge numbers": (lambda path, *_: _lie(path, unreadable=[2**99]), "Overflow"),
    "another key": (
        lambda path, *_: _lie(path, key="0"),
        "rebuilt: it was made from other files, settings or library versions",
    ),
    "images gone": (lambda _, images, __: images.unlink(), "No such file"),
    "targets gone": (lambda *paths: paths[2].unlink(), "No such file"),
    "images cut": (lambda _, images, __: os.truncate(images, 5000), "was changed after it was made"),
    "images longer": (lambda _, images, __: _overwrite(images, b"x" * 9999), "was changed after it was made"),
    "images overwritten": (lambda _, images, __: _overwrite(images, b"x", -1), "was changed after it was made"),
    "targets overwritten": (lambda *paths: _overwrite(paths[2], b"x", -8), "was changed after it was made"),
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
    assert opened(tmp_path, image_size=5).complaint == ""
    assert len(list(tmp_path.glob("*.json"))) == 2
    found = opened(tmp_path, Made(151), image_size=5)
    assert "made from other files" in found.complaint
    check(found.images, Made(151))
    assert len(list(tmp_path.glob("*.json"))) == 2


def test_a_data_set_may_say_itself_what_its_images_depend_on(tmp_path: Path) -> None:
    class Told(Made):
        version = "1"

        def fingerprint(self) -> str:
            return self.version

    opened(tmp_path, Told())
    assert opened(tmp_path, Told()).done == "opened"
    Told.version = "2"
    assert "made from other files" in opened(tmp_path, Told()).complaint


def test_what_a_transform_does_to_a_sample_stays_with_the_sample(tmp_path: Path) -> None:
    images = opened(tmp_path).images
    assert images is not None
    images[3][0].zero_()
    images[3][1].zero_()
    check(images, Made())


def test_passed_to_another_process_it_is_opened_there_and_not_copied(tmp_path: Path) -> None:
    images = opened(tmp_path).images
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


def test_files_that_are_removed_or_rebuilt_can_be_read_by_who_has_them_open(tmp_path: Path) -> None:
    found = opened(tmp_path).images
    opened(tmp_path, Made(151))
    check(found, Made())


ITEM = (torch.zeros(1, 4, 4, dtype=torch.uint8), 0)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([ITEM] * 64 + [(torch.zeros(1, 4, 5, dtype=torch.uint8), 0)], r"one size.*gives uint8 1x4x4 and uint8 1x4x5"),
        ([ITEM, (torch.zeros(1, 4, 5, dtype=torch.uint8), 0)], r"different shapes.*\n.*data\.image_size"),
        ([(ITEM[0], 1j)] * 3, r"data.cache: 'disk' keeps targets that are real numbers"),
        ([(torch.zeros(1, 4, 4), 0)] * 3, r"data.cache: 'disk' keeps uint8 images, and this data set gives float32"),
    ],
)
def test_images_that_cannot_be_kept_are_reported(tmp_path: Path, items: list[Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        opened(tmp_path, Listed(items))
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".lock"]


def test_a_data_set_with_random_images_is_refused(tmp_path: Path) -> None:
    class Drawn(Made):
        def __getitem__(self, index: int) -> tuple[Tensor, Any]:
            return torch.randint(0, 256, (1, 4, 4), dtype=torch.uint8), 0

    before = torch.get_rng_state()
    with pytest.raises(UserError, match="one random version of each image"):
        opened(tmp_path, Drawn())
    assert torch.equal(before, torch.get_rng_state())


def test_space_is_checked_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 5000))  # type: ignore[attr-defined]
    big = Listed([(torch.zeros(3, 200, 200, dtype=torch.uint8), 0)] * 9000)
    with pytest.raises(
        UserError, match=r"9,000 images of 3x200x200 need 1\.01 GiB, and .* has 0\.00 GiB free"
    ) as caught:
        opened(tmp_path, big)
    assert "allowed: data.cache_dir on another disk" in str(caught.value)


def test_a_disk_that_fills_up_is_reported_and_leaves_nothing(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        with pytest.raises(UserError, match=r"data.cache_dir: cannot write .*: File too large"):
            opened(tmp_path, Listed([(torch.zeros(3, 100, 100, dtype=torch.uint8), 0)] * 100))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".lock"]


def test_an_error_of_the_data_is_not_taken_for_one_of_writing(tmp_path: Path) -> None:
    def gone(index: int) -> None:
        if index == 100:
            raise FileNotFoundError("no such picture")

    with pytest.raises(
        UserError, match=r"^data.dataset: sample 100 cannot be read: FileNotFoundError: no such picture"
    ):
        opened(tmp_path, Made(before=gone))
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".lock"]


def test_a_folder_that_cannot_be_made_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
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
    left = arrays_in(tmp_path / "caches")
    assert len(left) == 1
    found = opened(tmp_path / "caches")
    assert found.complaint == ""
    check(found.images, Made())
    assert not left[0].exists()


def _at_once(count: int, work: Callable[[], Any]) -> list[Any]:
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(work())) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_of_two_at_once_one_makes_it_and_the_other_waits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = Made(before=lambda index: time.sleep(0.002))
    found = _at_once(2, lambda: opened(tmp_path, dataset))
    for each in found:
        check(each.images, Made())
    assert sorted(each.done.split()[0] for each in found) == ["made", "opened"]
    assert dataset.read < 200
    assert capsys.readouterr().err.startswith("waiting for another process that makes ")


def test_without_locks_both_make_it_and_both_are_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(lock: int, how: int) -> None:
        raise OSError(preparation.errno.ENOLCK, "No locks available")

    monkeypatch.setattr(preparation.fcntl, "flock", unsupported)
    dataset = Made(before=lambda index: time.sleep(0.002))
    for each in _at_once(2, lambda: opened(tmp_path, dataset)):
        check(each.images, Made())
    assert dataset.read > 250


@pytest.fixture
def handled() -> Iterator[list[int]]:
    received: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    yield received
    signal.signal(signal.SIGTERM, before)


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


# Through the configuration


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    generator = np.random.default_rng(0)
    for number in range(24):
        folder = tmp_path / "photos" / ("train" if number < 18 else "test") / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 256, (20 + number, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.jpg")
    return tmp_path / "photos"


AUGMENTED = Transform(
    train=[
        {"_target_": "runner.data.transforms.augment.RandomShift"},
        {"_target_": "runner.data.transforms.augment.RandomFlip"},
    ]
)
NOISY = Transform(sample_train=[{"_target_": "runner.data.transforms.crops.RandomResizedCrop", "size": None}])


def put_together(root: Path, transform: Transform | None = None, **keys: Any) -> DataModule:
    settings: dict[str, Any] = {"image_size": 16, "batch_size": 5, "num_workers": 0, "split": Split(val=0.2)}
    node = {"_target_": "runner.data.sources.folders.image_folder"}
    data = Data(dataset=node, root=str(root), **(settings | keys))
    return read_splits(data, transform, batch_size=4)


def assert_same_batches(one: DataModule, other: DataModule) -> None:
    assert (one.mean, one.std, one.classes) == (other.mean, other.std, other.classes)
    assert torch.equal(one.class_counts, other.class_counts)  # type: ignore[arg-type]
    for first, second in zip(
        (one.train, one.val, one.test, one.train_for_eval),
        (other.train, other.val, other.test, other.train_for_eval),
        strict=True,
    ):
        assert first is not None
        assert second is not None
        for epoch in (0, 1):
            batches = zip(first.loader.batches(epoch, 0, 4), second.loader.batches(epoch, 0, 4), strict=True)
            for ours, theirs in batches:
                for name in ("images", "targets", "indices"):
                    assert torch.equal(getattr(ours, name), getattr(theirs, name))
                    assert getattr(ours, name).dtype == getattr(theirs, name).dtype


@pytest.mark.parametrize(
    ("transform", "keys"),
    some(
        [
            (AUGMENTED, {}),
            (AUGMENTED, {"placement": "ram"}),
            (AUGMENTED, {"normalize": Normalize(mean=[0.5], std=[0.2])}),
            (AUGMENTED, {"placement": "disk"}),
            (NOISY, {"num_workers": 2}),
        ],
        0,
        3,
        4,
        several=True,
    ),
    ids=["usual", "in RAM", "statistics given", "one by one", "sample transforms"],
)
def test_batches_are_the_same_bits_with_it_and_without(
    photos: Path, transform: Transform, keys: dict[str, Any]
) -> None:
    reference = put_together(photos, transform, **{key: value for key, value in keys.items() if key != "placement"})
    for _ in range(2):
        splits = put_together(photos, transform, cache="disk", **keys)
        assert_same_batches(reference, splits)
        read = transform is NOISY or keys.get("placement") == "disk"
        assert isinstance(splits.train.loader, WorkerLoader if read else MemoryLoader)
        assert splits.warnings == []
        splits.close()


def rows(splits: DataModule) -> dict[str, tuple[str, str]]:
    return {label: (value, reason) for label, value, reason in splits.choices}


def test_the_files_are_beside_the_images_or_where_configured(photos: Path, tmp_path: Path) -> None:
    first = rows(put_together(photos, cache="disk"))
    assert first["data path"] == ("cache file", "0.0 MiB of images, and the CPU computes")
    for split in ("train", "test"):
        path, done = first[f"{split} cache"]
        assert Path(path).parent == tmp_path / "photos.cache"
        assert done.startswith("made in")
    assert rows(put_together(photos, cache="disk"))["test cache"][1] == "opened"
    put_together(photos, cache="disk", cache_dir=str(tmp_path / "elsewhere"))
    assert len(list((tmp_path / "elsewhere").glob("*.json"))) == 2
    assert rows(put_together(photos, cache="disk", placement="ram"))["data path"] == ("in RAM", "as set")


def test_what_reads_images_once_uses_a_cache_that_is_there_and_makes_none(photos: Path, tmp_path: Path) -> None:
    def read_once(placement: Any = "auto") -> DataModule:
        node = {"_target_": "runner.data.sources.folders.image_folder"}
        data = Data(dataset=node, root=str(photos), image_size=16, cache="disk", num_workers=0, placement=placement)
        return read_splits(data, batch_size=4, make_cache=False)

    splits = read_once()
    assert rows(splits) == rows(read_once())
    assert rows(splits)["data path"] == ("workers", "images are read one by one")
    assert splits.warnings == []
    in_ram = read_once("ram")
    assert rows(in_ram) == rows(splits)
    assert in_ram.warnings == ["data.placement=ram has no effect: data.cache was not made"]
    assert not (tmp_path / "photos.cache").exists()
    put_together(photos, cache="disk")
    assert rows(read_once())["train cache"][1] == "opened"


def test_a_changed_file_is_decoded_again(photos: Path) -> None:
    put_together(photos, cache="disk")
    changed = next((photos / "train" / "a").iterdir())
    Image.new("RGB", (30, 30), (200, 10, 10)).save(changed)
    splits = put_together(photos, cache="disk")
    (warning,) = splits.warnings
    assert "was rebuilt: it was made from other files" in warning
    assert rows(splits)["test cache"][1] == "opened"
    assert_same_batches(put_together(photos), splits)


@pytest.mark.parametrize("key", ["sample_train", "sample_eval"])
def test_crops_from_whole_images_and_a_cache_of_their_middles_exclude_each_other(photos: Path, key: str) -> None:
    crops = Transform(**{key: [{"_target_": "runner.data.transforms.crops.RandomResizedCrop", "size": 16}]})
    with pytest.raises(UserError, match=rf"transform.{key}.0 crops from whole images\n.*allowed: data.cache=null"):
        put_together(photos, crops, cache="disk")


def test_a_run_that_is_asked_to_stop_meanwhile_goes_on_from_the_files(
    photos: Path, handled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = cache_module._decoded

    def interrupted(*args: Any, **named: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return decoded(*args, **named)

    monkeypatch.setattr(cache_module, "_decoded", interrupted)
    splits = put_together(photos, cache="disk", placement="ram")
    assert handled == [signal.SIGTERM]
    assert splits.warnings == [
        "data.cache was not made: a signal asks the run to stop",
        "data.placement=ram has no effect: data.cache was not made",
    ]
    assert_same_batches(put_together(photos), splits)


def test_a_whole_run_ends_with_the_same_weights(train: Any, photos: Path) -> None:
    words = ["data=image_folder", f"data.root={photos}", "data.image_size=16", "data.batch_size=6", "epochs=2"]
    words += ["model=small_cnn", "transform=standard", "evaluate.test=false", "callbacks=none"]
    digests = [train(*words, f"data.cache={kind}").summary["weights_sha256"] for kind in ("null", "disk")]
    assert digests[0] == digests[1]
