"""Batch transforms: run on the device, a whole batch at a time, with draws of its own for every sample.

A batch transform is any callable `(images, draws) -> images`: images of shape (B, C, H, W), uint8 with values 0 to 255 or
float with values 0 to 1, and `draws` a `runner.data.keyed.Draws` for the samples. Given the same draws, a sample comes out the
same in any batch. One that says so with an attribute `per_sample = True`, and draws from nothing else, is given many batches
at a time, which is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from runner.config.errors import UserError
from runner.data.keyed import Draws

BatchTransform = Callable[[Tensor, Draws], Tensor]


class RandomShift:
    """Move each image by up to a share of its size along both axes, zeros coming in at the border.

    Args:
        share: largest shift as a share of height and width, from 0 to 0.5; rounded, but at least one pixel if above 0.
    """

    per_sample = True

    def __init__(self, share: float = 0.125) -> None:
        if not 0 <= share <= 0.5:
            raise ValueError(f"share must be from 0 to 0.5, got {share}")
        self.share = share

    def __call__(self, images: Tensor, draws: Draws) -> Tensor:
        """Shift `images`."""
        if self.share == 0:
            return images
        batch, channels, height, width = images.shape
        up, left = max(1, round(self.share * height)), max(1, round(self.share * width))
        padded = F.pad(images, (left, left, up, up))
        rows = draws.integers(2 * up + 1)[:, None] + torch.arange(height, device=images.device)
        columns = draws.integers(2 * left + 1)[:, None] + torch.arange(width, device=images.device)
        places = (rows[:, :, None] * (width + 2 * left) + columns[:, None, :]).view(batch, 1, -1)
        flat = padded.view(batch, channels, -1).gather(2, places.expand(-1, channels, -1))
        return flat.view(batch, channels, height, width)


class RandomFlip:
    """Mirror each image left to right with probability `p`."""

    per_sample = True

    def __init__(self, p: float = 0.5) -> None:
        if not 0 <= p <= 1:
            raise ValueError(f"p must be from 0 to 1, got {p}")
        self.p = p

    def __call__(self, images: Tensor, draws: Draws) -> Tensor:
        """Mirror some of `images`."""
        if self.p == 0:
            return images
        return torch.where((draws.uniform() < self.p)[:, None, None, None], images.flip(-1), images)


class RandomBrightnessContrast:
    """Scale the distance from mid grey and add light, each by a uniform draw; values stay in range.

    Args:
        brightness: largest change, as a share of white.
        contrast: largest relative change of the distance from mid grey.
    """

    per_sample = True

    def __init__(self, brightness: float = 0.2, contrast: float = 0.2) -> None:
        if brightness < 0 or contrast < 0:
            raise ValueError(f"brightness and contrast must be at least 0, got {brightness} and {contrast}")
        self.brightness = brightness
        self.contrast = contrast

    def __call__(self, images: Tensor, draws: Draws) -> Tensor:
        """Change light and contrast of `images`."""
        white = 255.0 if images.dtype == torch.uint8 else 1.0
        scale = (1 + self.contrast * (2 * draws.uniform() - 1))[:, None, None, None]
        shift = (self.brightness * white * (2 * draws.uniform() - 1))[:, None, None, None]
        changed = ((images.float() - white / 2) * scale + (shift + white / 2)).clamp(0, white)
        return changed.round().to(torch.uint8) if images.dtype == torch.uint8 else changed.to(images.dtype)


class RandomErasing:
    """Set a random rectangle of each image to zero with probability `p` (Zhong et al. 2020; DeVries & Taylor 2017).

    Args:
        p: chance for each image.
        share: largest side of the rectangle as a share of height and width.
    """

    per_sample = True

    def __init__(self, p: float = 0.5, share: float = 0.25) -> None:
        if not 0 <= p <= 1 or not 0 < share <= 1:
            raise ValueError(f"p must be from 0 to 1 and share above 0 and at most 1, got p={p} and share={share}")
        self.p = p
        self.share = share

    def __call__(self, images: Tensor, draws: Draws) -> Tensor:
        """Erase rectangles in some of `images`."""
        chosen = draws.uniform() < self.p
        inside = []
        for size in images.shape[-2:]:
            length = 1 + draws.integers(max(1, round(self.share * size)))
            start = (draws.uniform() * (size + 1 - length)).long()
            places = torch.arange(size, device=images.device)
            inside.append((places >= start[:, None]) & (places < (start + length)[:, None]))
        erased = (inside[0][:, :, None] & inside[1][:, None, :] & chosen[:, None, None])[:, None]
        return images.masked_fill(erased, 0)


class Pipeline:
    """Batch transforms in order, then pixels normalised: what a model is given.

    Args:
        transforms: batch transforms; each gets a stream of draws by its place in the list.
        mean: mean of each channel for pixels in [0, 1], one value for all channels or one for each.
        std: standard deviation likewise.
        seed: seed of the run.
        device: device that batches are on.
        channels_last: give images in NHWC memory layout.
    """

    def __init__(
        self,
        transforms: Sequence[BatchTransform],
        mean: Sequence[float],
        std: Sequence[float],
        seed: int,
        device: torch.device,
        channels_last: bool = False,
    ) -> None:
        self.transforms = list(transforms)
        self.per_sample = all(getattr(transform, "per_sample", False) for transform in transforms)
        self.seed = seed
        self._mean = torch.tensor(mean, device=device, dtype=torch.float32).view(1, -1, 1, 1)
        self._inverse_std = 1 / torch.tensor(std, device=device, dtype=torch.float32).view(1, -1, 1, 1)
        self._format = torch.channels_last if channels_last else torch.contiguous_format

    def __call__(self, images: Tensor, indices: Tensor, epoch: int) -> Tensor:
        """Transform and normalise a batch.

        Args:
            images: (B, C, H, W), uint8 with values 0 to 255 or float with values 0 to 1.
            indices: identity of each sample in its data set, int64 of shape (B,), on the device of `images`.
            epoch: number of the epoch.

        Returns:
            Float32 images of the same batch size.

        Raises:
            UserError: if the statistics do not fit the channels.
        """
        for stream, transform in enumerate(self.transforms):
            images = transform(images, Draws(self.seed, epoch, indices, stream))
        if self._mean.shape[1] not in (1, images.shape[1]):
            raise UserError(
                f"data.normalize: {self._mean.shape[1]} values, but the images have {images.shape[1]} channels; "
                "give one value a channel, or null to measure them"
            )
        if images.dtype == torch.uint8:
            images = images.to(torch.float32, memory_format=self._format).mul_(1 / 255)
        else:
            images = images.to(torch.float32, memory_format=self._format, copy=True)
        return images.sub_(self._mean).mul_(self._inverse_std)
