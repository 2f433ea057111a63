"""Small models for scenes of `loops.parts`, which are tormented."""

from __future__ import annotations

from typing import Any

from torch import nn
from torchvision.models.detection import FCOS
from torchvision.models.detection.anchor_utils import AnchorGenerator

_SIDE = 32


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
