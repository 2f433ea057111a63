"""`predict format=coco`, `yolo` and `masks`: what it writes is read as training data, in the pixels of the given images."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import drawn_masks
import drawn_objects
import numpy as np
import pytest
import torch
from extras import needs
from PIL import Image

from runner.base.errors import UserError
from runner.data.sources.detection import coco, yolo
from runner.data.sources.masks import segmentation_folder
from runner.tasks.task import colour
from runner.verbs.predict.labels import Labels

COLOURS = '''
import torch
from torch import nn


class Colours(nn.Module):
    """The class of each pixel by its colour: blue, red, green."""

    def __init__(self, num_classes):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, images):
        colours = torch.tensor([[0.2, 0.2, 1 / 3], [0.87, 0.27, 0.13], [0.13, 0.8, 0.4]]).view(1, 3, 3, 1, 1)
        return self.weight - 20 * (images[:, None] - colours).square().sum(2)
'''
OWN = '''
import os
from runner.tasks.segmentation import Segmentation


class Both(Segmentation):
    """Gives the columns that the variable GIVES names."""

    formats = ("coco", "masks")

    def predict_step(self, modules, batch):
        mask = super().predict_step(modules, batch)["mask"]
        columns = {"mask": mask, "labels": torch.ones(len(mask), 1).long(), "scores": torch.ones(len(mask), 1)}
        columns["boxes"] = torch.tensor([[[9.0, 9, 45, 54]]] * len(mask))
        given = {name: columns[name] for name in os.environ["GIVES"].split() if name in columns}
        if "long" in os.environ["GIVES"]:
            given["mask"] = mask.long()
        return given | {"more": mask[:, 0, 0]}
'''
SMALL = ("model=small_cnn", "~model.width", "~model.dropout", "epochs=1", "data.num_workers=0", "scheduler=constant")
SEGMENTATION = (
    "experiment=segmentation", "data.root=shapes", "data.image_size=108", *SMALL, "model._target_=seen.Colours",
    "data.batch_size=8", "data.normalize.mean=[0,0,0]", "data.normalize.std=[1,1,1]",
)  # fmt: skip
MODEL = "model._target_=seen.Scripted"
DETECTION = (
    "experiment=detection_torchvision", "data.root=drawn", *drawn_objects.COCO, *SMALL, MODEL, "data.batch_size=2",
)  # fmt: skip
COCO_MADE = (
    "data.dataset.train_images=images", "data.dataset.train_annotations=annotations.json",
    "data.dataset.val_annotations=null",
)  # fmt: skip
# Twice the height, three times the width, then shifted to (5, 3) and cropped at random, not into objects
MOVED = (
    "transform.sample_eval=[{_target_: torchvision.transforms.v2.ToImage},"
    "{_target_: torchvision.transforms.v2.Resize, size: [64, 120], interpolation: 0},"
    "{_target_: torchvision.transforms.v2.Pad, padding: [5, 3]},{_target_: torchvision.transforms.v2.RandomCrop, size: [66, 124]}]"
)
FLIPPED = "transform.sample_eval=[{_target_: torchvision.transforms.v2.RandomHorizontalFlip, p: 1.0}]"
# Edges of an object in each image: left, top, right, bottom
OBJECTS = {"one.png": [4, 8, 20, 16], "more/two.png": [30, 3, 38, 27], "more/three.jpg": [8, 8, 24, 24]}


@pytest.fixture
def photos(workdir: Path) -> Path:
    """Images of 40 x 32 pixels with a bright object each, the last one on its side in its file."""
    (workdir / "photos" / "more").mkdir(parents=True)
    for name, (left, top, right, bottom) in OBJECTS.items():
        pixels = np.full((32, 40, 3), 20, dtype=np.uint8)
        pixels[top:bottom, left:right] = 220
        image, exif = Image.fromarray(pixels), Image.Exif()
        if name.endswith("jpg"):
            image, exif[0x0112] = image.transpose(Image.Transpose.ROTATE_90), 6
        image.save(workdir / "photos" / name, exif=exif, quality=100)
    return workdir / "photos"


@pytest.fixture
def detector(workdir: Path, own_module: Any, train: Callable[..., Any]) -> str:
    for split in ("train", "val"):
        drawn_objects.draw(workdir / "drawn", split, 4, 0)
    own_module("seen", "import torch\n" + drawn_objects.DETECTOR)
    return f"ckpt_path={train(*DETECTION).directory}"


@pytest.fixture
def segmenter(workdir: Path, own_module: Any, train: Callable[..., Any]) -> str:
    drawn_masks.draw(workdir / "shapes")
    own_module("seen", COLOURS)
    return f"ckpt_path={train(*SEGMENTATION).directory}"


def found_in(data: Any) -> dict[str, list[list[float]]]:
    """The boxes of each image by its path; labels say that tall ones are of class 1."""
    found = {}
    for index in range(len(data)):
        image, target = data[index]
        assert image.shape == (3, 32, 40)
        for (left, top, right, bottom), label in zip(target["boxes"], target["labels"], strict=True):
            assert int(label) == (1 if bottom - top > right - left else 2)
        path = data.path(index)
        found[str(path.relative_to(path.parents[[*path.parents].index(Path("made/images"))]))] = target[
            "boxes"
        ].tolist()
    return found


@needs("detection")
@pytest.mark.parametrize("moved", [(), (MOVED,)], ids=["as they are", "resized, padded and cropped"])
@pytest.mark.parametrize("kind", ["coco", "yolo"])
def test_boxes_are_read_as_training_data_in_the_pixels_of_the_images(
    detector: str, photos: Path, kind: str, moved: tuple[str, ...], json_of: Any, train: Any
) -> None:
    words = (detector, "input=photos", "output=made", f"format={kind}", *moved)
    record = json_of("predict", *words, "threshold=0.12")
    assert (record["predicted"], record["output"]) == (3, "made")
    arguments = ("images", "annotations.json") if kind == "coco" else ()
    data = (coco if kind == "coco" else yolo)("made", *arguments)["train"]
    assert data.classes == tuple(drawn_objects.NAMES)
    for name, boxes in found_in(data).items():
        # JPEG blurs the edges of the last one
        assert boxes == [pytest.approx(OBJECTS[name], abs=1.01 if name.endswith("jpg") else 1e-4)]
    read = ("data=yolo",) if kind == "yolo" else COCO_MADE
    assert train(
        *SMALL,
        "experiment=detection_torchvision",
        *read,
        "data.root=made",
        "data.split.val=0.4",
        "data.batch_size=1",
        MODEL,
    ).summary["global_step"]


@needs("detection")
def test_the_threshold_is_the_least_score_and_boxes_end_at_the_edge(
    detector: str, photos: Path, accepted: Any, workdir: Path
) -> None:
    shown = accepted("predict", detector, "input=photos/more/two.png", "output=made", "format=coco", "threshold=0").out
    assert re.search(r"path +boxes\n.*\nphotos/more/two.png +2\n", shown)
    made = json.loads((workdir / "made" / "annotations.json").read_text())
    assert made["images"] == [{"id": 1, "file_name": "two.png", "width": 40, "height": 32}]
    assert made["categories"] == [{"id": 1, "name": "tall"}, {"id": 2, "name": "wide"}]
    first, second = made["annotations"]
    # The second one is 3 pixels to the right and further down, where the image ends
    assert (first["bbox"], second["bbox"]) == ([30, 3, 8, 24], [33, 6, 7, 24])
    assert (second["category_id"], second["image_id"], second["area"], second["iscrowd"]) == (2, 1, 168, 0)
    assert first["score"] == pytest.approx(2 * second["score"])
    words = ("input=photos/more/two.png", "format=coco", f"threshold={first['score'] - 0.01}")
    accepted("predict", detector, "output=fewer", *words)
    assert len(json.loads((workdir / "fewer" / "annotations.json").read_text())["annotations"]) == 1
    # Half by default
    assert first["score"] < 0.5
    accepted("predict", detector, "output=none", *words[:2])
    assert json.loads((workdir / "none" / "annotations.json").read_text())["annotations"] == []


@needs("detection")
def test_instance_masks_are_read_as_training_data_and_drawn(
    detector: str, photos: Path, accepted: Any, workdir: Path, train: Any
) -> None:
    words = (detector, "input=photos", MOVED)
    accepted("predict", *words, "format=coco", "threshold=0.12", "output=made")
    data = coco("made", "images", "annotations.json", masks=True)["train"]
    entries = json.loads((workdir / "made/annotations.json").read_text())["annotations"]
    assert {data.path(index).name for index in range(3)} == {Path(name).name for name in OBJECTS}
    for index in range(3):
        ((left, top, right, bottom),) = data[index][1]["boxes"].round().int().tolist()
        expected = torch.zeros(1, 32, 40, dtype=torch.uint8)
        expected[0, top:bottom, left:right] = 1
        assert torch.equal(torch.as_tensor(data[index][1]["masks"]), expected)
        assert entries[index]["area"] == int(expected.sum())
    masked = ("data.dataset.masks=true", "task.masks=true", "data.split.val=0.4", "data.batch_size=1", MODEL)
    last = train(*SMALL, "experiment=detection_torchvision", *COCO_MADE, "data.root=made", *masked).summary["last"]
    assert last["segm_map"] > 0
    # In a table, run lengths; and in pictures, colours of those above 0.5
    Image.new("RGB", (40, 32), (220, 220, 220)).save("bright.png")
    accepted("predict", detector, "input=bright.png", "output=rows.jsonl", "pictures=true")
    row = json.loads((workdir / "rows.jsonl").read_text())
    assert [each["size"] for each in row["masks"]] == [[32, 40]] * 2
    middle = np.asarray(Image.open(row["picture"]))[16, 20]
    assert middle.tolist() != [220, 220, 220]


@needs("detection")
def test_a_name_that_is_not_utf_8_and_the_folder_of_the_command(
    detector: str, photos: Path, accepted: Any, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, run = os.fsdecode(b"\xff.png"), workdir / detector.removeprefix("ckpt_path=")
    (photos / "one.png").rename(photos / name)
    (photos / "broken.png").write_bytes(b"none")
    (workdir / "here").mkdir()
    monkeypatch.chdir(workdir / "here")
    assert "udcff.png" in accepted("predict", f"ckpt_path={run}", f"input={photos}", "output=.", "format=coco").out
    assert {data.name for data in map(coco(".", "images", "annotations.json")["train"].path, range(3))} >= {name}


@needs("detection")
def test_what_cannot_be_written_is_refused(detector: str, photos: Path, refused: Any, workdir: Path) -> None:
    words = (detector, "input=photos", "format=yolo")
    refused((*words[:2], "format=masks"), "format", "table, coco, yolo", verb="predict")
    refused((*words, "output=a", FLIPPED), "transform.sample_eval", "cannot be undone", verb="predict")
    refused((*words, "pictures=true"), "pictures", "format=yolo", verb="predict")
    refused((*words[:2], "threshold=0.3"), "threshold", "format=table", verb="predict")
    refused((*words, "output=photos"), "output", "not empty", verb="predict")
    Image.new("RGB", (40, 32)).save(photos / "one.jpg")
    refused((*words, "output=b"), "input", "one.txt", verb="predict")
    assert not (workdir / "b").exists()
    refused((detector, f"input=[photos/one.png,{photos}/one.png]", "format=coco"), "input", "one.png", verb="predict")
    config: Any = None
    with pytest.raises(UserError, match="path"):
        Labels(config, [None], (), config)


def test_masks_are_read_as_training_data_in_the_pixels_of_the_images(
    segmenter: str, workdir: Path, accepted: Any, refused: Any, train: Any
) -> None:
    source, masks = workdir / "photos", dict[str, Any]()
    source.mkdir()
    for name, size in (("wide.png", (36, 20)), ("tall.png", (18, 36)), ("small.png", (9, 12))):
        mask = np.zeros(size[::-1], dtype=np.uint8)
        mask[3:11, 2:8], mask[size[1] // 2 :, size[0] // 2 :] = 1, 2
        colours = np.array([(51, 51, 85), (221, 68, 34), (34, 204, 102)], dtype=np.uint8)
        Image.fromarray(colours[mask]).save(source / name)
        masks[name] = torch.from_numpy(mask)
    (source / "broken.png").write_bytes(b"none")
    # Resized to three and nine times the size, so that the middle of each pixel has its colour
    words = (segmenter, "input=photos", "format=masks")
    accepted("predict", *words, "output=made", "pictures=true")
    for name, mask in masks.items():
        given, drawn = (np.asarray(Image.open(workdir / folder / name)) for folder in ("photos", "made/pictures"))
        assert drawn.shape == given.shape
        assert np.array_equal((given != drawn).any(2), mask.numpy() > 0)  # the background has no colour
    data = segmentation_folder("made")["train"]
    assert data.classes == drawn_masks.CLASSES
    assert len(data) == 3
    for index in range(3):
        assert torch.equal(data[index][1], masks[data.path(index).name])
    assert train(*SEGMENTATION, "data.root=made", "data.split.val=0.4", "data.batch_size=1").summary["global_step"]
    # The left half is between red and green
    doubtful = Image.new("RGB", (36, 12), (127, 136, 68))
    doubtful.paste((34, 204, 102), (18, 0, 36, 12))
    doubtful.save(workdir / "doubtful.png")
    accepted("predict", segmenter, "input=doubtful.png", "output=sure", "format=masks", "threshold=0.9")
    with Image.open(workdir / "sure" / "masks" / "doubtful.png") as sure:
        assert np.asarray(sure).tolist() == [[255] * 18 + [2] * 18] * 12
    # Cut off by a crop, and so not known
    crop = "transform.sample_eval=[{_target_: torchvision.transforms.v2.CenterCrop, size: 12}]"
    accepted("predict", *words, "output=part", "threshold=0", crop)
    part = segmentation_folder("part")["train"][2][1]
    assert torch.equal(part[4:16, 12:24], masks["wide.png"][4:16, 12:24])
    assert int((part != 255).sum()) == 12 * 12
    refused((segmenter, "input=photos", "format=coco"), "format", "table, masks", verb="predict")


def test_a_task_gives_what_its_formats_are_made_of_and_no_image_is_changed(
    workdir: Path, own_module: Any, train: Any, accepted: Any, refused: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn_masks.draw(workdir / "shapes", 2, 2)
    own_module("seen", COLOURS + OWN)
    run = f"ckpt_path={train(*SEGMENTATION, 'task._target_=seen.Both').directory}"
    for kind, gives, needed in (
        ("coco", "mask", "boxes, labels and scores"),
        ("coco", "boxes labels", "boxes, labels and scores"),
        ("coco", "boxes labels", "gives boxes, labels, more"),
        ("masks", "boxes labels scores", "mask, uint8"),
        ("masks", "long", "mask, uint8"),
    ):
        monkeypatch.setenv("GIVES", gives)
        refused((run, "input=val", f"output={kind}", f"format={kind}"), "task", needed, verb="predict")
    images = [workdir / f"shapes/val/images/{number:03}.png" for number in range(2)]
    before = [path.read_bytes() for path in images]
    monkeypatch.setenv("GIVES", "mask boxes labels scores")
    resize = "transform.sample_eval=[{_target_: torchvision.transforms.v2.Resize, size: [108, 108]}]"
    accepted("predict", run, "input=val", "output=made", "format=coco", resize)
    assert [path.read_bytes() for path in images] == before
    for index in range(2):
        boxes = coco("made", "images", "annotations.json")["train"][index][1]["boxes"]
        assert boxes.tolist() == [pytest.approx([2, 2, 10, 12], abs=1e-4)]


def test_masks_and_pictures_of_a_table_have_the_size_of_the_image(segmenter: str, workdir: Path, accepted: Any) -> None:
    mask = np.zeros((20, 36), dtype=np.uint8)
    mask[3:11, 2:8], mask[10:, 18:] = 1, 2
    colours = np.array([(51, 51, 85), (221, 68, 34), (34, 204, 102)], dtype=np.uint8)
    Image.fromarray(colours[mask]).save("wide.png")
    # Seen in three times the size, and padded to a square
    accepted("predict", segmenter, "input=wide.png", "output=made.jsonl", "pictures=true")
    row = json.loads((workdir / "made.jsonl").read_text())
    found, picture, page = (np.asarray(Image.open(row[name])) for name in ("mask", "picture", "page"))
    assert np.array_equal(found, mask)
    assert np.array_equal((picture != colours[mask]).any(2), mask > 0)
    assert {colour(1), colour(2)} <= {*map(tuple, page.reshape(-1, 3).tolist())}  # of the legend
    # What cannot be undone stays as it was seen
    assert (
        "transform.sample_eval" in accepted("predict", segmenter, "input=wide.png", "output=flipped.jsonl", FLIPPED).out
    )
    flipped = json.loads((workdir / "flipped.jsonl").read_text())["mask"]
    assert np.array_equal(np.asarray(Image.open(flipped)), mask[:, ::-1])


def test_pictures_of_a_split_have_the_truth_beside_the_prediction(segmenter: str, workdir: Path, accepted: Any) -> None:
    accepted("predict", segmenter, "input=val", "output=made.jsonl", "pictures=true")
    for line in (workdir / "made.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert np.asarray(Image.open(row["picture"])).shape == (24, 24, 3)
        page = np.asarray(Image.open(row["page"]))
        # Below the title and a line of the legend, two images 202 wide with a gap of 10; the model makes no mistake
        truth, prediction = page[64:266, 10:212], page[64:266, 222:424]
        assert np.array_equal(truth, prediction)
        assert len(np.unique(truth.reshape(-1, 3), axis=0)) == 3


def test_the_masks_of_a_split_have_the_names_of_its_images(segmenter: str, workdir: Path, accepted: Any) -> None:
    accepted("predict", segmenter, "input=val", "output=made", "format=masks", "threshold=0")
    for index in range(10):
        given, made = (Image.open(workdir / folder / "masks" / f"{index:03}.png") for folder in ("shapes/val", "made"))
        assert np.array_equal(np.asarray(given), np.asarray(made))
