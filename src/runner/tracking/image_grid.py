"""Pictures of what a network is given, holds and computes, drawn without a display: images, filters, maps, histograms."""

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
"""Histograms in a picture."""

_TILE = 1.55  # inches
_CAPTION_LETTERS = 20
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
    """Draw images side by side, each with its text, into a picture at `target`.

    Args:
        tiles: at least one.
        target: where to write; the suffix decides the format.
        title: shown above.

    Raises:
        UserError: `target` cannot be written.
    """
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
            axes.annotate(
                _fit(line, _CAPTION_LETTERS),
                place,
                xycoords="axes fraction",
                ha="center",
                va="top",
                fontsize=7.5,
                color=colour,
                parse_math=False,
            )
    for axes in panels[len(tiles) :]:
        axes.set_axis_off()
    _title(figure, title, columns * _TILE)
    save_picture(figure, target)


def filter_grid(filters: Pixels, target: Path, title: str) -> None:
    """Draw the kernels of a layer side by side into a picture at `target`.

    Args:
        filters: (N, h, w) of any values, drawn on a scale of colours around 0; or (N, h, w, 3), colours, each kernel scaled to
            its own largest weight.
        target: where to write; the suffix decides the format.
        title: shown above.

    Raises:
        UserError: `target` cannot be written.
    """
    count, height, width = filters.shape[:3]
    columns = math.ceil(math.sqrt(count * height / width))
    rows = math.ceil(count / columns)
    gap = max(1, round(0.12 * max(height, width)))
    shape = (rows * (height + gap) - gap, columns * (width + gap) - gap)
    colour = filters.ndim == 4
    mosaic = np.full((*shape, 3) if colour else shape, 1.0 if colour else np.nan)
    for number, kernel in enumerate(filters):
        top, left = (number // columns) * (height + gap), (number % columns) * (width + gap)
        if colour:
            kernel = 0.5 + 0.5 * kernel / max(float(np.abs(kernel).max()), 1e-12)
        mosaic[top : top + height, left : left + width] = kernel
    side = min(8.0, max(3.0, 0.45 * columns))
    figure = new_figure(side + (0.0 if colour else 0.9), min(12.0, side * shape[0] / shape[1]) + 0.7)
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
    """An image, its text, and what a layer makes of it: (K, H, W)."""

    pixels: Pixels
    caption: str
    maps: Pixels


def map_grid(rows: Sequence[Maps], channels: Sequence[int], target: Path, title: str) -> None:
    """Draw feature maps of several images, an image a row, into a picture at `target`.

    Args:
        rows: at least one, with as many maps each as there are `channels`.
        channels: numbers of the channels, shown above the columns.
        target: where to write; the suffix decides the format.
        title: shown above.

    Raises:
        UserError: `target` cannot be written.
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
    """Draw histograms side by side into a picture at `target`; of many, some at even intervals.

    Args:
        panels: at least one.
        quantity: what the values are.
        target: where to write; the suffix decides the format.
        title: shown above.
        logarithmic: whether counts are on a logarithmic axis, where there are many.

    Raises:
        UserError: `target` cannot be written.
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
    """A text in so many letters; what is left out is at its end, or at its start."""
    text = " ".join(text.split())
    if len(text) <= letters:
        return text
    return "…" + text[1 - letters :] if keep_end else text[: letters - 1] + "…"
