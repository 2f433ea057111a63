"""The learning-rate range test: what `find-lr` shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runner.base.errors import UserError
from runner.config.targets import names_argument
from runner.engine.range_test import Curve, Suggestions, exponential, range_test, suggest
from runner.run.run import Run
from runner.run.trial import memory_for_training
from runner.tracking.plots import rate_curve

REASON = "a fifth of the rate at which the loss begins to rise"


@dataclass(frozen=True)
class FoundRate:
    """What a range test found."""

    curve: Curve
    suggestions: Suggestions
    settings: dict[str, float]  # what is recommended for the optimizer's arguments that are rates; `lr` is the first
    warning: str  # why the recommendation may be wrong, or an empty string

    @property
    def words(self) -> str:
        """The overrides to use."""
        return " ".join(f"optimizer.{name}={rate:g}" for name, rate in self.settings.items())

    def record(self) -> dict[str, Any]:
        """All of it as plain containers."""
        return {
            "recommended": self.settings["lr"],
            "reason": REASON,
            "overrides": self.words,
            "suggestions": asdict(self.suggestions),
            "warning": self.warning or None,
            "curve": asdict(self.curve),
        }

    def draw(self, target: Path, title: str) -> None:
        """Draw the curve with the suggestions."""
        marks = {
            "steepest fall": self.suggestions.steepest,
            "a fifth of the edge (recommended)": self.suggestions.fifth,
            "edge: the loss begins to rise": self.suggestions.edge,
        }
        curve = self.curve
        rate_curve(curve.rates, curve.losses, curve.smoothed, marks=marks, target=target, title=title)


def find_rate(run: Run, steps: int, start: float, end: float, interrupted: Callable[[], str] = lambda: "") -> FoundRate:
    """Make a range test of so many optimizer steps from the rate `start` to `end`; the run is of no use afterwards.

    `interrupted` returns the name of the signal that asks to stop, or an empty string. Raises `UserError` if the optimizer
    has no rate to scale, there is not enough memory, or the loss hardly falls at any rate.
    """
    # The test scales the rate that the user gave, so there has to be one
    node = run.config.optimizer
    reference = node.get("lr") or run.state.optimizer.defaults.get("lr")
    if not isinstance(reference, int | float) or reference <= 0:
        raise UserError("optimizer.lr", f"is {node.get('lr')}, and the range test scales it", "a number above 0")
    with memory_for_training(run.config):
        curve = range_test(
            run.step,
            source=run.data.train.loader,
            plan=run.plan,
            rates=exponential(start, end, steps),
            reference=reference,
            interrupted=interrupted,
        )
    try:
        suggestions = suggest(curve)
    except ValueError as error:
        allowed = "optimizer.lr=..., a number; or find-lr with another start, end or num_steps"
        raise UserError("lr", f"no rate was found: {error}", allowed) from error
    # Other rates of the optimizer, such as Muon's for its AdamW part, keep their ratio to the main one
    further = {
        name: _rounded(value * suggestions.fifth / reference)
        for name, value in node.items()
        if name.endswith("_lr") and isinstance(value, int | float) and names_argument(node, name)
    }
    warning = ""
    # A loss that still falls at the last rate has no edge yet: the suggestion is only a lower bound
    if not curve.stopped and suggestions.edge == curve.rates[-1]:
        warning = f"the loss had not risen by the last rate, {end:g}: a larger end may suggest a larger rate"
    return FoundRate(curve, suggestions, {"lr": _rounded(suggestions.fifth), **further}, warning)


def _rounded(rate: float) -> float:
    """Two digits: a range test is no more precise, and typing the rate gives exactly this number."""
    return float(f"{rate:.1e}")
