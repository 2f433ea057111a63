"""Image files as tensors, for tests of how they are decoded."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from runner.data.sources.image_io import Cut, Decoding, middle_square


def read_image(
    path: Any, size: int | None, channels: Any = 3, cut: Cut = middle_square, content: Any = None, **settings: Any
) -> Tensor:
    """The image of a file, see `Decoding.read`."""
    return Decoding(channels=channels, **settings).read(path, content, size, cut)
