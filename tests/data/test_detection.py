"""Annotations of boxes and masks: what is read of each format, and what is said about mistakes."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn_objects import changed, read_coco
from extras import needs
from torch import Tensor
from torch.testing import assert_close
from torchvision import tv_tensors
from torchvision.transforms import v2

from runner.base.errors import UserError
from runner.data.dataset_fingerprint import fingerprint_data
from runner.data.sampler import AllSamples
from runner.data.sources.detection import coco, yolo
from runner.data.sources.tables import image_table
from runner.data.transforms.detection import per_object


def boxes_of(root: str | Path) -> list[Tensor]:
    """The boxes in each training image of YOLO's files."""
    return [target["boxes"] for _, target in yolo(str(root))["train"]]


def test_a_coco_sample_is_an_image_and_its_objects(drawn: Path) -> None:
    contents = json.loads((drawn / "train.json").read_text())
    changed(drawn / "train.json", lambda it: [it["annotations"][0].update(iscrowd=1), it["annotations"].reverse()])
    found = read_coco(drawn)
    assert found["train"].classes == ("tall", "wide")
    assert [len(found[split]) for split in ("train", "val")] == [5, 3]
    image, target = found["train"][2]
    assert isinstance(image, tv_tensors.Image)
    assert (image.dtype, image.shape) == (torch.uint8, (3, 32, 40))
    own = [each for each in reversed(contents["annotations"]) if each["image_id"] == 102]
    assert isinstance(target["boxes"], tv_tensors.BoundingBoxes)
    assert target["boxes"].tolist() == [[x, y, x + w, y + h] for x, y, w, h in (each["bbox"] for each in own)]
    assert target["labels"].tolist() == [1 if each["category_id"] == 3 else 2 for each in own]
    assert target["image_id"] == 102
    assert found["train"][0][1]["iscrowd"].tolist() == [1]
    empty = found["train"][3][1]
    assert (empty["boxes"].shape, empty["boxes"].dtype, empty["labels"].dtype) == ((0, 4), torch.float32, torch.int64)


@pytest.mark.parametrize("kind", ["coco", "yolo", "csv"])
def test_annotations_name_no_files_outside_of_the_root(kind: str, drawn: Path, tmp_path: Path) -> None:
    inner, whole = tmp_path / "inner", [str(path) for path in sorted((tmp_path / "images/train").iterdir())]
    inner.mkdir()
    (tmp_path / "link").symlink_to(inner)
    files, up = [Path(name).name for name in whole], "../images/train"

    def read(root: Path, names: list[str]) -> Any:
        contents = json.loads((drawn / "train.json").read_text())
        for image, name in zip(contents["images"], names, strict=True):
            image["file_name"] = name
        (inner / "coco").write_text(json.dumps(contents))
        (inner / "yolo").write_text(f"names: [tall, wide]\ntrain: {Path(names[0]).parent}\n")
        (inner / "a.csv").write_text("".join(["image,label\n", *(f"{name},1\n" for name in names)]))
        if kind == "csv":
            return image_table(str(root), str(inner / "a.csv"))["train"]
        more = ["."] if kind == "coco" else []
        return {"coco": coco, "yolo": yolo}[kind](str(root), *more, str(inner / kind))["train"]

    for root in (inner, tmp_path / "link"):
        for names in (whole, [f"../{up}/{name}" for name in files]):
            with pytest.raises(UserError, match=r"outside of .*(inner|link): (.|\n)*allowed: data\.root=FOLDER"):
                read(root, names)
    assert len(read(tmp_path, whole)) == 5, "a folder above all of them"
    assert len(read(tmp_path / "link" / "..", whole)) == 5
    (inner / "images").symlink_to(tmp_path / "images")
    (inner / "labels").symlink_to(tmp_path / "labels")
    assert len(read(inner, [f"images/train/{name}" for name in files])) == 5, "links are the user's own"


@needs("detection")
def test_masks_are_those_of_polygons_and_run_lengths(drawn: Path) -> None:
    from faster_coco_eval.core import mask

    def as_run_lengths(contents: Any) -> None:
        for number, each in enumerate(contents["annotations"]):
            each["segmentation"] = mask.segmToRle(each["segmentation"], 40, 32)
            each["segmentation"]["counts"] = each["segmentation"]["counts"].decode()
            if number == 1:  # as COCO has those of crowds
                plane = mask.decode(each["segmentation"]).T.ravel()
                counts = [len([*group]) for _, group in itertools.groupby(plane)]
                each["segmentation"]["counts"] = [0, *counts] if plane[0] else counts

    polygons = [target["masks"] for _, target in read_coco(drawn, masks=True)["train"]]
    changed(drawn / "train.json", as_run_lengths)
    for expected, (_, target) in zip(polygons, read_coco(drawn, masks=True)["train"], strict=True):
        assert isinstance(target["masks"], tv_tensors.Mask)
        assert target["masks"].equal(expected)
        assert target["masks"].shape == (len(target["boxes"]), 32, 40)
        for plane, (left, top, right, bottom) in zip(target["masks"], target["boxes"].int().tolist(), strict=True):
            assert int(plane[top:bottom, left:right].sum()) == int(plane.sum()) == (right - left) * (bottom - top)
    for file in (drawn / "labels").rglob("*.txt"):
        file.write_text("1 0.1 0.25 0.5 0.25 0.5 0.75 0.1 0.75\n")
    target = yolo(str(drawn), masks=True)["train"][0][1]
    assert_close(target["boxes"], torch.tensor([[4.0, 8, 20, 24]]), check_dtype=False)
    assert int(target["masks"].sum()) == 16 * 16


MISTAKES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "image": (lambda it: it["annotations"][2].update(image_id="101"), "image_id is '101', and the ids are such as 100"),
    "category": (lambda it: it["annotations"][2].update(category_id=4), "category_id is 4, and the ids are such as 3"),
    "no box": (lambda it: it["annotations"][1].pop("bbox"), "cannot read annotations[1] of "),
    "no name": (lambda it: it["categories"][1].pop("name"), "categories[1]"),
    "text": (lambda it: it["annotations"][1].update(bbox=[1, 2, "3", 4]), "annotations[1]"),
    "outside": (lambda it: it["annotations"][0].update(bbox=[30, 2, 30, 4]), "annotations[0]"),
    "negative": (lambda it: it["annotations"][0].update(bbox=[9, 2, -3, 4]), "annotations[0]"),
    "nan": (lambda it: it["annotations"][0].update(bbox=[float("nan"), 2, 9, 4]), "annotations[0]"),
    "shares": (lambda it: [each.update(bbox=[0.5, 0.2, 0.2, 0.8]) for each in it["annotations"]], "fractions of width and"),
    "file": (lambda it: it["images"][1].update(file_name="other.png"), "other.png"),
    "long": (lambda it: it["images"][1].update(file_name="x" * 5000), "letters) does not exist"),
    "width": (lambda it: it["images"][1].pop("width"), "images[1]"),
    "names": (lambda it: it["categories"][0].update(name="small"), "other categories"),
    "crowd": (lambda it: it["annotations"][1].update(iscrowd="0"), "iscrowd is '0'"),
    "one name": (lambda it: it["categories"][0].update(name="wide"), "train.json has two classes of one name, 'wide'"),
    "section": (lambda it: it.pop("annotations"), "train.json: there is no 'annotations'"),
    "image id": (lambda it: it["images"][1].update(id=100), "id 100"),
    "category id": (lambda it: it["categories"][1].update(id=3), "categories[1]"),
    "endless": (lambda it: it["images"][1].update(width=float("inf")), "images[1]"),
    "large id": (lambda it: it["images"][1].update(id=2**63), "images[1]"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_a_coco_file_is_named_with_its_place(drawn: Path, name: str) -> None:
    change, place = MISTAKES[name]
    changed(drawn / "train.json", change)
    with pytest.raises(UserError, match=r"^data.dataset: ") as caught:
        read_coco(drawn)
    assert place in str(caught.value)
    assert name in ("file", "long", "names", "shares") or "train.json" in str(caught.value)


def test_a_file_that_is_cut_or_missing_is_named(drawn: Path) -> None:
    path = drawn / "val.json"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"val.json.*cut short"):
        read_coco(drawn)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(UserError, match=r"cannot read .*val.json: it is not a regular file"):
        read_coco(drawn)
    path.unlink()
    with pytest.raises(UserError, match=r"^data.dataset.val_annotations: .*val.json\n.*annotations=train.json .*=null"):
        read_coco(drawn)
    (drawn / "images/train").rename(drawn / "photos")
    with pytest.raises(UserError, match=r"^data.dataset.train_images: there is no folder .*images/train, .*000.png"):
        read_coco(drawn)


@needs("detection")
def test_run_lengths_of_another_size_are_refused_before_they_are_decoded(drawn: Path) -> None:
    far = {"size": [46000, 46000], "counts": [0, 46000 * 46000]}
    changed(drawn / "train.json", lambda it: it["annotations"][0].update(segmentation=far))
    train = read_coco(drawn, masks=True)["train"]
    with pytest.raises(UserError, match=r"run-length encoding has the size \[46000, 46000\], and the image \[32, 40\]"):
        list(train)


def test_a_root_that_has_no_files_of_coco_is_named_with_what_to_set(tmp_path: Path) -> None:
    for name in ("gonex/a", "only/a.json", "a.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    for root, reason in (
        ("gone", "does not exist.*gonex"),
        ("a.yaml", r"is not a folder\n.*data=yolo"),
        ("only", r"there is no file .*\n.*data\.dataset\.train_annotations=a\.json data\.dataset\.train_images=FOLDER"),
    ):
        with pytest.raises(UserError, match=reason):
            coco(str(tmp_path / root), "images", "annotations.json")


def test_relative_and_absolute_file_names_have_one_fingerprint_and_other_annotations_are_other_data(
    drawn: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = read_coco(drawn)["train"]
    changed(drawn / "train.json", lambda it: it["annotations"][-1].update(category_id=3, bbox=[0, 0, 5, 5]))
    assert (read_coco(drawn)["train"].targets != before.targets).tolist() == [False] * 4 + [True]
    monkeypatch.chdir(drawn)
    changed(drawn / "train.json", lambda it: it["images"][0].update(file_name=str(drawn / "images/train/000.png")))
    train = read_coco(Path())["train"]
    assert train.fingerprint()
    assert fingerprint_data({"train": (train, AllSamples(5))}, {"train": train}, pairs=False)["train"]["files"]


def test_images_of_another_size_and_boxes_a_little_outside_or_without_an_area(drawn: Path) -> None:
    whole = read_coco(drawn)["train"][0][1]["boxes"]
    changed(drawn / "train.json", lambda it: it["annotations"].insert(0, it["annotations"][0] | {"bbox": [3, 2, 0, 4]}))
    assert read_coco(drawn)["train"][0][1]["boxes"].equal(whole)
    changed(drawn / "train.json", lambda it: [it["annotations"].pop(0), it["images"][1].update(width=48)])
    changed(drawn / "train.json", lambda it: it["annotations"][0].update(bbox=[30, 2, 10.2, 4]))
    images = read_coco(drawn)["train"]
    assert images[0][1]["boxes"].tolist() == [[30, 2, 40, 6]]
    with pytest.raises(UserError, match=r"40x32 pixels, and its annotations say 48x32"):
        images[1]


def test_transforms_keep_what_belongs_to_an_object_together(drawn: Path) -> None:
    changed(drawn / "train.json", lambda it: [each.update(iscrowd=each["id"] % 2) for each in it["annotations"]])
    torch.manual_seed(0)
    transform = v2.Compose([v2.RandomIoUCrop(), v2.SanitizeBoundingBoxes(labels_getter=per_object)])
    removed = 0
    for sample in [*read_coco(drawn)["train"]] * 10:
        known = {tuple(row) for row in zip(sample[1]["labels"].tolist(), sample[1]["iscrowd"].tolist(), strict=True)}
        _, target = transform(sample)
        assert len(target["boxes"]) == len(target["labels"]) == len(target["iscrowd"])
        assert known >= {*zip(target["labels"].tolist(), target["iscrowd"].tolist(), strict=True)}
        removed += len(sample[1]["labels"]) - len(target["labels"])
    assert removed > 0


@needs("detection")
@pytest.mark.parametrize(
    ("outline", "reason"),
    [
        ([[0, 0, 1e9, 0, 9, 1e9]], "is more than a side outside"),
        ([[1, 1, 9, 9]], "three points"),
        ([[]], "three points"),
        ([[1, 1, 9, 1, 9, 9, 1]], "three points"),
        ([[1, 1, 9, 1, 9, 9], [1, 1, 9, 9]], "three points"),
        ([[1, 1, 3.3, 3.3, 9, 9]], "is a line"),
        ([[0.1, 0.1, 0.9, 0.1, 0.5, 1]], "has fractions of width and height"),
        ([], "not a list of polygons"),
        (None, "not a list of polygons"),
        ([1, 1, 9, 1, 9, 9], "not a list of polygons"),
    ],
)
def test_polygons_without_an_area_or_far_outside_of_the_image_are_refused(
    drawn: Path, outline: Any, reason: str
) -> None:
    changed(drawn / "train.json", lambda it: it["annotations"][0].update(segmentation=outline))
    assert len(read_coco(drawn)["train"]) == 5
    with pytest.raises(UserError, match=rf"polygon of annotations\[0\].* {reason}"):
        read_coco(drawn, masks=True)


NESTED = "names: " + "[" * 2000 + "]" * 2000
ALIASES = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}' if n else 'x'] * 9)}]\n" for n in range(20)) + "names: *a19"


def test_yolo_has_the_same_objects(drawn: Path) -> None:
    (drawn / "data.yaml").write_text("names: {0: tall, 1: wide}\ntrain: ../images/train\nval: images/val\n")
    for made in (yolo(str(drawn)), yolo(str(drawn), "other.yaml"), yolo(str(drawn / "data.yaml"))):
        assert made["val"].classes == ("tall", "wide")
        for (image, target), (other, expected) in zip(made["train"], read_coco(drawn)["train"], strict=True):
            assert image.equal(other)
            assert_close(target["boxes"], expected["boxes"], rtol=0, atol=1e-4)
            assert target["labels"].equal(expected["labels"])


@pytest.mark.parametrize(
    ("file", "content", "classes"),
    [
        ("data.yaml", "names: {1: tall, 3: no}\n", ("0", "tall", "2", "no")),
        ("classes.txt", "tall\n\nwide\n\n", ("tall", "1", "wide")),
    ],
)
def test_names_of_yolo_may_skip_numbers(drawn: Path, file: str, content: str, classes: tuple[str, ...]) -> None:
    (drawn / file).write_text(content)
    for path in (drawn / "labels").rglob("*.txt"):
        path.write_text(f"{len(classes) - 1} 0.5 0.5 0.5 0.5\n")
    train = yolo(str(drawn))["train"]
    assert train.classes == classes
    assert train[0][1]["labels"].tolist() == [len(classes)]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("data.yaml", NESTED, "levels of nesting"),
        ("data.yaml", ALIASES, "values with those that aliases stand for"),
        ("data.yaml", "names: {0: r, 20000000: far}", "20,000,001 numbers of classes"),
        ("data.yaml", "names: [" + "x, " * 200_000 + "]", "values with"),
        ("data.yaml", None, "not a regular file"),
        ("classes.txt", None, "not a regular file"),
    ],
    ids=["nested", "aliases", "far", "many", "pipe", "names"],
)
def test_a_description_costs_no_more_than_it_can_hold(drawn: Path, name: str, content: str | None, reason: str) -> None:
    if content is None:
        (drawn / name).unlink(missing_ok=True)
        os.mkfifo(drawn / name)
    else:
        (drawn / name).write_text(content)
    with pytest.raises(UserError, match=reason):
        yolo(str(drawn))


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("2 0.5 0.5 0.2 0.2", "class 2"),
        ("0 0.5 0.5 0.2", "pairs"),
        ("0 0.5 0.5 1.2 0.2", "outside"),
        ("0 20 16 8 10", "these look like pixels: divide x and width"),
        ("0", "box"),
        ("0_1 0.5 0.5 0.2 0.2", "not a number"),
        ("0 0.5 0.5 -0.2 0.2", "is empty"),
        ("0 0.5 0.5 -0.2 -0.2", "is empty"),
    ],
)
def test_a_wrong_line_of_yolo_is_named_or_its_image_replaced(drawn: Path, line: str, reason: str) -> None:
    file = drawn / "labels" / "train" / "001.txt"
    file.write_text(f"1 0.5 0.5 0.5 0.5\n{line}\n")
    with pytest.raises(UserError, match=r"line 2 of .*001.txt") as caught:
        yolo(str(drawn))
    assert reason in str(caught.value)
    images = yolo(str(drawn), on_error="skip")["train"]
    assert len(images[0][1]["labels"]) == 1
    with pytest.raises(UserError, match=r"line 2 of .*001.txt"):
        images[1]


def test_a_description_outside_of_its_images_is_told_the_words_that_read_them(drawn: Path, tmp_path: Path) -> None:
    description = tmp_path / "elsewhere" / "own.yaml"
    description.parent.mkdir()
    description.write_text(f"path: {drawn}\ntrain: images/train\nval: images/val\nnames: [tall, wide]\n")
    words = f"data.root={drawn} data.dataset.description={description}"
    with pytest.raises(UserError, match=re.escape(words)):
        yolo(str(description))
    assert len(yolo(str(drawn), str(description))["train"]) == len(yolo(str(drawn))["train"])
    description.write_text("train: [images/train, images/val]\nnames: [tall, wide]\n")
    with pytest.raises(UserError, match="lists of folders"):
        yolo(str(description))


def test_key_points_of_yolo_follow_the_box(drawn: Path) -> None:
    (drawn / "data.yaml").write_text("names: [tall, wide]\n")
    expected = boxes_of(drawn)
    for file in (drawn / "labels").rglob("*.txt"):
        file.write_text("".join(f"{line} 0.9 0.1 1 0.2 0.8 1\n" for line in file.read_text().splitlines()))
    for shape in ("[2, 3]", "[3, 2]"):
        (drawn / "data.yaml").write_text(f"names: [tall, wide]\nkpt_shape: {shape}\n")
        assert_close(boxes_of(drawn), expected, rtol=0, atol=0)
    (drawn / "labels/train/000.txt").write_text("0 0.5 0.5 0.2 0.2 0.4 0.4\n")
    with pytest.raises(UserError, match=r"line 1 of .*000.txt.* the 6 numbers of kpt_shape"):
        yolo(str(drawn))


def test_yolo_finds_labels_of_another_unicode_form_and_counts_doubled_lines(drawn: Path) -> None:
    expected = boxes_of(drawn)
    assert not yolo(str(drawn))["train"].warnings
    (drawn / "images/train/000.png").rename(drawn / "images/train/000\u00e9.png")
    text = (drawn / "labels/train/000.txt").rename(drawn / "labels/train/000e\u0301.txt")
    assert_close(boxes_of(drawn), expected, rtol=0, atol=0)
    text.write_text(2 * text.read_text())
    (warning,) = yolo(str(drawn))["train"].warnings
    assert warning.startswith("images with two objects of one box and class: 1, such as")
    (drawn / "classes.txt").write_text("\u00e9\ne\u0301\n")
    with pytest.raises(UserError, match=r"classes.txt has two classes of one name"):
        yolo(str(drawn))


@pytest.mark.parametrize("kind", ["link", "folder", "pipe", "upper case"])
def test_a_text_file_of_yolo_that_cannot_be_read_is_not_an_image_without_objects(drawn: Path, kind: str) -> None:
    path = drawn / "labels/train/001.txt"
    path.rename(other := path.with_name("001.TXT"))
    make: Any = {"link": lambda: path.symlink_to("gone.txt"), "folder": path.mkdir, "pipe": lambda: os.mkfifo(path)}
    if kind in make:
        other.unlink()
        make[kind]()
    reason = r"cannot read .*001.txt: (no such file|it is not a regular file)"
    with pytest.raises(UserError, match=reason if kind in make else r"train/001.TXT must be named 001.txt, as its im"):
        yolo(str(drawn))


def test_text_files_of_yolo_may_be_beside_the_images_and_must_be_somewhere(drawn: Path) -> None:
    expected = boxes_of(drawn)
    (drawn / "data.yaml").write_text("names: [tall, wide]\ntrain: images/val\n")
    (drawn / "labels" / "val").rename(drawn / "labels" / "valid")
    with pytest.raises(UserError, match=r"no image of 'train' has an object: there is no folder .*labels/val"):
        yolo(str(drawn))
    (drawn / "data.yaml").write_text("names: [tall, wide]\ntrain: pictures\nval: pictures\n")
    (drawn / "images" / "train").rename(drawn / "pictures")
    with pytest.raises(UserError, match=r"no image of 'train' has an object.*pictures/004.txt"):
        yolo(str(drawn))
    for file in (drawn / "labels" / "train").iterdir():
        file.rename(drawn / "pictures" / file.name)
    assert_close(boxes_of(drawn), expected, rtol=0, atol=0)


def test_yolo_below_the_current_folder_and_text_files_of_other_editors(
    drawn: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (drawn / "classes.txt").write_text("tall\nwide\n", encoding="utf-8-sig")
    expected = boxes_of(drawn)
    monkeypatch.chdir(drawn)
    file = drawn / "labels" / "train" / "000.txt"
    file.write_text("\n" + file.read_text() + "\n \n", encoding="utf-8-sig")
    assert yolo(".")["train"].classes == ("tall", "wide")
    assert_close(boxes_of("."), expected, rtol=0, atol=0)
    file.write_bytes(b"0 \xff")
    for reading in (lambda: yolo("."), lambda: yolo(".", on_error="skip")["train"][0]):
        with pytest.raises(UserError, match=r"line 1 of .*000.txt"):
            reading()
