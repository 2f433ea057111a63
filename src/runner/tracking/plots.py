"""Pictures of a run, drawn without a display: learning curves, confusion matrix, bars, range tests and grids of images.

The suffix of `target` selects the format (`.png`, `.svg`, `.pdf`); a target that cannot be written raises `UserError`.
"""

from __future__ import annotations

import importlib.util
import io
import itertools
import math
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from runner.base.files import write_atomically
from runner.tracking.formats import HARDWARE_METRICS, WEIGHTS_STEP, compact, in_order, label, percent
from runner.tracking.run_files import read_records

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

BLUE, _RED, _GREEN, _PURPLE = "#4477aa", "#ee6677", "#228833", "#aa3377"
_COLOURS = {"train": BLUE, "val": _RED, "test": _GREEN}
_MORE_COLOURS = (_PURPLE, "#ccbb44", "#66ccee", "#777777")
_NOT_METRICS = {"global_step", "epoch", "split", WEIGHTS_STEP, *HARDWARE_METRICS}
_MOST_PANELS = 24
_LARGEST = 1e300  # larger values leave an axis without ticks, and integers in a file may not fit a float
_SMOOTHED_FROM = 200
_LOG_SCALE_FROM = 50.0
_NUMBERS_UP_TO = 25
_DPI = 130
_TILE = 1.55  # width of an image in a grid, in inches

Curve = tuple[list[int], list[float]]
Pixels: TypeAlias = "np.ndarray[Any, Any]"
"""An image: (H, W) grey or (H, W, 3) colour, uint8, or float with values 0 to 1."""


def learning_curves(metrics_file: Path, target: Path) -> None:
    """Draw every metric of `metrics.jsonl` except `HARDWARE_METRICS` over the optimizer steps, one panel for all splits.

    Missing values leave gaps. A test is drawn at the step of the weights that were tested.
    """
    curves: dict[str, dict[str, Curve]] = {}
    for record in read_records(metrics_file):
        for name, value in record.items():
            if name not in _NOT_METRICS and (value is None or isinstance(value, int | float)):
                steps, values = curves.setdefault(name, {}).setdefault(str(record.get("split", "")), ([], []))
                # Of a test, where the weights that were tested come from.
                step = record.get(WEIGHTS_STEP)
                steps.append(int(step) if isinstance(step, int | float) else record["global_step"])
                values.append(math.nan if value is None or abs(value) > _LARGEST else float(value))
    # A page with hundreds of panels would be unreadable
    names = in_order(curves)[:_MOST_PANELS]
    others = dict.fromkeys(split for name in names for split in curves[name] if split not in _COLOURS)
    colours = _COLOURS | dict(zip(others, itertools.cycle(_MORE_COLOURS), strict=False))
    columns = min(3, max(1, len(names)))
    rows = max(1, math.ceil(len(names) / columns))
    # These margins fit numbers and a label beside each axes; finding the smallest ones takes longer than drawing
    size, space = (5.0 * columns, 3.4 * rows), {"wspace": 1.05 / 3.95, "hspace": 0.9 / 2.5}
    figure = _figure(*size, fixed=True)
    figure.subplots_adjust(0.85 / size[0], 0.6 / size[1], 1 - 0.2 / size[0], 1 - 0.3 / size[1], **space)
    panels = [figure.add_subplot(rows, columns, place + 1) for place in range(max(1, len(names)))]
    for axes, name in zip(panels, names, strict=False):
        _draw_metric(axes, name, curves[name], colours)
    if not names:
        panels[0].text(0.5, 0.5, "no metrics have been logged", ha="center", va="center", color="#555555")
        panels[0].set_axis_off()
    _save(figure, target, fixed=True)


def confusion_matrix(matrix: list[list[int]], classes: list[str], target: Path, title: str) -> None:
    """Draw counts, `matrix[true][predicted]`, of classes with these names, or numbers if there are none."""
    import numpy as np
    from matplotlib.colors import PowerNorm

    count = len(matrix)
    names = [fit(name, 24) for name in classes] or [str(index) for index in range(count)]
    counts = np.array(matrix)
    # Shares of each row, as classes of different size could not be compared by counts
    shares = counts / counts.sum(axis=1, keepdims=True).clip(1)
    side = max(3.0, 0.5 * count) if count <= _NUMBERS_UP_TO else min(16.0, max(8.0, 0.16 * count))
    margin = 0.09 * max(len(name) for name in names)
    figure = _figure(side + margin + 2.0, side + margin + 1.0)
    axes = figure.subplots()
    # The square root makes rare confusions visible beside a diagonal of nearly one.
    norm = PowerNorm(0.5, vmin=0.0, vmax=1.0)
    image = axes.imshow(shares, cmap="Blues", norm=norm, interpolation="nearest")
    heading = min(18.0, 9.0 + 0.6 * side)
    ticks = [0, 0.01, 0.05, 0.2, 0.5, 1]
    bar = figure.colorbar(image, ax=axes, fraction=0.06, aspect=5.0 * side, ticks=ticks, format=lambda x, _: f"{x:.0%}")
    bar.set_label("share of the true class", fontsize=0.85 * heading)
    bar.outline.set_visible(False)
    shown = range(0, count, math.ceil(count / 100))
    size = min(10.0, 60.0 * side / len(shown))
    labels = [names[index] for index in shown]
    # Names are vertical if two neighbours would touch.
    upright = max(map(len, labels)) * 0.62 * size > 72.0 * side / len(shown)
    axes.set_xticks(shown, labels, fontsize=size, rotation=90 if upright else 0, parse_math=False)
    axes.set_yticks(shown, labels, fontsize=size, parse_math=False)
    axes.tick_params(length=0)
    axes.set_xlabel("predicted class", fontsize=0.85 * heading)
    axes.set_ylabel("true class", fontsize=0.85 * heading)
    lines = textwrap.wrap(title, round(1.8 * 72.0 * side / heading))
    axes.set_title("\n".join(lines), fontsize=heading, parse_math=False)
    axes.spines[:].set_color("#bbbbbb")
    # Numbers in the cells of a large matrix could not be read
    if count <= _NUMBERS_UP_TO:
        texts = {place: str(n) if n < 100_000 else compact(float(n)) for place, n in np.ndenumerate(counts)}
        size = min(11.0, 72.0 * side / count * 0.85 / (0.62 * max(2, *map(len, texts.values()))))
        for (row, column), text in texts.items():
            colour = "white" if shares[row, column] > 0.35 else "#222222" if counts[row, column] else "#bbbbbb"
            axes.text(column, row, text, ha="center", va="center", fontsize=size, color=colour)
    _save(figure, target)


def bars(
    names: Sequence[str],
    values: Sequence[tuple[float, float, float]],
    reference: float,
    quantity: str,
    target: Path,
    *,
    title: str,
) -> None:
    """Draw measurements from top to bottom, each (median, low, high) as a bar with its spread; a dashed line marks `reference`."""
    import numpy as np

    figure = _figure(8.0, 1.2 + 0.34 * len(names))
    axes = figure.subplots()
    middle, low, high = np.array(values).T
    spread = np.maximum(0.0, [middle - low, high - middle])
    colours = [_GREEN if value > reference else BLUE for value in middle]
    axes.barh(range(len(names)), middle, xerr=spread, color=colours, height=0.65, capsize=3, ecolor="#333333")
    axes.axvline(reference, color="#555555", linewidth=0.9, linestyle="--")
    axes.set_yticks(range(len(names)), list(names), fontsize=9, parse_math=False)
    axes.invert_yaxis()
    axes.ticklabel_format(axis="x", style="sci", scilimits=(-3, 5), useMathText=True)
    axes.set_xlabel(quantity)
    axes.set_title(title, parse_math=False)
    _plain(axes, "x")
    _save(figure, target)


def rate_curve(
    rates: Sequence[float],
    losses: Sequence[float],
    smoothed: Sequence[float],
    marks: Mapping[str, float],
    *,
    target: Path,
    title: str,
) -> None:
    """Draw the losses of a learning-rate range test and their running mean over the rates, and `marks`, rates by label."""
    figure = _figure(8.0, 4.6)
    axes = figure.subplots()
    axes.plot(rates, losses, color=BLUE, alpha=0.35, linewidth=0.9, label="loss of a step")
    axes.plot(rates, smoothed, color=BLUE, linewidth=1.8, label="running mean")
    # Different lengths and dashes, because marks may coincide.
    looks = itertools.cycle([(_PURPLE, "-.", 0.75), (_GREEN, "-", 0.9), (_RED, ":", 1.0)])
    for (name, rate), (colour, dashes, height) in zip(marks.items(), looks, strict=False):
        axes.axvline(rate, ymax=height, color=colour, linewidth=1.5, linestyle=dashes, label=f"{name}: {rate:.2g}")
    # Limited, because a diverging loss would press everything else onto one line.
    low, high = min(losses), max(smoothed[0], min(smoothed))
    limits = low - 0.05 * (high - low), high + 0.5 * (high - low)
    axes.set(xscale="log", ylim=limits, xlabel="learning rate (optimizer.lr, log scale)", ylabel="training loss")
    axes.set_title(title, parse_math=False)
    _plain(axes)
    axes.legend(frameon=True, framealpha=0.9, edgecolor="none", fontsize=9, loc="lower left")
    _save(figure, target)


def _plain(axes: Axes, grid: Literal["both", "x"] = "both") -> None:
    axes.grid(axis=grid, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_metric(axes: Axes, name: str, by_split: dict[str, Curve], colours: dict[str, str]) -> None:
    from matplotlib.ticker import MaxNLocator

    for split, (steps, values) in by_split.items():
        line: dict[str, Any] = {"color": colours[split], "linewidth": 1.6, "label": split}
        # The loss of single batches is noisy, so its running mean is drawn over it
        if split == "train" and len(steps) >= _SMOOTHED_FROM and name != "lr":
            axes.plot(steps, values, color=colours[split], alpha=0.25, linewidth=0.8)
            axes.plot(steps, _smooth(values), **line | {"label": f"{split}, running mean"})
        else:
            axes.plot(steps, values, **line, marker="o" if len(steps) <= 40 else None, markersize=3.5)
    values = [value for _, series in by_split.values() for value in series if math.isfinite(value)]
    # A loss that falls over orders of magnitude shows nothing on a linear axis
    if name == "loss" and values and min(values) > 0 and max(values) / min(values) >= _LOG_SCALE_FROM:
        axes.set_yscale("log")
    else:
        # No mathematical text, which takes half of the time of drawing
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 5))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=6))
    if name.endswith("_per_s"):
        # From zero, so that a change of one percent does not look like a collapse.
        axes.set_ylim(0.0, 1.1 * max([value for value in values if value > 0], default=1.0))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.xaxis.set_major_formatter(lambda step, _: f"{step / 1000:g}k" if step >= 10_000 else f"{step:g}")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(label(name), parse_math=False)
    _plain(axes)
    if any(by_split):
        axes.legend(frameon=True, framealpha=0.8, edgecolor="none", fontsize=9)


def _smooth(values: Sequence[float]) -> Any:
    """Mean over a centred window of a twenty-fifth of the curve, without NaN."""
    import numpy as np

    known, window = np.isfinite(values), np.ones(2 * max(1, len(values) // 50) + 1)
    sums = np.convolve(np.where(known, values, 0.0), window, "same")
    return np.where(known, sums / np.convolve(known, window, "same").clip(1), np.nan)


def fit(text: str, letters: int) -> str:
    """Shorten a text at its end."""
    text = " ".join(text.encode("utf-8", "backslashreplace").decode().split())  # names of folders may have other bytes
    return text if len(text) <= letters else text[: letters - 1] + "…"


def _figure(width: float, height: float, fixed: bool = False) -> Figure:
    """An empty figure, width and height in inches; `fixed` leaves its layout to the caller."""
    # Not pyplot, which would look for a display and change the backend.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=_DPI, layout=None if fixed else "compressed")


class Tile(NamedTuple):
    """An image with the lines of text below it."""

    pixels: Pixels
    lines: Sequence[str]
    colours: Sequence[str] = ()


def image_grid(
    tiles: Sequence[Tile], target: Path | io.BytesIO, title: str, columns: int | None = None, legend: Sequence[Any] = ()
) -> None:
    """Draw one or more images with their text side by side, in so many columns, or at most 8, as PNG.

    `legend` has pairs of a name and a colour, red, green and blue from 0 to 255. PIL draws this in a tenth of matplotlib's time.
    A buffer as `target` gets images that are not reduced.
    """
    import numpy as np
    from PIL import Image, ImageDraw, ImageFont

    columns = columns or min(8, max(min(4, len(tiles)), math.ceil(math.sqrt(len(tiles)))))
    columns = min(columns, len(tiles))
    side, line, gap = round(_TILE * _DPI), round(0.17 * _DPI), round(0.08 * _DPI)
    if isinstance(target, io.BytesIO):
        side = max(side, *(tile.pixels.shape[1] for tile in tiles))
    # The font of matplotlib, which has more scripts than that of PIL; it is not imported
    folder = importlib.util.find_spec("matplotlib").submodule_search_locations[0]  # type: ignore[index, union-attr]
    font = ImageFont.truetype(f"{folder}/mpl-data/fonts/ttf/DejaVuSans.ttf", 0.7 * line)
    titles = textwrap.wrap(title, max(24, round(columns * side / _DPI * 72 / (10 * 0.55))))
    top = gap + line * (len(titles) + math.ceil(len(legend) / columns)) + gap
    high = math.ceil(side * min(2.0, max(tile.pixels.shape[0] / tile.pixels.shape[1] for tile in tiles)))
    row, column = high + line * max(len(tile.lines) for tile in tiles) + 2 * gap, side + gap
    page = Image.new("RGB", (columns * column + gap, top + math.ceil(len(tiles) / columns) * row), "white")
    pen = ImageDraw.Draw(page)
    for number, text in enumerate(titles):
        pen.text((page.width / 2, gap + number * line), text, "black", font, "ma")
    for place, (name, filling) in enumerate(legend, columns * len(titles)):
        left, above = gap + place % columns * column, gap + place // columns * line
        pen.rectangle((left, above, left + line - gap // 2, above + line - gap // 2), filling)
        pen.text((left + 1.3 * line, above), fit(name, 18), "black", font)
    for place, tile in enumerate(tiles):
        left, above = gap + place % columns * column, top + place // columns * row
        whole = tile.pixels if tile.pixels.dtype == np.uint8 else np.nan_to_num(tile.pixels).clip(0.0, 1.0) * 255
        image = Image.fromarray(whole.round().astype(np.uint8)).convert("RGB")
        scale = min(side / image.width, high / image.height)
        size = max(1, round(scale * image.width)), max(1, round(scale * image.height))
        image = image.resize(size, Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS)
        page.paste(image, (left + (side - image.width) // 2, above + high - image.height))
        for number, (text, colour) in enumerate(zip(tile.lines, [*tile.colours, *["#222222"] * 9], strict=False)):
            pen.text((left + side / 2, above + high + number * line), fit(text, 20), colour, font, "ma")
    buffer = target if isinstance(target, io.BytesIO) else io.BytesIO()
    page.save(buffer, "png", compress_level=1)
    if isinstance(target, Path):
        write_atomically(target, buffer.getvalue())


def prepare_images() -> None:
    """Import what `image_grid` uses: a process that is forked while a thread imports waits for it if it imports the same."""
    from PIL import Image, ImageDraw, ImageFont  # noqa: F401

    Image.preinit()


def caption_of(target: Tensor, classes: Sequence[str]) -> list[str]:
    """Lines for a target on the CPU: its class, its two largest classes with their shares, or its first numbers."""
    if target.ndim == 0 and not target.is_floating_point() and classes:
        return [classes[int(target.numpy())]]
    values = target.float().flatten().numpy().tolist()
    if not classes or target.shape != (len(classes),):
        return [", ".join(f"{value:.4g}" for value in values[:3])]
    largest = sorted(zip(values, classes, strict=True), key=lambda pair: -pair[0])[:2]
    return [name if share >= 1 else f"{percent(share)} {name}" for share, name in largest if share > 0] or ["no label"]


def _save(figure: Figure, target: Path, fixed: bool = False) -> None:
    """Write a figure atomically, in the format of the suffix, or PNG without one; `fixed` does not trim its edges."""
    kind = target.suffix.lstrip(".") or "png"
    look: dict[str, Any] = {} if fixed else {"bbox_inches": "tight", "pad_inches": 0.15}
    if fixed and kind == "png":
        look["pil_kwargs"] = {"compress_level": 1}  # a fifth of the time, and a few kB
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # Names of classes may be in any script; a box instead of a letter is better than no picture.
        warnings.filterwarnings("ignore", message=r"Glyph \d+ .*missing from", category=UserWarning)
        figure.savefig(buffer, format=kind, facecolor="white", **look)
    write_atomically(target, buffer.getvalue())
