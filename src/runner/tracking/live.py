"""The lines below the bar of a run: the epoch, the curve of the loss, the monitored metric, memory and warnings."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from runner.tracking.formats import Line, amount, bar_texts, encodable, metric, number
from runner.tracking.progress_file import Progress

_BLOCKS = "▁▂▃▄▅▆▇█"
_CURVE = 24  # characters
_MOST_LOSSES = 512
_EPOCH_BAR = 16


class LiveLines:
    """Collects what the lines show."""

    def __init__(self, warnings: list[str] | None = None) -> None:
        self.warnings = warnings or []
        self._losses: list[float] = []
        self._count, self._every = 0, 1

    def add_loss(self, loss: float) -> None:
        """Add a point to the curve of the loss, unless it is not finite."""
        self._count += 1
        if math.isfinite(loss) and self._count % self._every == 0:
            self._losses.append(loss)
        # Drawing must not become slower as a run gets longer, so only every second, fourth, ... loss stays.
        if len(self._losses) == _MOST_LOSSES:
            del self._losses[::2]
            self._every *= 2

    def lines(self, progress: Progress, encoding: str | None) -> list[Line]:
        """The lines, with their styles; those that have nothing to say are omitted."""
        first: Line = []
        # One epoch or an unknown number of steps makes a second bar useless
        if progress.total_epochs > 1 and progress.total_steps > 0:
            steps = max(1, round(progress.total_steps / progress.total_epochs))
            done = progress.global_step - (max(progress.epoch, 1) - 1) * steps
            full, empty = bar_texts(done / steps, _EPOCH_BAR, encoding)
            first += [("  this epoch  ", ""), (full, "cyan"), (empty, "dim")]
        # Some terminals cannot show the blocks of the curve
        if encodable(_BLOCKS, encoding) == _BLOCKS and len(self._losses) > 1:
            # The first losses are so large that the rest looks flat without a logarithm.
            curve = [math.log(loss) for loss in self._losses] if min(self._losses) > 0 else self._losses
            first += [("  loss ", ""), (sparkline(curve, _CURVE), "magenta")]
        second = list[str]()
        if progress.last is not None:
            best = progress.best is not None and progress.best_step is not None
            suffix = f", best {number(progress.best)} at step {progress.best_step}" if best else ""
            second.append(metric(progress.metric, progress.last) + suffix)
        if (memory := progress.train.get("peak_memory_mib")) is not None:
            second.append(metric("peak_memory_mib", memory))
        third: Line = []
        if self.warnings:
            third = [(f"  {amount(len(self.warnings), 'warning')}: {self.warnings[-1]}", "yellow")]
        return [line for line in (first, [(f"  {'  '.join(second)}", "")] if second else [], third) if line]


def sparkline(values: Sequence[float], width: int) -> str:
    """A curve of finite values in at most `width` characters, the last ones at the right."""
    count = min(width, len(values))
    edges = [round(at * len(values) / count) for at in range(count + 1)]
    means = [sum(values[low:high]) / (high - low) for low, high in itertools.pairwise(edges)]
    low, high = min(means), max(means)
    top = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round((value - low) / (high - low) * top) if high > low else 0] for value in means)
