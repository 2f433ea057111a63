"""Images that grow during training."""

from __future__ import annotations

from torch import Tensor
from torchvision.transforms.v2.functional import resize

from runner.data.sample_rng import SampleRNG


class GrowingSize:
    """Reduce the images of early epochs, which saves time: progressive resizing, as FFCV's trainings of ImageNet do it.

    A batch transform: images (B, C, S, S) become (B, C, s, s), reduced bilinearly with antialiasing. s is `smallest` in epochs
    up to `begin`, S from `end` on, and between them the multiple of 32 next to the line that joins both. Epochs count from 0.

    Raises:
        ValueError: `smallest` is below 1, `end` is not after `begin`, or images are smaller than `smallest` or not square.
    """

    per_sample = True

    def __init__(self, smallest: int, begin: int, end: int) -> None:
        if smallest < 1 or not 0 <= begin < end:
            raise ValueError(f"smallest must be at least 1 and end above begin, got {smallest}, {begin} and {end}")
        self.smallest, self.begin, self.end = smallest, begin, end

    def __call__(self, images: Tensor, rng: SampleRNG) -> Tensor:
        """Reduce `images`."""
        height, largest = images.shape[-2:]
        if height != largest or largest < self.smallest:
            wanted = f"square with at least smallest={self.smallest} pixels"
            raise ValueError(f"images must be {wanted}, got {height}x{largest}")
        share = (rng.epoch - self.begin) / (self.end - self.begin)
        if share >= 1 or largest == self.smallest:
            return images
        size = self.smallest
        if share > 0:
            size = min(largest, max(size, round((size + share * (largest - size)) / 32) * 32))
        reduced: Tensor = resize(images, [size, size], antialias=True)
        return reduced
