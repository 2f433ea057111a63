"""Which weights of a checkpoint are meant: those that were trained, or their average."""

from __future__ import annotations

from typing import Any

from runner.checkpoint.file import Parts
from runner.config.errors import UserError
from runner.config.schema.verbs import Weights


def weights_of(contents: dict[str, Any], which: Weights = "auto") -> tuple[dict[str, Any], str]:
    """Weights as a state dict of the model, and what they are: `raw`, `ema` or `swa`.

    Args:
        contents: of a checkpoint.
        which: `auto` takes the average if the best evaluation is one of it, and the checkpoint holds it complete.

    Raises:
        UserError: if the average is asked for and there is none, or only one with BatchNorm's statistics of other weights.
    """
    averaged = contents["averaged"] or {"kind": "", "weights": None}
    kind, weights = averaged["kind"], averaged["weights"]
    if which == "averaged" and weights is None:
        raise UserError(
            "weights",
            "is averaged, but the checkpoint holds no average",
            "auto or raw, or a checkpoint of a run with ema or swa",
        )
    # Files of older versions do not say.
    calibrated = averaged.get("calibrated", True)
    if which == "averaged" and not calibrated:
        raise UserError(
            "weights",
            f"is averaged, but the checkpoint was saved after {kind} took weights and before an evaluation, which "
            "computes BatchNorm's statistics for their mean",
            "raw, or a checkpoint of an evaluation such as best.safetensors",
        )
    best = contents["metrics"]["best"]
    of_average = best is not None and bool(kind) and best["metric"].startswith(f"val/{kind}_")
    if weights is not None and (which == "averaged" or (of_average and calibrated and which == "auto")):
        return weights, kind
    return contents["model"], "raw"


def part_with(which: Weights = "auto") -> Parts:
    """The part of a checkpoint that `weights_of` takes: all that is read of a file to use its weights."""

    def part(contents: dict[str, Any]) -> tuple[str, ...]:
        try:
            return ("model" if weights_of(contents, which)[1] == "raw" else "averaged",)
        except UserError:  # raised again by whoever takes them
            return ()

    return part
