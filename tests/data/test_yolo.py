"""YOLO's text files: what is read of them, and what is said about mistakes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn_objects import read_coco

from runner.base.errors import UserError
from runner.data.sources.detection import yolo

NESTED = "names: " + "[" * 2000 + "]" * 2000
ALIASES = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}' if n else 'x'] * 9)}]\n" for n in range(20)) + "names: *a19"


def test_yolo_has_the_same_objects(drawn: Path) -> None:
    (drawn / "data.yaml").write_text("names: {0: tall, 1: wide}\ntrain: ../images/train\nval: images/val\n")
    for made in (yolo(str(drawn)), yolo(str(drawn), "other.yaml"), yolo(str(drawn / "data.yaml"))):
        assert made["val"].classes == ("tall", "wide")
        for (image, target), (other, expected) in zip(made["train"], read_coco(drawn)["train"], strict=True):
            assert image.equal(other)
            torch.testing.assert_close(target["boxes"], expected["boxes"], rtol=0, atol=1e-4)
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


@pytest.mark.parametrize("shape", ["[2, 3]", "[3, 2]"])
def test_key_points_of_yolo_follow_the_box(drawn: Path, shape: str) -> None:
    (drawn / "data.yaml").write_text("names: [tall, wide]\n")
    expected = [target["boxes"] for _, target in yolo(str(drawn))["train"]]
    for file in (drawn / "labels").rglob("*.txt"):
        file.write_text("".join(f"{line} 0.9 0.1 1 0.2 0.8 1\n" for line in file.read_text().splitlines()))
    (drawn / "data.yaml").write_text(f"names: [tall, wide]\nkpt_shape: {shape}\n")
    assert all(box.equal(each[1]["boxes"]) for box, each in zip(expected, yolo(str(drawn))["train"], strict=True))
    (drawn / "labels/train/000.txt").write_text("0 0.5 0.5 0.2 0.2 0.4 0.4\n")
    with pytest.raises(UserError, match=r"line 1 of .*000.txt.* the 6 numbers of kpt_shape"):
        yolo(str(drawn))


def test_yolo_finds_labels_of_another_unicode_form_and_counts_doubled_lines(drawn: Path) -> None:
    train = yolo(str(drawn))["train"]
    expected = train[0][1]["boxes"]
    assert not train.warnings
    (drawn / "images/train/000.png").rename(drawn / "images/train/000\u00e9.png")
    text = (drawn / "labels/train/000.txt").rename(drawn / "labels/train/000e\u0301.txt")
    assert yolo(str(drawn))["train"][0][1]["boxes"].equal(expected)
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
    expected = [*yolo(str(drawn))["train"]]
    (drawn / "data.yaml").write_text("names: [tall, wide]\ntrain: pictures\nval: pictures\n")
    (drawn / "images" / "train").rename(drawn / "pictures")
    with pytest.raises(UserError, match=r"no image of 'train' has an object.*pictures/004.txt"):
        yolo(str(drawn))
    (drawn / "data.yaml").write_text("names: [tall, wide]\ntrain: images/val\n")
    (drawn / "labels" / "val").rename(drawn / "labels" / "valid")
    with pytest.raises(UserError, match=r"no image of 'train' has an object: there is no folder .*labels/val"):
        yolo(str(drawn))
    (drawn / "data.yaml").write_text("names: [tall, wide]\ntrain: pictures\nval: pictures\n")
    for file in (drawn / "labels" / "train").iterdir():
        file.rename(drawn / "pictures" / file.name)
    for (_, target), (_, other) in zip(yolo(str(drawn))["train"], expected, strict=True):
        assert target["boxes"].equal(other["boxes"])


def test_yolo_below_the_current_folder_and_text_files_of_other_editors(
    drawn: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (drawn / "classes.txt").write_text("tall\nwide\n", encoding="utf-8-sig")
    expected = [target["boxes"] for _, target in yolo(str(drawn))["train"]]
    monkeypatch.chdir(drawn)
    file = drawn / "labels" / "train" / "000.txt"
    file.write_text("\n" + file.read_text() + "\n \n", encoding="utf-8-sig")
    made = yolo(".")
    assert made["train"].classes == ("tall", "wide")
    for box, (_, target) in zip(expected, made["train"], strict=True):
        assert box.equal(target["boxes"])
    file.write_bytes(b"0 \xff")
    with pytest.raises(UserError, match=r"line 1 of .*000.txt"):
        yolo(".")
    with pytest.raises(UserError, match=r"line 1 of .*000.txt"):
        yolo(".", on_error="skip")["train"][0]
