"""Short runs of the examples of `scripts/examples`, without network, and data that some of them read."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

_MNIST = [
    "data=synthetic", "data.image_size=28", "data.dataset.channels=1", "data.dataset.samples=128", "data.batch_size=16",
]  # fmt: skip
_DOCS = Path(__file__).resolve().parents[2] / "docs"
_TEXTS = "{train: howto/own_step.md, val: howto/own_model.md, test: howto/python.md}"

RUNS: dict[str, list[str]] = {
    "mnist": [*_MNIST, "epochs=2"],
    "mnist_rnn": [*_MNIST, "epochs=2"],
    "mnist_forward_forward": [
        *_MNIST, "epochs=2", "freeze=['1@1ep']", "scheduler.first.options.step_size=1", "evaluate.every_epochs=1",
    ],
    "siamese_network": [
        "data.dataset.source._target_=runner.data.sources.digits.digits", "~data.dataset.source.root",
        "~data.dataset.source.download", "data.batch_size=8", "evaluate.batch_size=64", "data.normalize.mean=[0.3]",
        "data.normalize.std=[0.4]", "epochs=2", "limit.train_batches=5", "limit.eval_batches=2", "data.num_workers=0",
    ],
    "vae": [*_MNIST, "epochs=2"],
    "regression": ["epochs=2", "data.dataset.samples=320"],
    "gcn": ["data=drawn_graph", "model.in_features=32", "epochs=12", "evaluate.every_epochs=4"],
    "denoising_autoencoder": ["epochs=2", "limit.train_batches=6"],
    "character_language_model": [
        "model.width=16", "model.heads=2", "model.layers=1", "data.dataset.length=32", "data.batch_size=8",
        "limit.train_batches=6", "limit.eval_batches=2", "epochs=2",
    ],
    "dcgan": [
        "data=synthetic", "data.image_size=32", "data.dataset.samples=64", "data.batch_size=16", "model.width=8",
        "task.discriminator.width=8", "epochs=3",
    ],
    "fast_neural_style": [
        "data=synthetic", "data.image_size=32", "data.dataset.samples=24", "model.width=4", "task.weights=null",
        f"task.style={_DOCS}/assets/report.png",
    ],
    "super_resolution": [
        f"data.root={_DOCS}", "data.dataset.folders={train: reference/verbs, val: assets}", "data.dataset.size=48",
        "data.batch_size=1", "epochs=4",
    ],
    "time_sequence_prediction": [
        "data.dataset.length=20", "data.dataset.count=12", "data.batch_size=3", "model.hidden=8", "optimizer.max_iter=3",
        "task.future=20", "epochs=3",
    ],
    "word_language_model": [
        f"data.root={_DOCS}", f"data.dataset.files={_TEXTS}", "data.batch_size=8", "model.size=16", "epochs=2",
    ],
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
        "transform.sample_train.2.size=28", "transform.sample_eval.1.size=28", "model.name=mc3_18", "data.batch_size=8",
        "epochs=2",
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
        _write(image, root / split / "images" / f"{number}.png")
        _write(mask, root / split / "masks" / f"{number}.png")
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
        _write(frame, folder / f"{number:03}.jpg")


def _write(image: Tensor, path: Path) -> None:
    """Write an image, uint8 (3, H, W), or a mask (1, H, W)."""
    Image.fromarray((image[0] if len(image) == 1 else image.permute(1, 2, 0)).numpy()).save(path)
