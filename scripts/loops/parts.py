"""Scenes that are drawn, and networks without random draws, so that two programs can be compared number by number."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision import models
from torchvision.tv_tensors import BoundingBoxes, Image, Mask

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


class Noisy(torch.utils.data.Dataset[Any]):
    """Images (3, 64, 64) from -1 to 1 with the noise (100, 1, 1) that the generator gets beside them."""

    def __init__(self, samples: int = 200) -> None:
        self._scenes, self._samples = Scenes(), samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        noise = torch.randn(100, 1, 1, generator=torch.Generator().manual_seed(index))
        return self._scenes[index][0].as_subclass(Tensor) / 127.5 - 1, noise


def segmenter() -> nn.Module:
    """torchvision's DeepLabV3 on MobileNetV3 without dropout."""
    return still(
        models.segmentation.deeplabv3_mobilenet_v3_large(
            weights=None, weights_backbone=None, num_classes=3, aux_loss=True
        )
    )


# As many proposals as there are: otherwise torchvision draws some of them at random
_ALL = {"min_size": 64, "max_size": 64, "rpn_batch_size_per_image": 10**6, "box_batch_size_per_image": 10**6}


def faster_rcnn() -> nn.Module:
    """torchvision's Faster R-CNN on MobileNetV3, made for images of 320 pixels."""
    return models.detection.fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None, weights_backbone=None, num_classes=3, **_ALL
    )


def mask_rcnn() -> nn.Module:
    """torchvision's Mask R-CNN on ResNet-50."""
    return models.detection.maskrcnn_resnet50_fpn(weights=None, weights_backbone=None, num_classes=3, **_ALL)


def still(model: nn.Module) -> nn.Module:
    """A model whose dropout keeps everything."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


class Generator(nn.Sequential):
    """DCGAN's generator (Radford et al., arXiv:1511.06434): noise (B, 100, 1, 1) to images (B, 3, 64, 64)."""

    def __init__(self, width: int = 8) -> None:
        layers: list[nn.Module] = []
        sizes = (100, 8 * width, 4 * width, 2 * width, width)
        for place, (before, after) in enumerate(itertools.pairwise(sizes)):
            stride, padding = (1, 0) if place == 0 else (2, 1)
            layers += [
                nn.ConvTranspose2d(before, after, 4, stride, padding, bias=False),
                nn.BatchNorm2d(after),
                nn.ReLU(),
            ]
        super().__init__(*layers, nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False), nn.Tanh())


def discriminator(width: int = 8) -> nn.Sequential:
    """DCGAN's discriminator: images (B, 3, 64, 64) to logits (B, 1, 1, 1)."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2)]
    for factor in (1, 2, 4):
        layers += [nn.Conv2d(factor * width, 2 * factor * width, 4, 2, 1, bias=False)]
        layers += [nn.BatchNorm2d(2 * factor * width), nn.LeakyReLU(0.2)]
    torch.manual_seed(7)
    return nn.Sequential(*layers, nn.Conv2d(8 * width, 1, 4, 1, 0, bias=False))


class DCGAN:
    """The task of DCGAN."""

    def modules(self, model: nn.Module, loss: nn.Module) -> dict[str, nn.Module]:
        """The discriminator."""
        return {"discriminator": discriminator()}

    def optimizers(self, modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
        """One for each network."""
        return {"generator": modules["model"], "discriminator": modules["discriminator"]}

    def optimizer_steps(self, modules: dict[str, Any], batch: tuple[Tensor, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Real and generated images for the discriminator, then the generator against it."""
        images, noise = batch
        judge, fakes = modules["discriminator"], modules["model"](noise)
        real, fake = judge(images), judge(fakes.detach())
        ones = torch.ones_like(real)
        yield (
            "discriminator",
            (
                F.binary_cross_entropy_with_logits(real, ones)
                + F.binary_cross_entropy_with_logits(fake, torch.zeros_like(fake))
            ),
        )
        yield "generator", F.binary_cross_entropy_with_logits(judge(fakes), ones)
