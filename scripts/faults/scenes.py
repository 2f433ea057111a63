"""Images of bright rectangles with masks or boxes, and small models for them, which are tormented."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchvision import tv_tensors
from torchvision.models.detection import FCOS
from torchvision.models.detection.anchor_utils import AnchorGenerator

_SIDE = 32


class Scenes(torch.utils.data.Dataset[Any]):
    """Image i is drawn from the seed i; samples are (image, mask), or with `boxes` (image, target)."""

    def __init__(self, samples: int = 200, boxes: bool = False) -> None:
        self.samples, self.boxes = samples, boxes
        self.classes = ("tall", "wide") if boxes else ("background", "tall", "wide")

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        generator = torch.Generator().manual_seed(index)
        image = torch.randint(0, 60, (3, _SIDE, _SIDE), generator=generator, dtype=torch.uint8)
        mask, boxes, labels = torch.zeros(_SIDE, _SIDE, dtype=torch.uint8), [], []
        for label in torch.randint(1, 3, (1 + index % 2,), generator=generator).tolist():
            width, height = (6, 12) if label == 1 else (12, 6)
            left, top = torch.randint(0, _SIDE - 12, (2,), generator=generator).tolist()
            image[:, top : top + height, left : left + width] += 150
            mask[top : top + height, left : left + width] = label
            boxes.append([left, top, left + width, top + height])
            labels.append(label)
        if not self.boxes:
            return tv_tensors.Image(image), tv_tensors.Mask(mask)
        found = tv_tensors.BoundingBoxes(torch.tensor(boxes).float(), format="XYXY", canvas_size=(_SIDE, _SIDE))
        target = {
            "boxes": found,
            "labels": torch.tensor(labels),
            "iscrowd": torch.zeros(len(labels), dtype=torch.int64),
        }
        return tv_tensors.Image(image), target | {"image_id": index}


class Segmenter(nn.Sequential):
    """Logits (B, num_classes, H, W); BatchNorm and dropout have a state that a resume could get wrong."""

    def __init__(self, num_classes: int) -> None:
        layers = (
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Conv2d(8, num_classes, 1),
        )
        super().__init__(*layers)


class Detector(FCOS):
    """A detector of two convolutions."""

    def __init__(self, num_classes: int) -> None:
        layers = [nn.Conv2d(3, 32, 5, 4, 2), nn.ReLU(), nn.Conv2d(32, 32, 3, 2, 1), nn.ReLU()]
        backbone: Any = nn.Sequential(*layers)
        backbone.out_channels = 32
        anchors = AnchorGenerator(sizes=((8,),), aspect_ratios=((1.0,),))
        super().__init__(backbone, num_classes, anchor_generator=anchors, min_size=_SIDE, max_size=_SIDE)
