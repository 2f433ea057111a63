"""Images like photographs, made here: light, colours that belong together, texture, an object; and data sets with one fault."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from check_zoo import Listed
from PIL import Image
from torch import Tensor

from runner.data.sources.arrays import ImageArrays

SIDE, CLASSES, TRAIN, TEST = 32, 4, 320, 120
NAMES = ("ball", "box", "cross", "ring")


@functools.cache
def photos(count: int = TRAIN + TEST, side: int = SIDE, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Images uint8 (N, 3, H, W) and what they show (N,): statistics of natural images (1/f), an object in the middle."""
    draw = torch.Generator().manual_seed(seed)
    frequency = (torch.fft.fftfreq(side)[:, None] ** 2 + torch.fft.rfftfreq(side)[None] ** 2).sqrt().clamp_min(1 / side)

    def field(*shape: int) -> Tensor:
        noise = torch.complex(*(torch.randn(*shape, *frequency.shape, generator=draw) for _ in range(2)))
        made = torch.fft.irfft2(noise / frequency**1.1, s=(side, side))
        return made / made.std((-2, -1), keepdim=True)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(*shape, generator=draw)

    targets = torch.randint(0, CLASSES, (count,), generator=draw)
    grid = torch.linspace(-1, 1, side)
    light = uniform(-0.25, 0.25, count, 1, 1, 1) * grid.view(1, 1, -1, 1) + uniform(-0.2, 0.2, count, 1, 1, 1) * grid
    images = uniform(0.3, 0.6, count, 1, 1, 1) + light + 0.12 * field(count, 1) + 0.04 * field(count, 3)
    images += uniform(-0.08, 0.08, count, 3, 1, 1)
    middle = uniform(-0.15, 0.15, count, 2, 1, 1)
    down, right = grid.view(1, -1, 1) - middle[:, 0], grid.view(1, 1, -1) - middle[:, 1]
    size, blur = uniform(0.45, 0.65, count, 1, 1), 0.06
    distance = (down.square() + right.square()).sqrt()
    square = torch.maximum(down.abs(), right.abs())
    cross = torch.maximum(torch.minimum(down.abs(), right.abs()) - size * 0.6, square - size * 1.4)
    edges = torch.stack([distance - size, square - size, cross, (distance - size).abs() - size * 0.3])
    mask = torch.sigmoid(-edges[targets, torch.arange(count)] / blur * 2)[:, None]
    palette = torch.tensor([[0.8, 0.35, 0.3], [0.35, 0.7, 0.35], [0.3, 0.4, 0.8], [0.8, 0.75, 0.3]])
    colour = palette[targets].view(count, 3, 1, 1) + 0.12 * torch.randn(count, 3, 1, 1, generator=draw)
    texture = colour + light + 0.06 * field(count, 1)
    images = images * (1 - mask) + texture * mask + 0.012 * torch.randn(images.shape, generator=draw)
    return (images * 255).round().clamp(0, 255).to(torch.uint8), targets


def encoded(image: Tensor, quality: int = 60) -> Tensor:
    """An image after JPEG."""
    kept = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).numpy()).save(kept, "JPEG", quality=quality)
    return torch.from_numpy(np.asarray(Image.open(kept)).copy()).permute(2, 0, 1)


def resized(images: Tensor, side: int) -> Tensor:
    """Images of another size, uint8."""
    return (
        F.interpolate(images.float(), (side, side), mode="bilinear", antialias=True)
        .round()
        .clamp(0, 255)
        .to(torch.uint8)
    )


AGAIN: dict[str, Callable[[Tensor], Tensor]] = {  # pictures of the same things, so that no byte is the same
    "mirrored": lambda images: images.flip(-1),
    "rescaled": lambda images: resized(resized(images, SIDE // 2), SIDE),
    "noisy": lambda images: images + 12 * torch.randn(images.shape, generator=torch.Generator().manual_seed(1)),
    "mirrored and brighter": lambda images: images.flip(-1).float() * 0.8 + 40,
    "encoded": lambda images: torch.stack([encoded(image) for image in images]),
    "rotated": lambda images: images.rot90(1, (2, 3)),
    "upside down": lambda images: images.flip(2),
    "grey": lambda images: images.float().mean(1, keepdim=True),
}


def again(images: Tensor, how: str) -> Tensor:
    """Images uint8 (N, 3, H, W) in another way of `AGAIN`."""
    return AGAIN[how](images).clamp(0, 255).to(torch.uint8)


MEAN, STD = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1), torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


def dataset(fault: str = "", kind: str = "classification", side: int = SIDE, samples: int = TRAIN) -> dict[str, Any]:
    """Photographs to train and to test on, with one fault."""
    images, targets = photos(samples + (3 if fault == "late copies" else 1) * TEST, side)
    theirs, right = images[samples:], targets[samples:]
    images, targets = images[:samples], targets[:samples]
    if kind == "regression":
        # How bright the object is, in units of its deviation.
        both = torch.cat([images, theirs])[..., 12:20, 12:20].float().mean((1, 2, 3))
        both = (both - both.mean()) / both.std()
        targets, right = both[:samples], both[samples:]
        if fault in ("other unit", "bytes"):
            right = right * 3 + 2 if fault == "other unit" else right * 255
        return {"train": ImageArrays(images, targets), "test": ImageArrays(theirs, right)}
    if fault.startswith("again "):
        theirs, right = theirs.clone(), right.clone()
        theirs[:40], right[:40] = again(images[:40], fault.removeprefix("again ")), targets[:40]
    elif fault == "late copies":  # after those that a comparison in order would look at
        for place, how in enumerate(("mirrored", "rescaled", "noisy", "encoded")):
            theirs[300 + 15 * place : 315 + 15 * place] = again(images[15 * place : 15 * place + 15], how)
    elif fault == "one image":
        images = images[:8].repeat(samples // 8, 1, 1, 1)
        targets = targets[:8].repeat(samples // 8)
    elif fault == "permuted":
        images = images.roll(1, 0)
    elif fault == "permuted test":
        theirs = theirs.roll(1, 0)
    elif fault == "swapped test":
        theirs = theirs.flip(1)
    elif fault == "renamed classes in test":
        right = torch.tensor([2, 3, 0, 1])[right]
    elif fault == "no such class in test":
        theirs, right = theirs[right != 1], right[right != 1]
    elif fault in ("normalised", "divided twice", "floats"):
        floats = [each.float() / 255 for each in (images, theirs)]
        if fault == "normalised":
            floats = [(each - MEAN) / STD for each in floats]
        elif fault == "divided twice":
            floats = [each / 255 for each in floats]
        return {"train": Listed(floats[0], targets, NAMES), "test": Listed(floats[1], right, NAMES)}
    return {"train": ImageArrays(images, targets, NAMES), "test": ImageArrays(theirs, right, NAMES)}
