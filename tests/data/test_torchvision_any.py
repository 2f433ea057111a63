"""Data sets of torchvision by name: pairs, and whole samples with tv_tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawn_masks import MODEL
from PIL import Image
from torchvision.tv_tensors import BoundingBoxes, Mask
from torchvision.tv_tensors import Image as Picture

from runner.base.errors import UserError
from runner.data.sources.torchvision_any import torchvision_set

WHOLE = ["0"]


def rectangles(path: Path, value: int) -> None:
    """An image, or a mask with a palette, whose left half has another value than the rest."""
    path.parent.mkdir(parents=True, exist_ok=True)
    values = np.full((20, 24), value, np.uint8)
    values[:, :12] = 1
    image = Image.fromarray(values)
    if "Segm" in path.parent.name or "trimaps" in path.parent.name:
        image.putpalette([7, 7, 7] * 256)
    image.convert(image.mode if path.suffix == ".png" else "RGB").save(path)


def pets(root: Path) -> None:
    for name in ("trainval", "test"):
        names = [f"{name}_cat_{number}" for number in range(8)]
        listed = root / "oxford-iiit-pet" / "annotations" / f"{name}.txt"
        listed.parent.mkdir(parents=True, exist_ok=True)
        listed.write_text("".join(f"{each} 1 1 1\n" for each in names))
        for each in names:
            rectangles(root / "oxford-iiit-pet" / "images" / f"{each}.jpg", 200)
            rectangles(listed.parent / "trimaps" / f"{each}.png", 2)


def voc(root: Path) -> None:
    base = root / "VOCdevkit" / "VOC2012"
    for name in ("train", "val"):
        for kind in ("Segmentation", "Main"):
            (base / "ImageSets" / kind).mkdir(parents=True, exist_ok=True)
            (base / "ImageSets" / kind / f"{name}.txt").write_text(f"{name}_0\n{name}_1\n")
        for number in range(2):
            rectangles(base / "JPEGImages" / f"{name}_{number}.jpg", 200)
            rectangles(base / "SegmentationClass" / f"{name}_{number}.png", 255)
            (base / "Annotations").mkdir(exist_ok=True)
            box = "<bndbox><xmin>3</xmin><ymin>4</ymin><xmax>12</xmax><ymax>16</ymax></bndbox>"
            text = f"<size><width>24</width><height>20</height></size><object><name>cat</name>{box}</object>"
            (base / "Annotations" / f"{name}_{number}.xml").write_text(f"<annotation>{text}</annotation>")


def test_splits_and_masks_are_found_and_values_become_class_numbers(tmp_path: Path) -> None:
    pets(tmp_path)
    how: Any = {"classes": ["pet", "ground"], "images": WHOLE, "values": [1, 2], "target_types": "segmentation"}
    made = torchvision_set("OxfordIIITPet", str(tmp_path), **how)
    assert {name: len(each) for name, each in made.items()} == {"train": 8, "test": 8}
    image, mask = made["train"][0]
    assert isinstance(image, Picture)
    assert isinstance(mask, Mask)
    assert mask.shape[-2:] == image.shape[-2:] == (20, 24)
    assert mask.flatten()[:2].tolist() == [0, 0]
    assert mask.unique().tolist() == [0, 1]
    assert made["train"].classes == ["pet", "ground"]


def test_masks_and_boxes_of_pascal_voc(tmp_path: Path) -> None:
    voc(tmp_path)
    masks = torchvision_set("VOCSegmentation", str(tmp_path), images=WHOLE)
    assert list(masks) == ["train", "val"]
    assert masks["val"][1][1].unique().tolist() == [1, 255]
    image, target = torchvision_set("VOCDetection", str(tmp_path), images=WHOLE)["train"][0]
    assert image.shape == (3, 20, 24)
    assert isinstance(target["boxes"], BoundingBoxes)
    assert target["boxes"].tolist() == [[3, 4, 12, 16]]


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("<xmin>3</xmin>", "<xmin>13</xmin>", r"the box in object 0 of .*train_1.xml is empty, or outside"),
        ("<ymax>16</ymax>", "<ymax>26</ymax>", r"the box in object 0 of .*train_1.xml is empty, or outside"),
        ("bndbox>", "box>", r"cannot read .*train_1.xml: there is no 'bndbox'"),
        ("<name>cat</name>", "<name>helmet</name>", r"cannot read .*train_1.xml: there is no 'helmet'"),
        ("<xmin>3</xmin>", "<xmin>0.5</xmin>", r"cannot read .*train_1.xml: invalid literal"),
    ],
)
def test_annotations_of_pascal_voc_that_cannot_be_used_are_named(
    tmp_path: Path, old: str, new: str, reason: str
) -> None:
    voc(tmp_path)
    path = tmp_path / "VOCdevkit/VOC2012/Annotations/train_1.xml"
    path.write_text(path.read_text().replace(old, new))
    train = torchvision_set("VOCDetection", str(tmp_path), images=WHOLE)["train"]
    assert len(train[0][1]["boxes"]) == 1
    with pytest.raises(UserError, match=reason):
        train[1]


def test_boxes_of_coco_and_data_without_splits(tmp_path: Path) -> None:
    Image.new("RGB", (24, 20)).save(tmp_path / "a.jpg")
    box = {"id": 1, "image_id": 3, "category_id": 1, "bbox": [1, 2, 3, 4], "area": 12, "iscrowd": 0, "segmentation": []}
    picture = {"id": 3, "file_name": "a.jpg", "width": 24, "height": 20}
    said = {"images": [picture], "annotations": [box], "categories": [{"id": 1, "name": "cat"}]}
    (tmp_path / "a.json").write_text(json.dumps(said))
    pytest.importorskip("pycocotools")
    made = torchvision_set("CocoDetection", str(tmp_path), images=WHOLE, annFile=str(tmp_path / "a.json"))
    assert list(made) == ["train"]
    assert made["train"][0][1]["boxes"].tolist() == [[1, 2, 4, 6]]


def test_pairs_of_a_set_without_files_train(train: Callable[..., Any]) -> None:
    words = ("data=torchvision", "data.dataset.name=FakeData", "+data.dataset.size=40", "+data.dataset.image_size=[3,8,8]",
             "+data.dataset.num_classes=4", "data.dataset.classes=[a,b,c,d]", "epochs=1", "data.num_workers=0")  # fmt: skip
    result = train(*words)
    assert "FakeData" in str(result.directory)
    assert "accuracy" in result.summary["test"]


def test_masks_train_through_the_program(train: Callable[..., Any], workdir: Path, own_module: Any) -> None:
    pets(workdir)
    own_module("drawn_nets", MODEL)
    words = ("data=torchvision", "data.root=.", "data.dataset.name=OxfordIIITPet", "+data.dataset.target_types=segmentation",
             "data.dataset.classes=[pet,ground]", "data.dataset.values=[1,2]", "data.images=['0']", "task=segmentation",
             "transform=segmentation", "data.image_size=24", "model=small_cnn", "~model.width", "~model.dropout",
             "model._target_=drawn_nets.Tiny", "data.batch_size=4", "epochs=1")  # fmt: skip
    one, two = train(*words, "data.num_workers=0"), train(*words, "data.num_workers=2")
    assert one.summary["weights_sha256"] == two.summary["weights_sha256"]
    assert set(one.summary["test"]) == {"loss", "miou", "pixel_accuracy"}


@pytest.mark.parametrize(
    ("words", "key", "reason"),
    [
        (("data.dataset.name=FashionMNISTT",), "data.dataset.name", "FashionMNIST'"),
        (("data.dataset.name=LSUN",), "data.dataset.name", "LSUN"),
        (("data.dataset.name=VOCSegmentation",), "data.dataset", "Dataset not found"),
        (("data.dataset.name=FakeData", "+data.dataset.colour=1"), "data.dataset.colour", "unexpected"),
        (("data.dataset.name=FakeData", "data.images=['0']"), "data.dataset", "No wrapper exists"),
        (("data.dataset.name=OxfordIIITPet", "+data.dataset.target_types=masks"), "data.dataset.target_types", "segmentation"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_a_sentence(
    rejected: Callable[..., Any], words: tuple[str, ...], key: str, reason: str
) -> None:
    err = rejected("train", "data=torchvision", "transform=none", *words).err
    assert f"{key}:" in err
    assert reason in err


def test_names_are_those_of_data_sets_and_a_root_reaches_classes_that_hand_it_on(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="wrap_dataset_for_transforms_v2"):
        torchvision_set("wrap_dataset_for_transforms_v2")
    with pytest.raises(RuntimeError, match="Dataset not found"):
        torchvision_set("QMNIST", str(tmp_path / "empty"))
    assert type(torchvision_set("FakeData", images=None, size=2)["train"][0][1]) is int
