"""Loss curves under two settings, several seeds each: does one of them lie within the spread of the other's seeds?"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

Curve = Sequence[tuple[int, float]]
"""(optimizer step, mean loss since the point before)."""


def compare(baseline: Sequence[Curve], other: Sequence[Curve]) -> list[str]:
    """Lines of a Markdown table of both settings, and what follows from it.

    Args:
        baseline: the curve of each seed under the reference setting; at least two.
        other: the curve of the same seeds under the other setting.
    """
    steps = [step for step, _ in baseline[0]]
    before = list(zip(*([loss for _, loss in curve] for curve in baseline), strict=True))
    after = list(zip(*([loss for _, loss in curve] for curve in other), strict=True))
    shown = sorted({round(index * (len(steps) - 1) / 5) for index in range(6)})
    lines = ["| step | baseline: mean (lowest to highest) | fast: mean (lowest to highest) |", "|---|---|---|"]
    lines += [f"| {steps[index]} | {_row(before[index])} | {_row(after[index])} |" for index in shown]
    inside = sum(min(base) <= statistics.mean(fast) <= max(base) for base, fast in zip(before, after, strict=True))
    same_seed = statistics.mean(
        abs(fast - base)
        for some, others in zip(before, after, strict=True)
        for base, fast in zip(some, others, strict=True)
    )
    other_seed = statistics.mean(
        abs(left - right) for some in before for index, left in enumerate(some) for right in some[index + 1 :]
    )
    lines += [
        "",
        f"The mean of `fast` lies within the spread of the baseline's {len(baseline)} seeds at {inside} of {len(steps)} points. "
        f"Two runs of one seed differ by {same_seed:.2g} on average between the settings, two seeds of the baseline by "
        f"{other_seed:.2g}.",
    ]
    return lines


def _row(losses: Sequence[float]) -> str:
    return f"{statistics.mean(losses):.4f} ({min(losses):.4f} to {max(losses):.4f})"
