"""Pictures of images, filters, feature maps and histograms, drawn without a display; see `runner.tracking.plots`."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from runner.tracking.plots import BLUE, fit, new_figure, new_panels, save_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Pixels = np.ndarray[Any, Any]
"""An image: float (H, W) grey or (H, W, 3) colour, values 0 to 1; or one map (H, W) of any values."""

MOST_PANELS = 24
"""Histograms per picture."""

_TILE, _MAP, _HISTOGRAM = 1.55, 1.15, 3.0  # widths in inches
_LOG_SCALE_FROM = 100  # elements in a bin
_SMALL: dict[str, Any] = {"fontsize": 7.5, "parse_math": False}


class Tile(NamedTuple):
    """An image with the lines of text below it."""

    pixels: Pixels
    lines: Sequence[str]
    colours: Sequence[str] = ()


def image_grid(tiles: Sequence[Tile], target: Path, title: str) -> None:
    """Draw one or more images with their text side by side."""
    columns = min(8, max(min(4, len(tiles)), math.ceil(math.sqrt(len(tiles)))))
    text = max(len(tile.lines) for tile in tiles)
    aspect = max(tile.pixels.shape[0] / tile.pixels.shape[1] for tile in tiles)
    height = _TILE * min(2.0, aspect) + 0.17 * text
    figure, panels = new_panels(len(tiles), columns, _TILE, height, more=0.5)
    for axes, tile in zip(panels, tiles, strict=True):
        _show(axes, tile.pixels)
        colours = [*tile.colours, *["#222222"] * len(tile.lines)]
        for number, line in enumerate(tile.lines):
            place = (0.5, -0.04 - 0.13 * number)
            style = _SMALL | {"ha": "center", "va": "top", "color": colours[number]}
            axes.annotate(fit(line, 20), place, xycoords="axes fraction", **style)
    _save(figure, target, title, columns * _TILE)


def filter_grid(filters: Pixels, target: Path, title: str) -> None:
    """Draw the kernels of a layer side by side.

    Those of shape (N, h, w) are drawn on a colour scale around 0; (N, h, w, 3) as colours, each scaled to its largest weight.
    """
    import torch
    from torchvision.utils import make_grid

    count, height, width = filters.shape[:3]
    columns = math.ceil(math.sqrt(count * height / width))
    gap = max(1, round(0.12 * max(height, width)))
    colour = filters.ndim == 4
    if colour:
        filters = 0.5 + 0.5 * filters / np.abs(filters).max(axis=(1, 2, 3), keepdims=True).clip(1e-12)
    images = torch.from_numpy(filters if colour else filters[..., None]).permute(0, 3, 1, 2)
    grid = make_grid(images, columns, gap, pad_value=1.0 if colour else math.nan).numpy()
    mosaic = grid.transpose(1, 2, 0) if colour else grid[0]
    side = min(8.0, max(3.0, 0.45 * columns))
    figure = new_figure(side + (0.0 if colour else 0.9), min(12.0, side * mosaic.shape[0] / mosaic.shape[1]) + 0.7)
    axes = figure.subplots()
    axes.set_axis_off()
    largest = max(float(np.nanmax(np.abs(mosaic))), 1e-12)
    image = axes.imshow(mosaic, cmap="RdBu_r", vmin=-largest, vmax=largest, interpolation="nearest")
    if not colour:
        _colorbar(figure, image, axes, "weight", 0.05)
    _save(figure, target, title, side)


class Maps(NamedTuple):
    """An image, its text, and its feature maps (K, H, W) in a layer."""

    pixels: Pixels
    caption: str
    maps: Pixels


def map_grid(rows: Sequence[Maps], channels: Sequence[int], target: Path, title: str) -> None:
    """Draw feature maps, one image per row, each with a map per channel."""
    columns = 1 + len(channels)
    figure = new_figure(columns * _MAP + 0.9, len(rows) * (_MAP + 0.2) + 0.7)
    panels = figure.subplots(len(rows), columns, squeeze=False)
    every = np.concatenate([row.maps.ravel() for row in rows])
    every = every[np.isfinite(every)]
    low, high = (float(every.min()), float(every.max())) if every.size else (0.0, 1.0)
    image = None
    for (first, *others), row in zip(panels, rows, strict=True):
        _show(first, row.pixels)
        first.set_xlabel(fit(row.caption, 16), labelpad=2, **_SMALL)
        for axes, values in zip(others, row.maps, strict=True):
            image = axes.imshow(values, cmap="viridis", vmin=low, vmax=high, interpolation="nearest")
            _bare(axes)
    for axes, text in zip(panels[0], ["input", *(f"channel {channel}" for channel in channels)], strict=True):
        axes.set_title(text, fontsize=8)
    if image is not None:
        _colorbar(figure, image, panels, "activation", 0.02)
    _save(figure, target, title, columns * _MAP)


class Histogram(NamedTuple):
    """Counts in bins of equal width from `low` to `high`, with a name and a note."""

    name: str
    counts: Sequence[int]
    low: float
    high: float
    note: str = ""


def histograms(panels: Sequence[Histogram], quantity: str, target: Path, title: str, logarithmic: bool) -> None:
    """Draw histograms of a quantity side by side; of more than `MOST_PANELS`, a selection at even intervals.

    `logarithmic` gives large counts a logarithmic axis.
    """
    from matplotlib.ticker import MaxNLocator, NullFormatter

    chosen = panels
    if len(panels) > MOST_PANELS:
        chosen = [panels[place] for place in np.linspace(0, len(panels) - 1, MOST_PANELS).round().astype(int)]
        title = f"{title} ({len(chosen)} of {len(panels)})"
    columns = min(4, len(chosen))
    figure, all_axes = new_panels(len(chosen), columns, _HISTOGRAM, 2.1, more=0.5)
    for number, (axes, panel) in enumerate(zip(all_axes, chosen, strict=True)):
        corner: dict[str, Any] = {"transform": axes.transAxes, "fontsize": 7.5}
        if panel.counts:
            axes.stairs(panel.counts, np.linspace(panel.low, panel.high, len(panel.counts) + 1), fill=True, color=BLUE)
            if logarithmic and max(panel.counts) >= _LOG_SCALE_FROM:
                axes.set_yscale("log")
                axes.set_ylim(bottom=0.7)
                axes.yaxis.set_minor_formatter(NullFormatter())
            else:
                axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        else:
            axes.text(0.5, 0.5, "nothing finite", ha="center", va="center", color="#777777", **corner)
        axes.set_title(fit(panel.name, 34, keep_end=True), fontsize=8.5, parse_math=False)
        axes.text(0.98, 0.95, panel.note, ha="right", va="top", color="#222222", **corner)
        axes.tick_params(labelsize=7.5)
        axes.locator_params(axis="x", nbins=5)
        axes.ticklabel_format(axis="x", style="sci", scilimits=(-3, 4), useMathText=True)
        axes.xaxis.get_offset_text().set_fontsize(7.5)
        axes.spines[["top", "right"]].set_visible(False)
        if number % columns == 0:
            axes.set_ylabel("elements", fontsize=8)
        if number + columns >= len(chosen):
            axes.set_xlabel(quantity, fontsize=8)
    _save(figure, target, title, _HISTOGRAM * columns)


def _show(axes: Axes, pixels: Pixels) -> None:
    axes.imshow(pixels.clip(0.0, 1.0), interpolation="nearest", cmap="gray", vmin=0.0, vmax=1.0)
    _bare(axes)


def _bare(axes: Axes) -> None:
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(color="#bbbbbb", linewidth=0.6)


def _colorbar(figure: Figure, image: Any, axes: Any, quantity: str, fraction: float) -> None:
    bar = figure.colorbar(image, ax=axes, fraction=fraction, pad=0.02)
    bar.set_label(quantity)
    bar.outline.set_visible(False)


def _save(figure: Figure, target: Path, title: str, width: float) -> None:
    letters = max(24, round(width * 72 / (10 * 0.55)))
    figure.suptitle("\n".join(textwrap.wrap(title, letters)), fontsize=10, parse_math=False)
    save_picture(figure, target)
