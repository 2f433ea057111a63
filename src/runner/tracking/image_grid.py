"""Pictures of images, filters, feature maps and histograms, drawn without a display; see `runner.tracking.plots`."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from runner.tracking.plots import new_figure, save_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Pixels = np.ndarray[Any, Any]
"""An image: float (H, W) grey or (H, W, 3) colour, values 0 to 1; or one map (H, W) of any values."""

MOST_PANELS = 24
"""Histograms per picture."""

_TILE = 1.55  # inches
_CAPTION_LENGTH = 20
_COLUMNS = 8
_LOG_SCALE_FROM = 100  # elements in a bin
_GREY = "#777777"
_BLUE = "#4477aa"


@dataclass(frozen=True)
class Tile:
    """An image with the lines of text below it."""

    pixels: Pixels
    lines: Sequence[str]
    colours: Sequence[str] = ()


def image_grid(tiles: Sequence[Tile], target: Path, title: str) -> None:
    """Draw one or more images with their text side by side."""
    columns = min(_COLUMNS, max(min(4, len(tiles)), math.ceil(math.sqrt(len(tiles)))))
    rows = math.ceil(len(tiles) / columns)
    text = max(len(tile.lines) for tile in tiles)
    aspect = max(tile.pixels.shape[0] / tile.pixels.shape[1] for tile in tiles)
    figure = new_figure(columns * _TILE, rows * (_TILE * min(2.0, aspect) + 0.17 * text) + 0.5)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, tile in zip(panels, tiles, strict=False):
        _show(axes, tile.pixels)
        for number, line in enumerate(tile.lines):
            colour = tile.colours[number] if number < len(tile.colours) else "#222222"
            place = (0.5, -0.04 - 0.13 * number)
            style: dict[str, Any] = {"ha": "center", "va": "top", "fontsize": 7.5, "parse_math": False}
            axes.annotate(_fit(line, _CAPTION_LENGTH), place, xycoords="axes fraction", color=colour, **style)
    for axes in panels[len(tiles) :]:
        axes.set_axis_off()
    _title(figure, title, columns * _TILE)
    save_picture(figure, target)


def filter_grid(filters: Pixels, target: Path, title: str) -> None:
    """Draw the kernels of a layer side by side.

    Args:
        filters: (N, h, w), drawn on a colour scale around 0; or colours (N, h, w, 3), each kernel scaled to its largest weight.
        target: file to write.
        title: shown above.
    """
    count, height, width = filters.shape[:3]
    columns = math.ceil(math.sqrt(count * height / width))
    rows = math.ceil(count / columns)
    gap = max(1, round(0.12 * max(height, width)))
    colour = filters.ndim == 4
    if colour:
        filters = 0.5 + 0.5 * filters / np.abs(filters).max(axis=(1, 2, 3), keepdims=True).clip(1e-12)
    # Not torchvision's make_grid: it draws no gap around a single image, and this room does not import torch.
    tiles = np.full((rows * columns, height + gap, width + gap, *filters.shape[3:]), 1.0 if colour else np.nan)
    tiles[:count, :height, :width] = filters
    tiles = tiles.reshape(rows, columns, *tiles.shape[1:]).swapaxes(1, 2)
    mosaic = tiles.reshape(rows * (height + gap), columns * (width + gap), *filters.shape[3:])[:-gap, :-gap]
    side = min(8.0, max(3.0, 0.45 * columns))
    figure = new_figure(side + (0.0 if colour else 0.9), min(12.0, side * mosaic.shape[0] / mosaic.shape[1]) + 0.7)
    axes = figure.subplots()
    axes.set_axis_off()
    if colour:
        axes.imshow(mosaic, interpolation="nearest")
    else:
        largest = max(float(np.nanmax(np.abs(mosaic))), 1e-12)
        image = axes.imshow(mosaic, cmap="RdBu_r", vmin=-largest, vmax=largest, interpolation="nearest")
        bar = figure.colorbar(image, ax=axes, fraction=0.05, pad=0.03)
        bar.set_label("weight")
        bar.outline.set_visible(False)
    _title(figure, title, side)
    save_picture(figure, target)


@dataclass(frozen=True)
class Maps:
    """An image, its text, and its feature maps (K, H, W) in a layer."""

    pixels: Pixels
    caption: str
    maps: Pixels


def map_grid(rows: Sequence[Maps], channels: Sequence[int], target: Path, title: str) -> None:
    """Draw feature maps, one image per row.

    Args:
        rows: one or more, each with a map per channel.
        channels: numbers of the channels, shown above the columns.
        target: file to write.
        title: shown above.
    """
    size = 1.15
    columns = 1 + len(channels)
    figure = new_figure(columns * size + 0.9, len(rows) * (size + 0.2) + 0.7)
    panels = figure.subplots(len(rows), columns, squeeze=False)
    every = np.concatenate([row.maps.ravel() for row in rows])
    every = every[np.isfinite(every)]
    low, high = (float(every.min()), float(every.max())) if every.size else (0.0, 1.0)
    image = None
    for axes_of_row, row in zip(panels, rows, strict=True):
        _show(axes_of_row[0], row.pixels)
        axes_of_row[0].set_xlabel(_fit(row.caption, 16), fontsize=7.5, parse_math=False, labelpad=2)
        for axes, values in zip(axes_of_row[1:], row.maps, strict=True):
            image = axes.imshow(values, cmap="viridis", vmin=low, vmax=high, interpolation="nearest")
            _bare(axes)
    panels[0][0].set_title("input", fontsize=8)
    for axes, channel in zip(panels[0][1:], channels, strict=True):
        axes.set_title(f"channel {channel}", fontsize=8)
    if image is not None:
        bar = figure.colorbar(image, ax=panels, fraction=0.02, pad=0.02)
        bar.set_label("activation")
        bar.outline.set_visible(False)
    _title(figure, title, columns * size)
    save_picture(figure, target)


@dataclass(frozen=True)
class Histogram:
    """Counts in bins of equal width from `low` to `high`, with a name and a note."""

    name: str
    counts: Sequence[int]
    low: float
    high: float
    note: str = ""


def histograms(panels: Sequence[Histogram], quantity: str, target: Path, title: str, logarithmic: bool) -> None:
    """Draw histograms side by side; of more than `MOST_PANELS`, a selection at even intervals.

    Args:
        panels: one or more.
        quantity: label of the values.
        target: file to write.
        title: shown above.
        logarithmic: whether large counts have a logarithmic axis.
    """
    from matplotlib.ticker import MaxNLocator, NullFormatter

    chosen = panels
    if len(panels) > MOST_PANELS:
        places = np.linspace(0, len(panels) - 1, MOST_PANELS).round().astype(int)
        chosen = [panels[place] for place in places]
        title = f"{title} ({len(chosen)} of {len(panels)})"
    columns = min(4, len(chosen))
    rows = math.ceil(len(chosen) / columns)
    figure = new_figure(3.0 * columns, 2.1 * rows + 0.5)
    axes_list = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, panel in zip(axes_list, chosen, strict=False):
        if panel.counts:
            edges = np.linspace(panel.low, panel.high, len(panel.counts) + 1)
            axes.stairs(panel.counts, edges, fill=True, color=_BLUE)
            if logarithmic and max(panel.counts) >= _LOG_SCALE_FROM:
                axes.set_yscale("log")
                axes.set_ylim(bottom=0.7)
                axes.yaxis.set_minor_formatter(NullFormatter())
            else:
                axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        else:
            axes.text(0.5, 0.5, "nothing finite", ha="center", va="center", color=_GREY, transform=axes.transAxes)
        axes.set_title(_fit(panel.name, 34, keep_end=True), fontsize=8.5, parse_math=False)
        if panel.note:
            axes.text(
                0.98, 0.95, panel.note, ha="right", va="top", fontsize=7.5, color="#222222", transform=axes.transAxes
            )
        axes.tick_params(labelsize=7.5)
        axes.locator_params(axis="x", nbins=5)
        axes.ticklabel_format(axis="x", style="sci", scilimits=(-3, 4), useMathText=True)
        axes.xaxis.get_offset_text().set_fontsize(7.5)
        axes.spines[["top", "right"]].set_visible(False)
    for number, axes in enumerate(axes_list[: len(chosen)]):
        if number % columns == 0:
            axes.set_ylabel("elements", fontsize=8)
        if number + columns >= len(chosen):
            axes.set_xlabel(quantity, fontsize=8)
    for axes in axes_list[len(chosen) :]:
        axes.set_axis_off()
    _title(figure, title, 3.0 * columns)
    save_picture(figure, target)


def _show(axes: Axes, pixels: Pixels) -> None:
    grey: dict[str, Any] = {"cmap": "gray", "vmin": 0.0, "vmax": 1.0} if pixels.ndim == 2 else {}
    axes.imshow(pixels.clip(0.0, 1.0), interpolation="nearest", **grey)
    _bare(axes)


def _bare(axes: Axes) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_color("#bbbbbb")
        spine.set_linewidth(0.6)


def _title(figure: Any, title: str, width: float) -> None:
    letters = max(24, round(width * 72 / (10 * 0.55)))
    figure.suptitle("\n".join(textwrap.wrap(title, letters)), fontsize=10, parse_math=False)


def _fit(text: str, letters: int, keep_end: bool = False) -> str:
    """Shorten a text at its end, or at its start."""
    text = " ".join(text.split())
    if len(text) <= letters:
        return text
    return "…" + text[1 - letters :] if keep_end else text[: letters - 1] + "…"
