"""The loop that people write by hand on tensors in memory, without tricks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torchvision.transforms import v2

from peers.work import Work


def epochs(work: Work, model: nn.Module) -> Iterator[None]:
    """Train an epoch at a time: a gather a batch, torch's optimizer and scheduler as they come, `loss.item()` added up."""
    criterion = nn.CrossEntropyLoss()
    optimizer = work.sgd(model)
    scheduler = work.cosine(optimizer)
    images, targets = work.normalised(work.train.images), work.train.targets
    size = work.case.batch_size
    augment = augmentation(work)
    for _ in range(work.job.epochs):
        model.train()
        order = torch.randperm(len(images))
        running_loss = 0.0
        for start in range(0, len(images), size):
            index = order[start : start + size]
            inputs, classes = augment(images[index]), targets[index]
            optimizer.zero_grad()
            loss = criterion(model(inputs), classes)
            loss.backward()
            optimizer.step()
            scheduler.step()
            running_loss += loss.item() * len(index)
        yield


def augmentation(work: Work) -> Callable[[Tensor], Tensor]:
    """Crop and flip of each image of a batch; a batch as it is where the work has no augmentation."""
    if not work.shift:
        return lambda images: images
    black = (0 - work.case.mean) / work.case.std
    transform = v2.Compose(
        [
            v2.RandomCrop(work.train.images.shape[-1], padding=work.shift, fill=black),
            v2.RandomHorizontalFlip(work.case.flip),
        ]
    )
    return lambda images: torch.stack([transform(image) for image in images])
