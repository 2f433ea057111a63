"""ResNet-18 on a folder of JPEGs: `ImageFolder`, a `DataLoader` with workers, uint8 to the device, bf16 in NHWC."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.models import resnet18
from torchvision.transforms import v2

MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # of ImageNet


def epochs(root: str, device: str, size: int, batch_size: int, workers: int) -> Iterator[None]:
    """Train on crops of `size` pixels; the images are in `<root>/train/<class>/`."""
    torch.manual_seed(0)
    crop = v2.Compose([v2.RandomResizedCrop(size), v2.RandomHorizontalFlip(), v2.PILToTensor()])
    images = ImageFolder(str(Path(root) / "train"), crop)
    cuda = device.startswith("cuda")
    loader: Any = DataLoader(images, batch_size, shuffle=True, drop_last=True, num_workers=workers, pin_memory=cuda,
                             persistent_workers=True, prefetch_factor=4)  # fmt: skip
    mean, std = (torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (MEAN, STD))
    model = resnet18(num_classes=len(images.classes)).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4, nesterov=True, fused=True)
    while True:
        total = torch.zeros((), device=device)
        for pixels, classes in loader:
            inputs, targets = pixels.to(device, non_blocking=True), classes.to(device, non_blocking=True)
            inputs = inputs.contiguous(memory_format=torch.channels_last).float().sub_(mean).div_(std)
            with torch.autocast(torch.device(device).type, torch.bfloat16):
                loss = F.cross_entropy(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
        assert total.isfinite()
        yield
