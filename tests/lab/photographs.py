"""Images that resemble photographs: gradients, textures of every scale and shapes."""

from __future__ import annotations

import colorsys

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw


def photo(kind: int, kinds: int, side: int, generator: np.random.Generator) -> Image.Image:
    """One image of a class: its hue, its texture and the shape in it lean towards the class, and overlap with others."""
    noise = torch.zeros(1, 3, side, side)
    for cells in (2, 5, 12, 28, 64):
        if cells <= side:
            coarse = torch.from_numpy(generator.standard_normal((1, 3, cells, cells), dtype=np.float32))
            coarse = 0.7 * coarse.mean(1, keepdim=True) + 0.3 * coarse
            noise += F.interpolate(coarse, size=(side, side), mode="bicubic", align_corners=False) * cells**-0.6
    hue = (kind / kinds + generator.normal(0, 0.06)) % 1
    base = np.array(colorsys.hsv_to_rgb(hue, generator.uniform(0.2, 0.6), generator.uniform(0.4, 0.8)))
    pixels = 255 * (base + 0.16 * noise[0].permute(1, 2, 0).numpy())
    image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(image)
    for _ in range(int(generator.integers(1, 4))):
        x, y = generator.uniform(0.1, 0.9, 2) * side
        radius = generator.uniform(0.08, 0.3) * side
        colour = tuple(int(value) for value in generator.integers(30, 226, 3))
        if kind % 2:
            draw.regular_polygon((x, y, radius), 3 + kind // 2, int(generator.integers(0, 360)), fill=colour)
        else:
            draw.ellipse((x - radius, y - radius * (1 - 0.1 * kind), x + radius, y + radius), fill=colour)
    return image
