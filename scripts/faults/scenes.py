"""Scenes that are drawn, and small models for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torchvision.models.detection import FCOS
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.tv_tensors import BoundingBoxes, Image, Mask

_SIDE = 32  # that images are scaled to
SIZE = 64


class Scenes(torch.utils.data.Dataset[Any]):
    """Images (3, 64, 64) with two bright rectangles each: as a mask of classes, or as boxes with masks."""

    classes = ("background", "first", "second")

    def __init__(self, boxes: bool = False, samples: int = 100) -> None:
        self._boxes, self._samples = boxes, samples
        if boxes:
            self.classes = ("first", "second")

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Any:
        draw = torch.Generator().manual_seed(index)
        image = torch.randint(0, 80, (3, SIZE, SIZE), dtype=torch.uint8, generator=draw)
        masks = torch.zeros(2, SIZE, SIZE, dtype=torch.uint8)
        boxes = []
        for number in range(2):
            width, height = torch.randint(12, 28, (2,), generator=draw).tolist()
            left, top = (int(torch.randint(0, SIZE - side, (1,), generator=draw)) for side in (width, height))
            image[number, top : top + height, left : left + width] = 220
            masks[number, top : top + height, left : left + width] = 1
            boxes.append([left, top, left + width, top + height])
        if not self._boxes:
            return Image(image), Mask(torch.where(masks[1] > 0, 2, masks[0]))
        found = BoundingBoxes(torch.tensor(boxes).float(), format="XYXY", canvas_size=(SIZE, SIZE))
        return Image(image), {"boxes": found, "labels": torch.tensor([1, 2]), "masks": Mask(masks), "image_id": index}


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
