"""Images in folders: which are found, in which order, what is said where there are none, and the index of many."""

from __future__ import annotations

import json
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image
from plain_data import plain_image

from runner.base.errors import UserError
from runner.data.sources import listing
from runner.data.sources.folders import ImageFolder, image_folder
from runner.data.sources.listing import folders_below, list_classes

RUN = (
    "data=image_folder", "data.image_size=8", "data.num_workers=0", "data.batch_size=4", "model=mlp", "model.hidden=[4]",
    "device=cpu", "threads=1", "logger=none", "log.curves=false", "epochs=1",
)  # fmt: skip


@pytest.fixture
def root(tmp_path):
    for split in ("train", "test"):
        for name in ("dog", "cat"):
            for index in range(3):
                plain_image(tmp_path / split / name / f"{index}.png", (index, 0, 0))
    return tmp_path


def test_splits_classes_and_files_come_in_the_order_of_their_names(root):
    found = image_folder(str(root))
    assert list(found) == ["train", "test"]
    train = found["train"]
    assert train.classes == ("cat", "dog")
    assert train.targets.tolist() == [0, 0, 0, 1, 1, 1]
    assert train.paths == [root / "train" / name / f"{index}.png" for name in ("cat", "dog") for index in range(3)]
    image, target = train[4]
    assert image.dtype == torch.uint8
    assert image.shape == (3, 4, 6)
    assert image[0].unique().tolist() == [1]
    assert target == 1
    assert isinstance(target, int)


def test_a_folder_of_classes_alone_is_the_training_split_and_others_may_have_any_name(root):
    alone = image_folder(str(root / "train"))
    assert {split: len(dataset) for split, dataset in alone.items()} == {"train": 6}
    (root / "test").rename(root / "holdout")
    assert list(image_folder(str(root), val_folder="holdout")) == ["train", "val"]


def test_photos_of_any_readable_type_are_listed_others_are_counted_and_thumbnails_skipped(root, run, workdir):
    names = ("a.jfif", "b.JPE", "c.avif", "d.heic", "e.CR2", "@eaDir/0.png/t.jpg", "__MACOSX/f.png", ".hidden/g.png")
    (root / "train/cat/notes.txt").write_text("no image")
    plain_image(root / "train/cat/deep/er/B.JPG")
    plain_image(root / "train/cat/.hidden.png")
    for name in names:
        path = plain_image(root / "train" / "cat" / name, format="AVIF" if name == "c.avif" else "JPEG")
        plain_image(root / "@eaDir" / path.name, format="JPEG")
        plain_image(root / "train" / "@eaDir" / path.name, format="JPEG")
    for name in names[3:5]:
        (root / "train" / "cat" / name).write_bytes(b"another type")
    made = image_folder(str(root))["train"]
    names = ["0.png", "1.png", "2.png", "a.jfif", "b.JPE", "c.avif", "B.JPG"]
    assert [path.name for path in made.paths[:7]] == names
    assert made.classes == ("cat", "dog")
    assert [made[index][0].shape for index in range(7)] == [(3, 4, 6)] * 7
    result = run("train", *RUN, f"data.root={root}", "hydra.run.dir=mine")
    assert result.status == 0
    assert "train: images of types that are not read here (.heic" in result.out + result.err
    assert "are skipped: 2" in result.out + result.err
    result = run("predict", "ckpt_path=mine", f"input={root}/train/cat", "output=rows.csv", "threads=1")
    assert "2 images were not predicted" in result.out + result.err


def test_classes_whose_names_are_not_utf8_are_evaluated(root, run, workdir):
    for split in ("train", "test"):
        (root / split / "cat").rename(root / split / os.fsdecode(b"caf\xe9"))
    assert run("train", *RUN, f"data.root={root}", "hydra.run.dir=mine").status == 0
    result = run("eval", "ckpt_path=mine")
    assert (result.status, Path("mine/plots/confusion_test.png").is_file()) == (0, True), result.err


def test_links_are_followed_but_loops_add_nothing(root, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    plain_image(elsewhere / "more/z.png")
    cat = root / "train/cat"
    (cat / "more").symlink_to(elsewhere / "more")
    (cat / "again").symlink_to(elsewhere / "more")
    (cat / "up").symlink_to(root)
    (cat / "self").symlink_to(cat)
    (cat / "ring").symlink_to(cat / "ring")
    (elsewhere / "more/back").symlink_to(cat)
    assert image_folder(str(root))["train"].targets.tolist() == [0] * 4 + [1] * 3


def test_odd_file_names_survive_and_indices_count_from_the_end_and_stop_there(root):
    name = "ü ñ\n%s.png"
    plain_image(root / "train/cat" / name)
    train = image_folder(str(root))["train"]
    assert train.paths[3].name == name
    assert train[3][0].shape == (3, 4, 6)
    assert train.path(-1) == train.paths[6]
    for index in (7, -8):
        with pytest.raises(IndexError):
            train[index]


@pytest.mark.parametrize(
    ("made", "opened", "message"),
    [
        ((), "gone", "data.root: .*gone does not exist"),
        ((), "train/cat/0.png", "0.png is not a folder"),
        ((), "train/cat", "one folder of images for each class; there are only images of no class"),
        (("e",), "e", "for each class; there is none"),
        (("m/images", "m/masks"), "m", r"images and masks, and no classes\n.*experiment=segmentation"),
        (("train/bird", "test/bird"), "", "folder .*train/bird has no"),
        ([f"{split}/{name}" for split in ("train", "test") for name in ("\u00e9", "e\u0301")], "", "two classes of one name"),
        (("train/bird",), "", "bird only in .*train"),
        (("test/bird",), "", "bird only in .*test"),
        ((), "half", r"test but no folder 'train'.*\n.*train_folder"),
    ],
)  # fmt: skip
def test_folders_that_cannot_be_a_data_set_are_reported(root, made, opened, message):
    for folder in (*made, "half/test/cat"):
        (root / folder).mkdir(parents=True)
    with pytest.raises(UserError, match=message):
        image_folder(str(root / opened))


def test_a_pickled_data_set_reads_the_same_images_without_random_numbers(root):
    train, before = image_folder(str(root), image_size=4)["train"], torch.get_rng_state()
    copy = pickle.loads(pickle.dumps(train))
    assert copy.paths == train.paths
    assert torch.equal(copy[5][0], train[5][0])
    assert torch.equal(before, torch.get_rng_state())


def test_a_share_of_the_middle_can_be_cut_out(tmp_path):
    pixels = np.arange(12 * 16, dtype=np.uint8).reshape(12, 16)
    (tmp_path / "train" / "a").mkdir(parents=True)
    Image.fromarray(pixels).save(tmp_path / "train" / "a" / "0.png")
    train = image_folder(str(tmp_path), image_size=6, channels=1, crop_share=0.5)["train"]
    assert torch.equal(train[0][0][0], torch.from_numpy(pixels[3:9, 5:11]))


def test_a_fingerprint_follows_files_and_settings(root, monkeypatch):
    def print_of(**settings):
        return image_folder(str(root), **settings)["train"].fingerprint()

    first = print_of(image_size=4)
    assert print_of(image_size=4) == first
    others = {print_of(image_size=4, **other) for other in ({"channels": 1}, {"crop_share": 0.5}, {"max_pixels": 99})}
    others |= {print_of(image_size=5), print_of()}
    os.utime(root / "train/cat/0.png", ns=(1, 1))
    others.add(print_of(image_size=4))
    (root / "train/cat/0.png").rename(root / "train/cat/00.png")
    others.add(print_of(image_size=4))
    assert len(others | {first}) == 8
    monkeypatch.chdir(root.parent)
    assert image_folder(root.name, image_size=4)["train"].fingerprint() == print_of(image_size=4)
    gone, known = image_folder(str(root))["train"], print_of()
    (root / "train/cat/00.png").unlink()
    assert gone.fingerprint() != known


def test_a_run_on_folders_of_train_and_val_trains_on_all_of_train_and_says_that_it_has_not_tested(
    run, accepted, rejected, workdir
):
    for split, count in (("train", 10), ("val", 4)):
        for color, name in enumerate(("cat", "dog")):
            for number in range(count):
                plain_image(workdir / "images" / split / name / f"{number}.png", (color * 200, number, 0), (8, 8))
    result = accepted("train", *RUN, "data.root=images", "hydra.run.dir=mine")
    assert "images (image_folder), 3x8x8, 2 classes, 20 train, 8 val\n" in result.out
    assert "not tested: there is no test split" in result.out
    assert "best evaluation: step " in result.out
    summary = json.loads(Path("mine/summary.json").read_text())
    assert "test" not in summary
    assert summary["status"] == "finished"
    result = rejected("eval", "ckpt_path=mine", "split=test", "device=cpu")
    assert "split: this data has no 'test' split" in result.err
    # A checkpoint of a run that divided `train` keeps its splits, also where the data are selected again.
    asked = run("train", *RUN, "data.root=images", "data.split.test=0.2", "hydra.run.dir=asked")
    assert "16 train, 8 val, 4 test" in asked.out
    resumed = accepted("train", *RUN[:-1], "data.root=images", "epochs=2", "ckpt_path=asked")
    assert "16 train, 8 val, 4 test" in resumed.out


@pytest.fixture
def many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(listing, "INDEXED_FROM", 8)
    monkeypatch.setattr(listing, "_SETTLED_S", 0.02)
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            for index in range(2):
                plain_image(tmp_path / "images" / split / name / f"{index}.png")
    time.sleep(0.05)  # an index is made of folders that have been left alone for a while
    return tmp_path / "images"


def opened(many: Path, **settings: Any) -> dict[str, ImageFolder]:
    """The data sets of a run, which keeps its index."""
    made = image_folder(str(many), cache_folder=str(many.with_name("cache")), **settings)
    assert made["train"].keep_indexes() == []
    return made


def listed(many: Path, **settings: Any) -> dict[str, list[Path]]:
    return {split: dataset.paths for split, dataset in opened(many, **settings).items()}


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From now on, listing a folder of images is an error."""
    refuse = Mock(side_effect=AssertionError("a folder is listed again"))
    return lambda: monkeypatch.setattr(listing, "folders_below", refuse)


def test_the_order_is_that_of_sorted_paths_also_with_nested_folders(tmp_path: Path) -> None:
    images = [tmp_path / "class" / name for name in ("b/1.png", "b-c/1.png", "b.png", "a/z/1.PNG", "a/0.png", "ab.jpg")]
    for path in (*images, tmp_path / "class" / ".hidden.png"):
        plain_image(path)
    (tmp_path / "class" / "x.txt").write_text("")
    times: listing.Times = {}
    files, classes = list_classes(tmp_path, ["class"], times)
    assert [Path(os.fsdecode(name)) for name in files.all_names()] == sorted(images)
    assert len(files) == len(classes) == 6
    assert {Path(path).name for path in times} == {"class", "a", "z", "b", "b-c"}


@pytest.mark.parametrize("below", ["", "train"], ids=["splits", "relative"])
def test_a_second_start_lists_no_folder_and_gets_the_same(
    below: str, many: Path, unread: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    (many / "val" / "dog" / "a.heic").write_bytes(b"")
    time.sleep(0.05)
    monkeypatch.setattr(listing, "INDEXED_FROM", 4)
    monkeypatch.chdir(many)
    first = opened(Path(below) if below else many)
    unread()
    again = opened(Path(below) if below else many)
    assert again["train"].paths[1] == Path(below or many / "train", "cat", "1.png")
    for split, dataset in first.items():
        assert again[split].paths == dataset.paths
        assert len(again[split].warnings) == len(dataset.warnings) == (split == "val")
        assert again[split].targets.tolist() == dataset.targets.tolist() == [0, 0, 1, 1]
        assert again[split].fingerprint() == dataset.fingerprint()
        assert again[split][3][1] == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda many: plain_image(many / "train" / "cat" / "7.png"),
        lambda many: (many / "val" / "dog" / "1.png").unlink(),
        lambda many: (many / "train" / "dog" / "1.png").rename(many / "train" / "dog" / "9.png"),
        lambda many: plain_image(many / "train" / "cat" / "deeper" / "1.png"),
        lambda many: [plain_image(many / split / "eel" / "1.png") for split in ("train", "val")],
    ],
    ids=["added", "removed", "renamed", "nested", "class"],
)
def test_a_change_of_a_folder_is_seen(many: Path, change: Callable[[Path], object]) -> None:
    before = listed(many)
    change(many)
    assert listed(many) != before
    assert listed(many) == {
        split: [path for folder in sorted((many / split).iterdir()) for path in sorted(folder.rglob("*.png"))]
        for split in ("train", "val")
    }


def test_a_file_that_comes_while_the_others_are_listed_is_seen_by_the_next_start(
    many: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(folder: Path, times: Any = None) -> Any:
        yield from folders_below(folder, times)
        plain_image(many / "train" / "cat" / "late.png")

    monkeypatch.setattr(listing, "folders_below", slow)
    monkeypatch.setattr(listing, "_SETTLED_S", -60.0)  # as if the clock of the file system were late
    assert len(listed(many)["train"]) == 4
    monkeypatch.setattr(listing, "folders_below", folders_below)
    assert len(listed(many)["train"]) == 5


def test_a_file_that_was_overwritten_is_not_read(many: Path) -> None:
    opened(many)
    plain_image(many / "train" / "cat" / "1.png", size=(60, 40))
    dataset = opened(many)["train"]
    dataset[0]
    with pytest.raises(UserError, match=r"cat/1\.png has another size than when the files were listed") as caught:
        dataset[1]
    assert f"touch {many / 'train' / 'cat'}" in str(caught.value)
    (many / "train" / "cat").touch()
    assert opened(many)["train"][1][0].shape == (3, 40, 60)


def test_no_index_is_made_of_few_files_or_where_a_change_would_not_be_seen(
    many: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kept(**changes: Any) -> bool:
        with monkeypatch.context() as patch:
            for name, value in changes.items():
                patch.setattr(listing, name, value)
            opened(many)
        return many.with_name("cache").exists()

    assert not kept(_SETTLED_S=60.0), "a folder was changed a moment ago"
    assert not kept(INDEXED_FROM=9), "there are few files"
    assert not kept(times_of=lambda folder: [5, 5, 5]), "all folders have one time of change"
    image_folder(str(many), cache_folder=str(many / "train"))["train"].keep_indexes()
    assert not list((many / "train").glob("*.index")), "the index would change the folder"
    (link := many / "train" / "cat" / "more").symlink_to(many / "absent")
    time.sleep(0.05)
    assert not kept(), "a link leads nowhere yet"
    link.unlink()
    time.sleep(0.05)
    assert kept()


def test_a_damaged_index_is_not_used(many: Path) -> None:
    whole = listed(many)
    (index,) = many.with_name("cache").iterdir()
    for length in (0, 100, index.stat().st_size // 2):
        os.truncate(index, length)
        assert listed(many) == whole
        assert index.stat().st_size > 200, "it is written again"


def test_other_folders_and_other_rules_have_another_index(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = listed(many)
    assert listed(many, val_folder="nothing") == {"train": whole["train"]}
    (many / "train" / "cat" / "1.png").rename(many / "train" / "cat" / "1.new")
    (many / "train" / "cat").touch()
    time.sleep(0.05)
    assert len(listed(many)["train"]) == 3
    monkeypatch.setattr(listing, "EXTENSIONS", (*listing.EXTENSIONS, ".new"))
    monkeypatch.setattr(listing, "_ENDINGS", (*listing.EXTENSIONS,))
    assert len(listed(many)["train"]) == 4


def test_a_run_keeps_it_in_the_cache_folder_and_says_if_it_cannot_and_eval_writes_none(
    many: Path, accepted: Any, tmp_path: Path, unread: Callable[[], None]
) -> None:
    words = ("train", *RUN, f"data.root={many}", "max_steps=1", "evaluate.test=false", "name=x")
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
