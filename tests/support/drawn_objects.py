"""Images of bright rectangles with their annotations, as COCO and as YOLO have them, and a detector that is quick."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

SIZE = (40, 32)  # width and height
NAMES = ["tall", "wide"]

DETECTOR = '''
from torch import nn
from torchvision import tv_tensors
from torchvision.models.detection import FCOS
from torchvision.models.detection.anchor_utils import AnchorGenerator


class TinyDetector(FCOS):
    def __init__(self, num_classes, width=32):
        layers = [nn.Conv2d(3, width, 5, 4, 2), nn.ReLU(), nn.Conv2d(width, width, 3, 2, 1), nn.ReLU()]
        backbone = nn.Sequential(*layers)
        backbone.out_channels = width
        anchors = AnchorGenerator(sizes=((8,),), aspect_ratios=((1.0,),))
        super().__init__(backbone, num_classes, anchor_generator=anchors, min_size=32, max_size=40)


class Scripted(nn.Module):
    """Finds the box around all that is bright, and one beside it, with masks; its loss means nothing."""

    def __init__(self, num_classes):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, images, targets=None):
        if targets is not None:
            return {"one": self.weight.square() + len(targets), "two": self.weight}
        return [self.found(image) for image in images]

    def found(self, image):
        bright = (image.mean(0) > 0.6).nonzero()
        corners = [*bright.amin(0).flip(0), *(bright.amax(0).flip(0) + 1)] if len(bright) else [0, 0, 9, 9]
        boxes = torch.tensor([[float(each) for each in corners]]) + torch.tensor([[0.0], [3.0]])
        masks = torch.zeros(2, 1, *image.shape[1:])
        for mask, box in zip(masks, boxes.int().tolist()):
            mask[0, box[1]:box[3], box[0]:box[2]] = 0.9
        labels = torch.tensor([1, 2]) if corners[3] - corners[1] > corners[2] - corners[0] else torch.tensor([2, 2])
        return {"boxes": boxes, "labels": labels, "scores": image.mean() / torch.tensor([1.0, 2.0]), "masks": masks}
'''

OWN = '''

class Own(torch.utils.data.Dataset):
    """A square in each image, as a user's own data set has it."""

    classes = ("square",)

    def __init__(self, label=1):
        self.label = label

    def __len__(self):
        return 8

    def __getitem__(self, index):
        box = tv_tensors.BoundingBoxes([[index, 4, index + 12, 16]], format="XYXY", canvas_size=(32, 40))
        image = torch.zeros(3, 32, 40, dtype=torch.uint8)
        image[:, 4:16, index : index + 12] = 220
        return tv_tensors.Image(image), {"boxes": box, "labels": torch.tensor([self.label])}
'''


def draw(root: Path, split: str, count: int, seed: int) -> dict[str, Any]:
    """Write images, `<split>.json` and `labels/<split>/*.txt`; returns the content of the JSON file. Every fourth has no object."""
    rng, images = np.random.default_rng(seed), list[dict[str, Any]]()
    annotations = list[dict[str, Any]]()
    (root / "images" / split).mkdir(parents=True)
    (root / "labels" / split).mkdir(parents=True)
    width, height = SIZE
    for number in range(count):
        pixels, lines = rng.integers(0, 60, (height, width, 3), dtype=np.uint8), []
        for _ in range((number + 1) % 4):
            label = int(rng.integers(2))
            w, h = (8, 16) if label == 0 else (16, 8)
            x, y = int(rng.integers(width - w)), int(rng.integers(height - h))
            pixels[y : y + h, x : x + w] = 200
            polygon = [x, y, x + w, y, x + w, y + h, x, y + h]
            annotations.append({
                "id": len(annotations) + 1, "image_id": 100 + number, "category_id": (3, 7)[label], "iscrowd": 0,
                "bbox": [x, y, w, h], "area": w * h, "segmentation": [polygon],
            })  # fmt: skip
            lines.append(f"{label} {(x + w / 2) / width} {(y + h / 2) / height} {w / width} {h / height}")
        name = f"{number:03}.png"
        Image.fromarray(pixels).save(root / "images" / split / name)
        if lines:
            (root / "labels" / split / f"{number:03}.txt").write_text("\n".join(lines) + "\n")
        images.append({"id": 100 + number, "file_name": name, "width": width, "height": height})
    categories = [{"id": number, "name": name} for number, name in zip((3, 7), NAMES, strict=True)]
    contents = {"images": images, "annotations": annotations, "categories": categories}
    (root / f"{split}.json").write_text(json.dumps(contents))
    return contents


def changed(path: Path, change: Callable[[Any], object]) -> None:
    """Change the content of a JSON file in place."""
    contents = json.loads(path.read_text())
    change(contents)
    path.write_text(json.dumps(contents))


COCO = tuple(
    f"data.dataset.{split}_{what}={value}"
    for split in ("train", "val")
    for what, value in (("images", f"images/{split}"), ("annotations", f"{split}.json"))
)
"""Words that read what `draw` wrote below `data.root`."""


def read_coco(root: str | Path, **options: Any) -> dict[str, Any]:
    """The data sets of COCO's JSON below a folder where the splits `train` and `val` were drawn."""
    from runner.data.sources.detection import coco

    return coco(str(root), "images/train", "train.json", "images/val", "val.json", **options)
