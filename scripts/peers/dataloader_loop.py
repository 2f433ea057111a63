"""The usual loop over a DataLoader; its loader and transforms are those of the libraries' loops as well."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchvision import transforms
from torchvision.datasets import FashionMNIST

from peers.work import Work

WORKERS = 2  # where samples are transformed one by one


def epochs(work: Work, model: nn.Module) -> Iterator[None]:
    """Train an epoch at a time."""
    criterion = nn.CrossEntropyLoss()
    optimizer = work.sgd(model)
    scheduler = work.cosine(optimizer)
    loader = loader_of(work)
    for _ in range(work.job.epochs):
        model.train()
        running_loss = 0.0
        for images, targets in loader:
            images, targets = images.to(work.job.device), targets.to(work.job.device)
            optimizer.zero_grad()
            loss = criterion(model(images), targets)
            loss.backward()
            optimizer.step()
            scheduler.step()
            running_loss += loss.item() * len(images)
        yield


def loader_of(work: Work) -> DataLoader[Any]:
    """The DataLoader that people make for this work.

    Samples in tensors are read in the process itself; images that are transformed one by one by workers that stay.
    """
    workers = WORKERS if work.shift else 0
    return DataLoader(
        dataset_of(work),
        batch_size=work.case.batch_size,
        shuffle=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )


def dataset_of(work: Work) -> Dataset[Any]:
    """Normalised tensors, or torchvision's data set with a transform for each image."""
    if not work.shift:
        return TensorDataset(work.normalised(work.train.images).cpu(), work.train.targets.cpu())
    normalise = [transforms.ToTensor(), transforms.Normalize((work.case.mean,), (work.case.std,))]
    return pictures_of(work, transforms.Compose([*augmentations_of(work), *normalise]))


def pictures_of(work: Work, transform: Callable[[Any], Any]) -> FashionMNIST:
    """torchvision's data set, cut to the samples of the work."""
    assert work.job.fashion_root is not None
    dataset = FashionMNIST(work.job.fashion_root, train=True, transform=transform)
    count = len(work.train.images)
    dataset.data, dataset.targets = dataset.data[:count], dataset.targets[:count]
    return dataset


def augmentations_of(work: Work) -> list[nn.Module]:
    """Crop and flip of one image of PIL."""
    side = work.train.images.shape[-1]
    return [transforms.RandomCrop(side, padding=work.shift), transforms.RandomHorizontalFlip(work.case.flip)]
