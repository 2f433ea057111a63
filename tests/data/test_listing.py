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
from runner.data.sources.folders import ImageFolder, image_folder
from runner.data.sources.listing import folders_below, list_classes


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


def opened(root: Path, **settings: Any) -> dict[str, ImageFolder]:
    """The data sets of a run, which keeps its index."""
    made = image_folder(str(root), cache_folder=str(root.with_name("cache")), **settings)
    assert made["train"].keep_indexes() == []
    return made


def listed(root: Path, **settings: Any) -> dict[str, list[Path]]:
    return {split: dataset.paths for split, dataset in opened(root, **settings).items()}


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From now on, listing a folder of images is an error."""

    def refuse(folder: Path, times: Any) -> None:
        raise AssertionError(f"{folder} is listed again")

    return lambda: monkeypatch.setattr(listing, "folders_below", refuse)


def test_the_order_is_that_of_sorted_paths_also_with_nested_folders(tmp_path: Path) -> None:
    images = [tmp_path / "class" / name for name in ("b/1.png", "b-c/1.png", "b.png", "a/z/1.PNG", "a/0.png", "ab.jpg")]
    for path in (*images, tmp_path / "class" / ".hidden.png"):
        save(path)
    (tmp_path / "class" / "x.txt").write_text("")
    times: listing.Times = {}
    files, classes = list_classes(tmp_path, ["class"], times)
    assert [Path(os.fsdecode(name)) for name in files.all_names()] == sorted(images)
    assert len(files) == len(classes) == 6
    assert {Path(path).name for path in times} == {"class", "a", "z", "b", "b-c"}


@pytest.mark.parametrize("below", ["", "train"], ids=["splits", "relative"])
def test_a_second_start_lists_no_folder_and_gets_the_same(
    below: str, root: Path, unread: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "val" / "dog" / "a.heic").write_bytes(b"")
    time.sleep(0.05)
    monkeypatch.setattr(listing, "INDEXED_FROM", 4)
    monkeypatch.chdir(root)
    first = opened(Path(below) if below else root)
    unread()
    again = opened(Path(below) if below else root)
    assert again["train"].paths[1] == Path(below or root / "train", "cat", "1.png")
    for split, dataset in first.items():
        assert again[split].paths == dataset.paths
        assert len(again[split].warnings) == len(dataset.warnings) == (split == "val")
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
    assert listed(root) != before
    assert listed(root) == {
        split: [path for folder in sorted((root / split).iterdir()) for path in sorted(folder.rglob("*.png"))]
        for split in ("train", "val")
    }


def test_a_file_that_comes_while_the_others_are_listed_is_seen_by_the_next_start(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(folder: Path, times: Any = None) -> Any:
        yield from folders_below(folder, times)
        save(root / "train" / "cat" / "late.png")

    monkeypatch.setattr(listing, "folders_below", slow)
    monkeypatch.setattr(listing, "_SETTLED_S", -60.0)  # as if the clock of the file system were late
    assert len(listed(root)["train"]) == 4
    monkeypatch.setattr(listing, "folders_below", folders_below)
    assert len(listed(root)["train"]) == 5


def test_a_file_that_was_overwritten_is_not_read(root: Path) -> None:
    opened(root)
    save(root / "train" / "cat" / "1.png", (60, 40))
    dataset = opened(root)["train"]
    dataset[0]
    with pytest.raises(UserError, match=r"cat/1\.png has another size than when the files were listed") as caught:
        dataset[1]
    assert f"touch {root / 'train' / 'cat'}" in str(caught.value)
    (root / "train" / "cat").touch()
    assert opened(root)["train"][1][0].shape == (3, 40, 60)


def test_no_index_is_made_of_few_files_or_where_a_change_would_not_be_seen(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kept(**changes: Any) -> bool:
        with monkeypatch.context() as patch:
            for name, value in changes.items():
                patch.setattr(listing, name, value)
            opened(root)
        return root.with_name("cache").exists()

    assert not kept(_SETTLED_S=60.0), "a folder was changed a moment ago"
    assert not kept(INDEXED_FROM=9), "there are few files"
    assert not kept(times_of=lambda folder: [5, 5, 5]), "all folders have one time of change"
    image_folder(str(root), cache_folder=str(root / "train"))["train"].keep_indexes()
    assert not list((root / "train").glob("*.index")), "the index would change the folder"
    (link := root / "train" / "cat" / "more").symlink_to(root / "absent")
    time.sleep(0.05)
    assert not kept(), "a link leads nowhere yet"
    link.unlink()
    time.sleep(0.05)
    assert kept()


def test_a_damaged_index_is_not_used(root: Path) -> None:
    whole = listed(root)
    (index,) = root.with_name("cache").iterdir()
    for length in (0, 100, index.stat().st_size // 2):
        os.truncate(index, length)
        assert listed(root) == whole
        assert index.stat().st_size > 200, "it is written again"


def test_other_folders_and_other_rules_have_another_index(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = listed(root)
    assert listed(root, val_folder="nothing") == {"train": whole["train"]}
    (root / "train" / "cat" / "1.png").rename(root / "train" / "cat" / "1.new")
    (root / "train" / "cat").touch()
    time.sleep(0.05)
    assert len(listed(root)["train"]) == 3
    monkeypatch.setattr(listing, "EXTENSIONS", (*listing.EXTENSIONS, ".new"))
    monkeypatch.setattr(listing, "_ENDINGS", (*listing.EXTENSIONS,))
    assert len(listed(root)["train"]) == 4


def test_a_run_keeps_it_in_the_cache_folder_and_says_if_it_cannot_and_eval_writes_none(
    root: Path, accepted: Any, tmp_path: Path, unread: Callable[[], None]
) -> None:
    words = ("train", "data=image_folder", f"data.root={root}", "data.image_size=8", "data.batch_size=4", "model=mlp")
    words += ("max_steps=1", "evaluate.test=false", "logger=none", "name=x")
    (tmp_path / "file").write_text("")
    said = accepted(*words, f"data.cache_dir={tmp_path / 'file'}")
    assert "cannot keep what is known of the files of data in" in said.out + said.err
    first = accepted(*words, f"data.cache_dir={tmp_path / 'kept'}")
    assert "no effect" not in first.out + first.err
    (index,) = (tmp_path / "kept").iterdir()
    index.unlink()
    accepted("eval", f"ckpt_path={first.directory}", "split=val")
    assert not list((tmp_path / "kept").iterdir()), "only a training names the folder itself"
    accepted(*words, f"data.cache_dir={tmp_path / 'kept'}")
    unread()
    again = accepted(*words, f"data.cache_dir={tmp_path / 'kept'}")
    assert again.summary["weights_sha256"] == first.summary["weights_sha256"] == said.summary["weights_sha256"]
