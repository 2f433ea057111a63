"""Lists of many image files: the index that a later start reads, and when it no longer counts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from runner.base.errors import UserError
from runner.data.sources import listing
from runner.data.sources.folders import image_folder
from runner.data.sources.listing import images_below, list_classes


def save(path: Path, size: tuple[int, int] = (6, 4)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size).save(path)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(listing, "INDEXED_FROM", 8)
    monkeypatch.setattr(listing, "_SETTLED_S", 0.02)
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            for index in range(2):
                save(tmp_path / "images" / split / name / f"{index}.png")
    time.sleep(0.05)  # an index is made of folders that have been left alone for a while
    return tmp_path / "images"


def indexes(folder: Path) -> list[Path]:
    return sorted(folder.glob("files-*"))


def listed(root: Path, **settings: Any) -> dict[str, list[Path]]:
    return {split: dataset.paths for split, dataset in image_folder(str(root), **settings).items()}


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From now on, listing a folder of images is an error."""

    def refuse(folder: Path) -> None:
        raise AssertionError(f"{folder} is listed again")

    return lambda: monkeypatch.setattr(listing, "folders_below", refuse)


def test_the_order_is_that_of_sorted_paths_also_with_nested_folders(tmp_path: Path) -> None:
    for name in ("b/1.png", "b-c/1.png", "b.png", "a/z/1.PNG", "a/0.png", "ab.jpg", ".hidden.png", "x.txt"):
        save(tmp_path / "class" / name) if not name.endswith("txt") else (tmp_path / "class" / name).write_text("")
    visited: list[str] = []
    files, classes = list_classes(tmp_path, ["class"], visited)
    assert [os.fsdecode(name) for name in files.all_names()] == [
        str(path) for path in sorted(images_below(tmp_path / "class"))
    ]
    assert len(files) == len(classes) == 6
    assert {Path(path).name for path in visited} == {"class", "a", "z", "b", "b-c"}


def test_a_second_start_lists_no_folder_and_gets_the_same(root: Path, unread: Callable[[], None]) -> None:
    first = image_folder(str(root))
    unread()
    again = image_folder(str(root))
    for split, dataset in first.items():
        assert again[split].paths == dataset.paths
        assert again[split].targets.tolist() == dataset.targets.tolist() == [0, 0, 1, 1]
        assert again[split].fingerprint() == dataset.fingerprint()
        assert again[split][3][1] == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda root: save(root / "train" / "cat" / "7.png"),
        lambda root: (root / "val" / "dog" / "1.png").unlink(),
        lambda root: (root / "train" / "dog" / "1.png").rename(root / "train" / "dog" / "9.png"),
        lambda root: save(root / "train" / "cat" / "deeper" / "1.png"),
        lambda root: [save(root / split / "eel" / "1.png") for split in ("train", "val")],
    ],
    ids=["added", "removed", "renamed", "nested", "class"],
)
def test_a_change_of_a_folder_is_seen(root: Path, change: Callable[[Path], object]) -> None:
    before = listed(root)
    change(root)
    for folder in root.rglob("*"):
        os.utime(folder, (0, 0))  # as a copy that keeps times does
    assert listed(root) != before
    assert listed(root) == {
        split: [path for folder in sorted((root / split).iterdir()) for path in sorted(images_below(folder))]
        for split in ("train", "val")
    }


def test_a_file_that_was_overwritten_is_not_read(root: Path) -> None:
    image_folder(str(root))
    save(root / "train" / "cat" / "1.png", (60, 40))
    dataset = image_folder(str(root))["train"]
    dataset[0]
    with pytest.raises(UserError, match=r"cat/1\.png was changed after its folder was listed"):
        dataset[1]
    (root / "train" / "cat").touch()
    assert image_folder(str(root))["train"][1][0].shape == (3, 40, 60)


def test_no_index_is_kept_of_few_files_or_of_folders_that_just_changed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = root.with_name("images.cache")
    (root / "val" / "dog").touch()
    image_folder(str(root))
    time.sleep(0.05)
    monkeypatch.setattr(listing, "INDEXED_FROM", 9)
    image_folder(str(root))
    assert not cache.exists()


def test_a_damaged_index_and_one_of_other_folders_are_not_used(root: Path) -> None:
    whole = listed(root)
    (index,) = indexes(root.with_name("images.cache"))
    content = index.read_bytes()
    for damaged in (b"", content[:100], content[: len(content) // 2]):
        index.write_bytes(damaged)
        assert listed(root) == whole
    assert listed(root, val_folder="nothing") == {"train": whole["train"]}


def test_it_is_in_the_cache_folder_and_a_run_says_if_it_cannot_be_kept(
    root: Path, accepted: Any, tmp_path: Path, unread: Callable[[], None]
) -> None:
    words = ("train", "data=image_folder", f"data.root={root}", "data.image_size=8", "data.batch_size=4", "model=mlp")
    words += ("max_steps=1", "evaluate.test=false", "logger=none", "name=x")
    (tmp_path / "file").write_text("")
    said = accepted(*words, f"data.cache_dir={tmp_path / 'file'}")
    assert "cannot keep the list of files in" in said.out + said.err
    first = accepted(*words, f"data.cache_dir={tmp_path / 'kept'}")
    assert "no effect" not in first.out + first.err
    assert len(indexes(tmp_path / "kept")) == 1
    unread()
    again = accepted(*words, f"data.cache_dir={tmp_path / 'kept'}")
    assert again.summary["weights_sha256"] == first.summary["weights_sha256"] == said.summary["weights_sha256"]
