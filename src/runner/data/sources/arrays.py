"""Images as one tensor: in memory, or mapped from a file."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.base.errors import UserError
from runner.data.bad_samples import NOT_READ


@dataclass(frozen=True, eq=False)
class ImageArrays(Dataset[tuple[Tensor, Tensor]]):
    """Images and targets as two tensors on the CPU, so that a batch is one gather and the set can live on any device.

    Attributes:
        images: uint8 (N, C, H, W), values 0 to 255.
        targets: int64 (N,) class indices into `classes`, or finite float32 (N,) values to regress.
        classes: names of the classes; empty for regression, and only then.

    Raises `ValueError` if a dtype, shape, device, length or class index is not as above.
    """

    images: Tensor
    targets: Tensor
    classes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        images, targets = self.images, self.targets
        shown = " and ".join(f"{each.dtype} {tuple(each.shape)} on {each.device}" for each in (images, targets))
        if images.dtype != torch.uint8 or images.dim() != 4 or 0 in images.shape:
            raise ValueError(f"images must be a uint8 tensor (N, C, H, W) without empty dimensions, got {shown}")
        if targets.dtype not in (torch.int64, torch.float32) or targets.shape != images.shape[:1]:
            one = f"({len(images)},), one for each image"
            raise ValueError(f"targets must be an int64 or float32 tensor {one}, got {shown}")
        if images.device.type != "cpu" or targets.device.type != "cpu":
            raise ValueError(f"images and targets must be on the cpu, got {shown}")
        # Regression has numbers, and everything else class numbers
        if targets.dtype == torch.float32:
            if self.classes:
                raise ValueError("float32 targets are for regression, which has no classes; pass classes=()")
            if not bool(torch.isfinite(targets).all()):
                raise ValueError("targets must be finite")
        elif (low := int(targets.min())) < 0 or int(targets.max()) >= len(self.classes):
            values = f"from {low} to {int(targets.max())}"
            raise ValueError(f"targets must index the {len(self.classes)} classes, got values {values}")

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """The image, uint8 (C, H, W), and its target, a scalar tensor; both are views."""
        return self.images[index], self.targets[index]


class CachedImages(Dataset[tuple[Tensor, Tensor]]):
    """Images mapped from an array in a file, whose pages all processes share.

    Attributes:
        images: uint8 (N, C, H, W), or float32 of 16 bits; read-only.
        targets: (N, ...), in memory.
        unreadable: samples that could not be read when the file was made, int64 (U,), ascending; their places hold other images.

    Raises `ValueError` if the file has no such array.
    """

    def __init__(self, path: Path, targets: Tensor, unreadable: Tensor) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")
            self.images = torch.from_numpy(np.lib.format.open_memmap(path, mode="r"))
        kinds = torch.uint8, torch.float32
        if self.images.dtype not in kinds or self.images.dim() != 4 or len(self.images) != len(targets):
            raise ValueError(f"{path.name} has no images for {len(targets):,} targets")
        self.targets, self.unreadable = targets, unreadable
        self._path, self._missing = path, frozenset(unreadable.tolist())

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """One sample, a copy; raises `UserError` if it could not be read when the file was made."""
        if index in self._missing:
            raise UserError(NOT_READ)
        return self.images[index].clone(), self.targets[index].clone()

    def __reduce__(self) -> tuple[type, tuple[Path, Tensor, Tensor]]:
        return CachedImages, (self._path, self.targets, self.unreadable)
