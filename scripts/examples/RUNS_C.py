"""Short runs of the examples after torchvision's references, on data that `prepare` draws; paths are relative to its folder."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor
from torchvision.io import write_jpeg, write_png

RUNS = {
    "deeplabv3": [
        "data=segmentation_folder", "data.root=scenes", "data.image_size=64", "transform.sample_eval.0.size=64",
        "data.batch_size=4", "model.name=deeplabv3_mobilenet_v3_large", "model.weights_backbone=null", "epochs=2",
    ],
    "faster_rcnn": [
        "data.root=scenes", "data.batch_size=2", "model.name=fasterrcnn_mobilenet_v3_large_320_fpn",
        "model.options={min_size: 64, max_size: 96, box_batch_size_per_image: 32, rpn_post_nms_top_n_train: 50}",
        "model.weights_backbone=null", "scheduler.warmup=4", "epochs=1",
    ],
    "similarity": [
        "data=digits", "transform.sample_train.1.size=[32,32]", "data.batch_size=40", "model.name=resnet18",
        "model.weights=null", "limit.train_batches=6", "epochs=2",
    ],
    "video_classification": [
        "data.root=videos", "data.dataset.clips=2", "data.dataset.frames=4", "transform.sample_train.0.size=[32,40]",
        "transform.sample_train.2.size=28", "transform.sample_eval.1.size=28", "model.name=mc3_18",
        "data.batch_size=8", "epochs=2",
    ],
}  # fmt: skip


def prepare(folder: Path) -> None:
    """Write `scenes/`, images of two rectangles as masks and as boxes, and `videos/`, frames of squares that move or stay."""
    draw = torch.Generator().manual_seed(0)
    for split, count in (("train", 20), ("val", 6)):
        _scenes(folder / "scenes", split, count, draw)
        for kind in ("down", "right", "still"):
            for number in range(count // 3):
                _video(folder / "videos" / split / kind / str(number), kind, draw)


def _square(image: Tensor, sides: tuple[int, int], draw: torch.Generator) -> tuple[int, int, int]:
    """The top, left and side of a square in an image."""
    side = int(torch.randint(*sides, (), generator=draw))
    top, left = (int(torch.randint(length - side, (), generator=draw)) for length in image.shape[1:])
    return top, left, side


def _noise(height: int, width: int, draw: torch.Generator) -> Tensor:
    return torch.randint(0, 80, (3, height, width), dtype=torch.uint8, generator=draw)


def _scenes(root: Path, split: str, count: int, draw: torch.Generator) -> None:
    images, objects = [], []
    for folder in (root / split / "images", root / split / "masks", root / "annotations"):
        folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        image = _noise(*((64, 96), (96, 64))[number % 2], draw)
        mask = torch.zeros_like(image[:1])
        for kind in (1, 2):
            top, left, side = _square(image, (16, 32), draw)
            image[kind, top : top + side, left : left + side] = 220
            mask[:, top : top + side, left : left + side] = kind
            objects.append({"image_id": number, "category_id": kind, "bbox": [left, top, side, side], "area": side**2})
        images.append({"id": number, "file_name": f"{number}.png", "width": image.shape[2], "height": image.shape[1]})
        write_png(image, str(root / split / "images" / f"{number}.png"))
        write_png(mask, str(root / split / "masks" / f"{number}.png"))
    (root / f"{split}2017").symlink_to(f"{split}/images")
    (root / "classes.txt").write_text("background\ngreen\nblue\n")
    annotations = [{"id": place, "iscrowd": 0, **each} for place, each in enumerate(objects, 1)]
    categories = [{"id": 1, "name": "green"}, {"id": 2, "name": "blue"}]
    contents = {"images": images, "annotations": annotations, "categories": categories}
    (root / "annotations" / f"instances_{split}2017.json").write_text(json.dumps(contents))


def _video(folder: Path, kind: str, draw: torch.Generator) -> None:
    folder.mkdir(parents=True)
    top, left, side = _square(torch.empty(3, 24, 32), (6, 9), draw)
    for number in range(8):
        frame = _noise(32, 40, draw)
        down, right = top + number * (kind == "down"), left + number * (kind == "right")
        frame[:, down : down + side, right : right + side] = 220
        write_jpeg(frame, str(folder / f"{number:03}.jpg"))
