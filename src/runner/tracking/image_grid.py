"""Images side by side with their text, drawn without a display; see `runner.tracking.plots`."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from runner.tracking.plots import fit, new_panels, save_picture

Pixels = np.ndarray[Any, Any]
"""An image: float (H, W) grey or (H, W, 3) colour, values 0 to 1."""

_TILE = 1.55  # width in inches


class Tile(NamedTuple):
    """An image with the lines of text below it."""

    pixels: Pixels
    lines: Sequence[str]
    colours: Sequence[str] = ()


def image_grid(tiles: Sequence[Tile], target: Path, title: str, columns: int | None = None) -> None:
    """Draw one or more images with their text side by side, in so many columns, or at most 8."""
    columns = columns or min(8, max(min(4, len(tiles)), math.ceil(math.sqrt(len(tiles)))))
    text = max(len(tile.lines) for tile in tiles)
    aspect = max(tile.pixels.shape[0] / tile.pixels.shape[1] for tile in tiles)
    height = _TILE * min(2.0, aspect) + 0.17 * text
    figure, panels = new_panels(len(tiles), columns, _TILE, height, more=0.5)
    for axes, tile in zip(panels, tiles, strict=True):
        axes.imshow(tile.pixels.clip(0.0, 1.0), interpolation="nearest", cmap="gray", vmin=0.0, vmax=1.0)
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set(color="#bbbbbb", linewidth=0.6)
        colours = [*tile.colours, *["#222222"] * len(tile.lines)]
        for number, line in enumerate(tile.lines):
            place = (0.5, -0.04 - 0.13 * number)
            style: dict[str, Any] = {"ha": "center", "va": "top", "color": colours[number], "fontsize": 7.5}
            axes.annotate(fit(line, 20), place, xycoords="axes fraction", parse_math=False, **style)
    letters = max(24, round(columns * _TILE * 72 / (10 * 0.55)))
    figure.suptitle("\n".join(textwrap.wrap(title, letters)), fontsize=10, parse_math=False)
    save_picture(figure, target)
