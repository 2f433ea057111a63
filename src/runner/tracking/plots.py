"""Pictures of a run, drawn without a display: learning curves, confusion matrix, bars and range tests.

The suffix of `target` selects the format (`.png`, `.svg`, `.pdf`); a target that cannot be written raises `UserError`.
"""

from __future__ import annotations

import io
import itertools
import math
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from runner.tracking.files import write_atomically
from runner.tracking.formats import HARDWARE_METRICS, compact, in_order, label
from runner.tracking.jsonl import read_records

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NOT_METRICS = {"global_step", "epoch", "split", *HARDWARE_METRICS}
_COLOURS = {"train": "#4477aa", "val": "#ee6677", "test": "#228833"}
_MORE_COLOURS = ("#aa3377", "#ccbb44", "#66ccee", "#777777")
_PANELS_A_ROW = 3
_MOST_PANELS = 24
_LARGEST = 1e300  # larger values leave an axis without ticks, and integers in a file may not fit a float
_SMOOTHED_FROM = 200
_LOG_SCALE_FROM = 50.0
_NUMBERS_UP_TO = 25
_NAME_LENGTH = 24
_DPI = 130

Curves = dict[str, dict[str, tuple[list[int], list[float]]]]


def learning_curves(metrics_file: Path, target: Path) -> None:
    """Draw every metric of `metrics.jsonl` except `HARDWARE_METRICS` over the optimizer steps, one panel for all splits.

    Missing values leave gaps.
    """
    curves = _curves(metrics_file)
    names = in_order(curves)[:_MOST_PANELS]
    splits = list(dict.fromkeys(split for name in names for split in curves[name]))
    colours = _colours(splits)
    columns = max(1, min(_PANELS_A_ROW, len(names)))
    rows = max(1, math.ceil(len(names) / columns))
    figure = new_figure(5.0 * columns, 3.4 * rows)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, name in zip(panels, names, strict=False):
        _draw_metric(axes, name, curves[name], colours)
    for axes in panels[len(names) :]:
        axes.set_axis_off()
    if not names:
        panels[0].text(0.5, 0.5, "no metrics have been logged", ha="center", va="center", color="#555555")
    save_picture(figure, target)


def confusion_matrix(matrix: list[list[int]], classes: list[str], target: Path, title: str) -> None:
    """Draw a confusion matrix.

    Args:
        matrix: counts, `matrix[true][predicted]`; square.
        classes: names in that order; empty for numbers.
        target: file to write.
        title: shown above.

    Raises:
        ValueError: the matrix is not square, or the number of names does not match.
    """
    from matplotlib.colors import PowerNorm

    count = len(matrix)
    if count == 0 or any(len(row) != count for row in matrix):
        raise ValueError("the confusion matrix must be square and not empty")
    if classes and len(classes) != count:
        raise ValueError(f"a confusion matrix of {count} classes cannot have {len(classes)} names")
    names = [_shorten(name) for name in classes] if classes else [str(index) for index in range(count)]
    shares = [[value / max(1, sum(row)) for value in row] for row in matrix]
    side = _matrix_side(count)
    margin = 0.09 * max(len(name) for name in names)
    figure = new_figure(side + margin + 2.0, side + margin + 1.0)
    axes = figure.subplots()
    # The square root makes rare confusions visible beside a diagonal of nearly one.
    norm = PowerNorm(0.5, vmin=0.0, vmax=1.0)
    image = axes.imshow(shares, cmap="Blues", norm=norm, interpolation="nearest")
    heading = min(18.0, 9.0 + 0.6 * side)
    bar = figure.colorbar(image, ax=axes, fraction=0.06, aspect=5.0 * side, ticks=[0, 0.01, 0.05, 0.2, 0.5, 1])
    bar.ax.set_yticklabels(["0", "1 %", "5 %", "20 %", "50 %", "100 %"])
    bar.set_label("share of the true class", fontsize=0.85 * heading)
    bar.outline.set_visible(False)
    every = math.ceil(count / 100)
    ticks = list(range(0, count, every))
    size = min(10.0, 60.0 * side / len(ticks))
    shown = [names[tick] for tick in ticks]
    # Names are vertical if two neighbours would touch.
    upright = max(len(name) for name in shown) * 0.62 * size > 72.0 * side / len(ticks)
    axes.set_xticks(ticks, shown, fontsize=size, rotation=90 if upright else 0, parse_math=False)
    axes.set_yticks(ticks, shown, fontsize=size, parse_math=False)
    axes.tick_params(length=0)
    axes.set_xlabel("predicted class", fontsize=0.85 * heading)
    axes.set_ylabel("true class", fontsize=0.85 * heading)
    letters = round(1.8 * 72.0 * side / heading)
    axes.set_title("\n".join(textwrap.wrap(title, letters)), fontsize=heading, parse_math=False)
    for spine in axes.spines.values():
        spine.set_color("#bbbbbb")
    if count <= _NUMBERS_UP_TO:
        _write_counts(axes, matrix, shares, side / count)
    save_picture(figure, target)


def bars(
    names: Sequence[str],
    values: Sequence[tuple[float, float, float]],
    reference: float,
    quantity: str,
    target: Path,
    title: str,
) -> None:
    """Draw a bar with its spread for each measurement.

    Args:
        names: of the measurements, from top to bottom.
        values: (median, low, high) of each.
        reference: value that a dashed line marks.
        quantity: label of the values, with their unit.
        target: file to write.
        title: shown above.
    """
    figure = new_figure(8.0, 1.2 + 0.34 * len(names))
    axes = figure.subplots()
    places = range(len(names))
    middles = [median for median, _, _ in values]
    below = [max(0.0, median - low) for median, low, _ in values]
    above = [max(0.0, high - median) for median, _, high in values]
    colours = [_COLOURS["test"] if middle > reference else _COLOURS["train"] for middle in middles]
    axes.barh(places, middles, xerr=[below, above], color=colours, height=0.65, capsize=3, ecolor="#333333")
    axes.axvline(reference, color="#555555", linewidth=0.9, linestyle="--")
    axes.set_yticks(places, list(names), fontsize=9, parse_math=False)
    axes.invert_yaxis()
    axes.ticklabel_format(axis="x", style="sci", scilimits=(-3, 5), useMathText=True)
    axes.set_xlabel(quantity)
    axes.set_title(title, parse_math=False)
    _plain(axes, "x")
    save_picture(figure, target)


def rate_curve(
    rates: Sequence[float],
    losses: Sequence[float],
    smoothed: Sequence[float],
    marks: Mapping[str, float],
    target: Path,
    title: str,
) -> None:
    """Draw the loss of a learning-rate range test over the rate.

    Args:
        rates: learning rate of each step, above 0.
        losses: training loss of each step.
        smoothed: running mean of the losses.
        marks: rates to mark, by label.
        target: file to write.
        title: shown above.
    """
    figure = new_figure(8.0, 4.6)
    axes = figure.subplots()
    axes.plot(rates, losses, color=_COLOURS["train"], alpha=0.35, linewidth=0.9, label="loss of a step")
    axes.plot(rates, smoothed, color=_COLOURS["train"], linewidth=1.8, label="running mean")
    # Different lengths and dashes, because marks may coincide.
    looks = itertools.cycle([(_MORE_COLOURS[0], "-.", 0.75), (_COLOURS["test"], "-", 0.9), (_COLOURS["val"], ":", 1.0)])
    for (name, rate), (colour, dashes, height) in zip(marks.items(), looks, strict=False):
        label = f"{name}: {rate:.2g}"
        axes.axvline(rate, ymax=height, color=colour, linewidth=1.5, linestyle=dashes, label=label)
    # Limited, because a diverging loss would press everything else onto one line.
    low, high = min(losses), max(smoothed[0], min(smoothed))
    axes.set_ylim(low - 0.05 * (high - low), high + 0.5 * (high - low))
    axes.set_xscale("log")
    axes.set_xlabel("learning rate (optimizer.lr, log scale)")
    axes.set_ylabel("training loss")
    axes.set_title(title, parse_math=False)
    _plain(axes)
    axes.legend(frameon=True, framealpha=0.9, edgecolor="none", fontsize=9, loc="lower left")
    save_picture(figure, target)


def _plain(axes: Axes, grid: Literal["both", "x"] = "both") -> None:
    axes.grid(axis=grid, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _curves(metrics_file: Path) -> Curves:
    curves: Curves = {}
    for record in read_records(metrics_file):
        for name, value in record.items():
            if name in _NOT_METRICS or not (value is None or isinstance(value, int | float)):
                continue
            steps, values = curves.setdefault(name, {}).setdefault(str(record.get("split", "")), ([], []))
            steps.append(record["global_step"])
            values.append(math.nan if value is None or abs(value) > _LARGEST else float(value))
    return curves


def _draw_metric(
    axes: Axes, name: str, by_split: dict[str, tuple[list[int], list[float]]], colours: dict[str, str]
) -> None:
    from matplotlib.ticker import MaxNLocator

    for split, (steps, values) in by_split.items():
        colour = colours[split]
        marker = "o" if len(steps) <= 40 else None
        if split == "train" and len(steps) >= _SMOOTHED_FROM and name != "lr":
            axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
            axes.plot(steps, _smooth(values), color=colour, linewidth=1.6, label=f"{split}, running mean")
        else:
            axes.plot(steps, values, color=colour, linewidth=1.6, marker=marker, markersize=3.5, label=split)
    values = [value for _, series in by_split.values() for value in series if math.isfinite(value)]
    if name == "loss" and values and min(values) > 0 and max(values) / min(values) >= _LOG_SCALE_FROM:
        axes.set_yscale("log")
    else:
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 5), useMathText=True)
    if name.endswith("_per_s"):
        # From zero, so that a change of one percent does not look like a collapse.
        axes.set_ylim(0.0, 1.1 * max([value for value in values if value > 0], default=1.0))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.xaxis.set_major_formatter(lambda step, _: f"{step / 1000:g}k" if step >= 10_000 else f"{step:g}")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel(label(name), parse_math=False)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    if any(by_split):
        axes.legend(frameon=True, framealpha=0.8, edgecolor="none", fontsize=9)


def _smooth(values: Sequence[float]) -> list[float]:
    """Mean over a centred window of a twenty-fifth of the curve, without NaN."""
    half = max(1, len(values) // 50)
    known = [math.isfinite(value) for value in values]
    sums = [0.0, *itertools.accumulate(value if ok else 0.0 for value, ok in zip(values, known, strict=True))]
    counts = [0, *itertools.accumulate(known)]
    smoothed = []
    for i, ok in enumerate(known):
        low, high = max(0, i - half), min(len(values), i + half + 1)
        smoothed.append((sums[high] - sums[low]) / (counts[high] - counts[low]) if ok else math.nan)
    return smoothed


def _write_counts(axes: Axes, matrix: list[list[int]], shares: list[list[float]], cell_inches: float) -> None:
    texts = [[str(value) if value < 100_000 else compact(value) for value in row] for row in matrix]
    longest = max(len(text) for row in texts for text in row)
    size = min(11.0, 72.0 * cell_inches * 0.85 / (0.62 * max(2, longest)))
    for i, row in enumerate(texts):
        for j, text in enumerate(row):
            colour = "white" if shares[i][j] > 0.35 else "#222222" if matrix[i][j] else "#bbbbbb"
            axes.text(j, i, text, ha="center", va="center", fontsize=size, color=colour)


def _matrix_side(count: int) -> float:
    return max(3.0, 0.5 * count) if count <= _NUMBERS_UP_TO else min(16.0, max(8.0, 0.16 * count))


def _shorten(name: str) -> str:
    name = " ".join(name.split())
    return name if len(name) <= _NAME_LENGTH else name[: _NAME_LENGTH - 1] + "…"


def _colours(splits: Sequence[str]) -> dict[str, str]:
    others = [split for split in splits if split not in _COLOURS]
    return _COLOURS | {split: _MORE_COLOURS[i % len(_MORE_COLOURS)] for i, split in enumerate(others)}


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, width and height in inches."""
    # Not pyplot, which would look for a display and change the backend.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=_DPI, layout="compressed")


def save_picture(figure: Any, target: Path) -> None:
    """Write a figure atomically, in the format of the suffix, or PNG without one."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # Names of classes may be in any script; a box instead of a letter is better than no picture.
        warnings.filterwarnings("ignore", message=r"Glyph \d+ .*missing from", category=UserWarning)
        figure.savefig(
            buffer, format=target.suffix.lstrip(".") or "png", facecolor="white", bbox_inches="tight", pad_inches=0.15
        )
    write_atomically(target, buffer.getvalue())
