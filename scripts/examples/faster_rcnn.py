"""Batches of images of similar shape, so that little of them is padding.

After pytorch/vision references/detection: https://github.com/pytorch/vision/tree/main/references/detection
"""

import functools
from bisect import bisect
from collections import defaultdict
from typing import Any

import torch
from PIL import Image


@functools.cache
def ratio(path: str) -> float:
    """Width by height of an image file."""
    with Image.open(path) as image:
        return image.width / image.height


def by_shape(dataset: Any, batch_size: int, generator: torch.Generator, factor: int) -> list[int]:
    """Full batches of each of `2 * factor + 2` groups of aspect ratios, in random order; other samples wait for another epoch."""
    edges = [2 ** (step / factor) for step in range(-factor, factor + 1)]
    groups, chosen = defaultdict[int, list[int]](list), list[int]()
    for place in torch.randperm(len(dataset), generator=generator).tolist():
        group = groups[bisect(edges, ratio(dataset.dataset.path(dataset.indices[place])))]
        group.append(place)
        if len(group) == batch_size:
            chosen += group
            group.clear()
    return chosen
