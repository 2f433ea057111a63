"""Faster R-CNN or DeepLabV3, both on MobileNetV3, on drawn scenes, in the manner of torchvision's references.

As in these, batches are copied from pageable memory, and so are the masks, which Faster R-CNN does not use.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from faults.scenes import Scenes
from runner.models.torchvision_detection import detector
from runner.models.torchvision_zoo import segmenter

FLIPPED = v2.Compose([v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)])


def segmentation_loss(model: nn.Module, batch: list[Any], device: str) -> Tensor:
    """Main loss, and half of the auxiliary one."""
    images, masks = (torch.stack(each).to(device) for each in zip(*batch, strict=True))
    outputs = model(images)
    losses = [F.cross_entropy(outputs[name], masks.long(), ignore_index=255) for name in ("out", "aux")]
    return losses[0] + 0.5 * losses[1]


def detection_loss(model: nn.Module, batch: list[Any], device: str) -> Tensor:
    """The sum of the losses of the model."""
    images = [image.to(device) for image, _ in batch]
    targets = [{name: target[name].to(device) for name in ("boxes", "labels", "masks")} for _, target in batch]
    return torch.stack(list(model(images, targets).values())).sum()


def epochs(model: str, device: str, samples: int, batch_size: int) -> Iterator[None]:
    """Train `model`, the name of torchvision's function, an epoch at a time."""
    torch.manual_seed(0)
    boxes = model.startswith("fasterrcnn")
    network = detector(model, num_classes=3) if boxes else segmenter(model, num_classes=3, aux_loss=True)
    network.train().to(device)
    loss_of = detection_loss if boxes else segmentation_loss
    weights = [each for each in network.parameters() if each.requires_grad]
    optimizer = torch.optim.SGD(weights, lr=0.0001, momentum=0.9, weight_decay=0.0005, fused=True)
    loader: Any = DataLoader(Scenes(boxes, samples), batch_size, shuffle=True, drop_last=True, collate_fn=list)
    while True:
        for batch in loader:
            loss = loss_of(network, [FLIPPED(*sample) for sample in batch], device)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        assert loss.isfinite()
        yield
