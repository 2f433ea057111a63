"""The pictures of `inspect`: tensors made into pixels and captions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from runner.data.loaders import Batch
from runner.data.module import DataModule
from runner.instrument.no_trace import evaluating
from runner.lab.inspect.layers import is_picture, shape_text
from runner.lab.inspect.statistics import Summary
from runner.models.features import Extractor
from runner.tracking.formats import percent
from runner.tracking.image_grid import (
    MOST_PANELS,
    Histogram,
    Maps,
    Pixels,
    Tile,
    filter_grid,
    histograms,
    image_grid,
    map_grid,
)

_CHANNELS = 8
_ROWS = 4
_MOST_FILTERS = 64
_LONGEST = 60  # letters of a layer in the name of a file: four bytes each at most, and 255 are allowed
_RED, _GREEN = "#bb3344", "#228833"


@dataclass(frozen=True)
class Mistake:
    """A sample whose largest logit is not that of its class."""

    probability: float  # softmax of that logit
    index: int  # of the sample in its data set
    true: int  # its class
    predicted: int  # the class that it was taken for
    image: Tensor  # (C, H, W), as the model was given it, on the CPU


def pixels_of(images: Tensor, splits: DataModule) -> list[Pixels]:
    """Images (B, C, H, W) as a model is given them, with the normalisation undone: (H, W) or (H, W, 3), from 0 to 1.

    Of images with another number of channels than 1 or 3 the first channel.
    """
    mean, std = (torch.tensor(values, dtype=torch.float32).view(1, -1, 1, 1) for values in (splits.mean, splits.std))
    plain = (images.detach().float().cpu() * std + mean).clamp(0, 1)
    if plain.shape[1] == 3:
        return list(plain.permute(0, 2, 3, 1).contiguous().numpy())
    return list(plain[:, 0].contiguous().numpy())


def captions_of(targets: Tensor, classes: Sequence[str]) -> list[list[str]]:
    """A line or two for each target: its class, its two largest classes with their shares, or its numbers."""
    if targets.ndim == 1 and not targets.is_floating_point() and classes:
        return [[classes[number]] for number in targets.tolist()]
    rows = targets.float().reshape(len(targets), -1).tolist()
    if not classes or targets.shape[1:] != (len(classes),):
        return [[", ".join(f"{value:.4g}" for value in row[:3])] for row in rows]
    captions = []
    for row in rows:
        largest = sorted(range(len(row)), key=lambda place: -row[place])[:2]
        lines = [f"{percent(row[at])} {classes[at]}" if row[at] < 1 else classes[at] for at in largest if row[at] > 0]
        captions.append(lines or ["no label"])
    return captions


def draw_inputs(images: Tensor, targets: Tensor, splits: DataModule, target: Path) -> str:
    """Draw the first images of a batch as the model is given them, with their targets; returns a title."""
    count, channels = len(images), images.shape[1]
    first = "" if channels in (1, 3) else f", first of {channels} channels"
    what = "1 training sample" if count == 1 else f"{count} training samples"
    title = f"{what} as the model sees them, normalisation undone ({shape_text(images.shape[1:])}{first})"
    captions = captions_of(targets, splits.classes)
    image_grid(list(map(Tile, pixels_of(images, splits), captions)), target, title)
    return title


def draw_filters(model: nn.Module, splits: DataModule, target: Path) -> str:
    """Draw the kernels of the layer that sees the image; returns a title, empty if no layer's kernels can be drawn."""
    found = _first_kernels(model, (splits.channels, *splits.image_size))
    if found is None:
        return ""
    name, kernels = found
    count, channels, height, width = kernels.shape
    if height * width == 1:
        return ""
    drawn = min(count, _MOST_FILTERS)
    if channels == 3:
        shown: Pixels = kernels[:drawn].permute(0, 2, 3, 1).contiguous().numpy()
        scale = "each scaled to its own largest weight, grey is 0"
    else:
        shown = kernels[:drawn, 0].numpy()
        scale = "red is positive, blue is negative"
    first = "" if channels in (1, 3) else f", first of {channels} channels"
    some = f"{drawn} of " if drawn < count else ""
    title = f"weights of {name}: {some}{count} filters, {shape_text((channels, height, width))}{first}; {scale}"
    filter_grid(shown, target, title)
    return title


def _first_kernels(model: nn.Module, image: tuple[int, int, int]) -> tuple[str, Tensor] | None:
    """The first layer's weights as (N, C, h, w): of a convolution, or of a linear layer that takes whole images."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            return name, module.weight.detach().float().cpu()
        if isinstance(module, nn.Linear):
            weight = module.weight.detach().float().cpu()
            return (name, weight.view(-1, *image)) if weight.shape[1] == int(np.prod(image)) else None
    return None


def draw_maps(
    model: nn.Module, batch: Batch, names: Sequence[str], splits: DataModule, folder: Path
) -> list[tuple[Path, str]]:
    """Draw what layers make of a few images; returns files and titles. What is neither a map nor tokens of a grid is skipped."""
    images, targets = batch.images[:_ROWS], batch.targets[:_ROWS]
    with evaluating(model):
        found = Extractor(model, names, "tensors")(images)
    pixels, captions = pixels_of(images, splits), captions_of(targets, splits.classes)
    written: list[tuple[Path, str]] = []
    for name, features in found.items():
        maps = _as_maps(features.detach().float().cpu(), splits.image_size)
        if maps is None:
            continue
        channels = _liveliest(maps)
        title = f"{name}: {len(channels)} of {maps.shape[1]} channels that vary most, {shape_text(maps.shape[2:])}"
        rows = [
            Maps(image, lines[0], values[channels].numpy())
            for image, lines, values in zip(pixels, captions, maps, strict=True)
        ]
        # An untrusted file may have named the modules, and a name must not lead to another folder.
        plain = re.sub(r"[^\w.-]", "_", name)[:_LONGEST]
        path = folder / f"features_{plain}.png"
        map_grid(rows, channels, path, title)
        written.append((path, title))
    return written


def _as_maps(features: Tensor, image_size: tuple[int, int]) -> Tensor | None:
    """(B, C, H, W) of features of that shape, or of tokens (B, N, C) that lie on a grid, without a class token."""
    if is_picture(features.shape[1:]):
        return features
    if features.ndim != 3:
        return None
    height, width = image_size
    for extra in (0, 1):
        count = features.shape[1] - extra
        rows = round((count * height / width) ** 0.5)
        if rows > 1 and count % rows == 0 and abs(count // rows * height - rows * width) < width:
            return features[:, extra:].transpose(1, 2).reshape(len(features), -1, rows, count // rows)
    return None


def _liveliest(maps: Tensor) -> list[int]:
    """The channels with the largest deviation, by number."""
    spread = maps.transpose(0, 1).flatten(1).nan_to_num().std(dim=1, correction=0)
    chosen: list[int] = spread.topk(min(_CHANNELS, len(spread))).indices.sort().values.tolist()
    return chosen


def draw_histograms(
    summaries: Sequence[Summary], marks: Mapping[str, str], quantity: str, title: str, target: Path
) -> str:
    """Draw the histograms of tensors, of too many without those of vectors (biases, norms); returns a title."""
    larger = [summary for summary in summaries if len(summary.shape) > 1]
    if len(summaries) > MOST_PANELS and 0 < len(larger) < len(summaries):
        summaries, title = larger, f"{title}, without vectors"
    panels = [Histogram(s.name, s.counts, s.low, s.high, marks.get(s.name, "")) for s in summaries]
    histograms(panels, quantity, target, title, logarithmic=quantity != "weight")
    return title


def draw_errors(
    mistakes: Sequence[Mistake], title: str, classes: Sequence[str], splits: DataModule, target: Path
) -> str:
    """Draw samples that were taken for another class; returns the title."""
    pixels = pixels_of(torch.stack([each.image for each in mistakes]), splits)
    tiles = []
    for image, each in zip(pixels, mistakes, strict=True):
        lines = [f"is {classes[each.true]}", f"taken for {classes[each.predicted]}", f"at {percent(each.probability)}"]
        tiles.append(Tile(image, lines, [_GREEN, _RED]))
    image_grid(tiles, target, title)
    return title
