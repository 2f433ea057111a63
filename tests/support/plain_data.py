"""A data set without images, and files of images without data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset


class Plain(Dataset[Any]):
    """Samples with targets and anything else that is given."""

    def __init__(self, size: int, **attributes: Any) -> None:
        self.size = size
        for name, value in attributes.items():
            setattr(self, name, value)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(1), 0


def plain_image(path: Path, color: Any = (10, 20, 30), size: tuple[int, int] = (6, 4), **options: Any) -> Path:
    """Save an image of one colour; the folders above it are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path, **options)
    return path


def noise_image(path: Path, width: int, height: int, seed: int) -> Path:
    """Save an image of random pixels; the folders above it are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)).save(path)
    return path
