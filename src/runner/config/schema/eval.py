"""What `eval` takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from runner.config.schema.checkpoints import TtaMean, View, Weights
from runner.config.schema.train import Train


@dataclass(frozen=True, kw_only=True)
class Eval(Train):
    """What `eval` adds: the split to evaluate, with which weights, the views that are averaged, and where to write the result."""

    split: Literal["train", "val", "test"] = "test"
    weights: Weights = "auto"
    tta: View | list[View] | None = None
    tta_mean: TtaMean = "logits"
    output: str | None = None
    json: bool = False
