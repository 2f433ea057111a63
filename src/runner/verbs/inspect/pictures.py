"""What the pictures of `inspect` show: tensors made into pixels and words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from runner.data.build import DataModule
from runner.instrument.no_trace import evaluating
from runner.models.features import Extractor
from runner.tracking.formats import compact, percent
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
from runner.verbs.inspect.errors import Mistakes
from runner.verbs.inspect.layers import is_picture, shape_text
from runner.verbs.inspect.statistics import Summary

_CHANNELS = 8
_ROWS = 4
_MOST_FILTERS = 64
_LONGEST = 60  # letters of a layer in the name of a file: four bytes each at most, and 255 are allowed
_RED, _GREEN = "#bb3344", "#228833"


def pixels_of(images: Tensor, splits: DataModule) -> list[Pixels]:
    """Images (B, C, H, W) as a model is given them, with the normalisation undone: (H, W) or (H, W, 3), from 0 to 1.

    Of images with another number of channels than 1 or 3 the first channel.
    """
    mean, std = (torch.tensor(values, dtype=torch.float32).view(1, -1, 1, 1) for values in (splits.mean, splits.std))
    plain = (images.detach().float().cpu() * std + mean).clamp(0, 1)
    if plain.shape[1] == 3:
        return list(plain.permute(0, 2, 3, 1).contiguous().numpy())
    return list(plain[:, 0].contiguous().numpy())


def words_of(targets: Tensor, classes: Sequence[str]) -> list[list[str]]:
    """A line or two for each target: the class, the two largest shares of a blended sample, or the number."""
    if targets.ndim == 2 and targets.shape[1] == len(classes) and classes:
        if not bool(((targets.float().sum(1) - 1).abs() < 1e-3).all()):  # labels, of which a sample has any number
            return [
                [f"{classes[place]}" + (f" {percent(row[place])}" if row[place] < 1 else "") for place in _largest(row)]
                or ["no label"]
                for row in targets.tolist()
            ]
        shares, places = targets.float().cpu().topk(min(2, targets.shape[1]), dim=1)
        return [
            [f"{percent(share)} {classes[place]}" for share, place in zip(some, where, strict=True) if share > 0]
            if some[0] < 1
            else [classes[where[0]]]
            for some, where in zip(shares.tolist(), places.tolist(), strict=True)
        ]
    if not targets.is_floating_point() and targets.ndim == 1 and classes:
        return [[classes[number]] for number in targets.tolist()]
    return [
        [", ".join(f"{value:.4g}" for value in row[:3])] for row in targets.float().reshape(len(targets), -1).tolist()
    ]


def _largest(row: Sequence[float]) -> list[int]:
    """The places of the two largest numbers of a row that are above 0."""
    return sorted((place for place, value in enumerate(row) if value > 0), key=lambda place: -row[place])[:2]


def draw_inputs(images: Tensor, targets: Tensor, splits: DataModule, target: Path) -> str:
    """Draw the first images of a batch as the model is given them, with their targets; returns a title."""
    count, channels = len(images), images.shape[1]
    first = "" if channels in (1, 3) else f", first of {channels} channels"
    what = "1 training sample" if count == 1 else f"{count} training samples"
    title = f"{what} as the model sees them, normalisation undone ({shape_text(images.shape[1:])}{first})"
    tiles = [
        Tile(pixels, lines)
        for pixels, lines in zip(pixels_of(images, splits), words_of(targets, splits.classes), strict=True)
    ]
    image_grid(tiles, target, title)
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
    drawn = min(count, _MOST_FILTERS if channels == 3 else max(1, _MOST_FILTERS // channels))
    if channels == 3:
        shown: Pixels = kernels[:drawn].permute(0, 2, 3, 1).contiguous().numpy()
        of = "each scaled to its own largest weight, grey is 0"
    elif channels == 1:
        shown, of = kernels[:drawn, 0].numpy(), "red is positive, blue is negative"
    else:
        shown = kernels[:drawn].flatten(0, 1)[:_MOST_FILTERS].numpy()
        which = f"the {channels}" if channels <= _MOST_FILTERS else f"{_MOST_FILTERS} of the {channels}"
        of = f"{which} input channels of each side by side, red is positive, blue is negative"
    some = f"{drawn} of " if drawn < count else ""
    title = f"weights of {name}: {some}{count} filters, {shape_text((channels, height, width))}; {of}"
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
    model: nn.Module, images: Tensor, targets: Tensor, names: Sequence[str], splits: DataModule, folder: Path
) -> list[tuple[Path, str]]:
    """Draw what layers make of a few images; returns files and titles. What is neither a map nor tokens of a grid is skipped."""
    images, targets = images[:_ROWS], targets[:_ROWS]
    with evaluating(model):
        found = Extractor(model, names, "tensors")(images)
    pixels, words = pixels_of(images, splits), words_of(targets, splits.classes)
    written: list[tuple[Path, str]] = []
    taken: set[str] = set()
    for name, features in found.items():
        maps = _as_maps(features.detach().float().cpu(), splits.image_size)
        if maps is None:
            continue
        channels = _liveliest(maps)
        title = f"{name}: {len(channels)} of {maps.shape[1]} channels that vary most, {shape_text(maps.shape[2:])}"
        rows = [
            Maps(image, lines[0], values[channels].numpy())
            for image, lines, values in zip(pixels, words, maps, strict=True)
        ]
        path = folder / f"features_{_file_name(name, taken)}.png"
        map_grid(rows, channels, path, title)
        written.append((path, title))
    return written


def _file_name(layer: str, taken: set[str]) -> str:
    """A layer's name as part of a file name; an untrusted file may have named the modules."""
    name = plain = re.sub(r"[^\w.-]", "_", layer)[:_LONGEST]
    number = 1
    while name.lower() in taken:
        number += 1
        name = f"{plain}_{number}"
    taken.add(name.lower())
    return name


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
    """Draw the histograms of tensors; where there are too many, those of vectors (biases, norms) are skipped."""
    larger = [summary for summary in summaries if len(summary.shape) > 1]
    if len(summaries) > MOST_PANELS and 0 < len(larger) < len(summaries):
        summaries, shown = larger, f"{title}, without vectors"
    else:
        shown = title
    panels = [Histogram(s.name, s.counts, s.low, s.high, marks.get(s.name, "")) for s in summaries]
    histograms(panels, quantity, target, shown, logarithmic=quantity != "weight")
    return title


def draw_errors(mistakes: Mistakes, classes: Sequence[str], splits: DataModule, target: Path) -> str:
    """Draw the samples that were most surely taken for another class; returns a title."""
    surest, wrong = mistakes.surest, compact(mistakes.wrong)
    title = f"{len(surest)} of {wrong} wrong predictions among {mistakes.samples:,} samples, the most confident first"
    words = [
        [f"is {classes[each.true]}", f"taken for {classes[each.predicted]}", f"at {percent(each.probability)}"]
        for each in surest
    ]
    pixels = pixels_of(torch.stack([each.image for each in surest]), splits)
    tiles = [Tile(image, lines, [_GREEN, _RED]) for image, lines in zip(pixels, words, strict=True)]
    image_grid(tiles, target, title)
    return title
