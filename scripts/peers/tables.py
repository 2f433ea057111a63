"""Measurements as tables for the documentation."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Runs = Mapping[str, Sequence[Mapping[str, Any]]]
"""The measurements of each contender, in the order of the rounds."""


def ratios(runs: Runs, reference: str) -> dict[str, list[float]]:
    """Time of a step in terms of the reference's in the same round."""
    steps = [run["step_s"] for run in runs[reference]]
    return {
        name: [run["step_s"] / step for run, step in zip(theirs, steps, strict=True)] for name, theirs in runs.items()
    }


def table(runs: Runs, missing: Mapping[str, str], reference: str) -> list[str]:
    """Lines of a Markdown table, a row a contender.

    Args:
        runs: the measurements.
        missing: contenders that are not installed, and the package that each one needs.
        reference: contender that the ratios are to.
    """
    lines = [
        f"| contender | a step | in the quickest epoch | ratio to `{reference}` | its spread | training loss | test accuracy |",
        "|---|---|---|---|---|---|---|",
    ]
    absent = [f"| `{name}` | not measured: {package} is not installed | | | | | |" for name, package in missing.items()]
    if not runs:
        return [*lines, *absent]
    for name, ratio in ratios(runs, reference).items():
        theirs = runs[name]
        lines.append(
            f"| `{name}` | {time(statistics.median(run['step_s'] for run in theirs))} "
            f"| {time(min(run['quickest_s'] for run in theirs))} "
            f"| {statistics.median(ratio):.2f} | {min(ratio):.2f} to {max(ratio):.2f} "
            f"| {statistics.median(run['loss'] for run in theirs):.4f} "
            f"| {statistics.median(run['accuracy'] for run in theirs):.2%} |"
        )
    return [*lines, *absent]


def time(seconds: float) -> str:
    """A time with its unit, three digits."""
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.{0 if seconds >= 0.1 else 1}f} ms"


def unequal(runs: Runs, loss_tolerance: float, accuracy_tolerance: float) -> list[str]:
    """Sentences about contenders that did not reach what the others did: then the times cannot be compared.

    Args:
        runs: the measurements.
        loss_tolerance: how far a final loss may be from the median of all contenders, as a share of it.
        accuracy_tolerance: how far a test accuracy may be from the median of all contenders.
    """
    if not runs:
        return []
    found = {
        name: [statistics.median(run[name_of] for run in theirs) for name_of in ("loss", "accuracy")]
        for name, theirs in runs.items()
    }
    loss, accuracy = (statistics.median(numbers) for numbers in zip(*found.values(), strict=True))
    complaints = []
    for name, (own_loss, own_accuracy) in found.items():
        if not abs(own_loss - loss) <= loss_tolerance * loss:
            complaints.append(
                f"{name}: training loss {own_loss:.4f}, more than {loss_tolerance:.0%} from the median {loss:.4f}"
            )
        if not abs(own_accuracy - accuracy) <= accuracy_tolerance:
            complaints.append(
                f"{name}: test accuracy {own_accuracy:.2%}, more than {accuracy_tolerance:.1%} from the median {accuracy:.2%}"
            )
    return complaints
