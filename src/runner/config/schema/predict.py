"""What `predict` takes."""

from __future__ import annotations

from dataclasses import dataclass

from runner.config.schema.checkpoints import TtaMean, View, Weights
from runner.config.schema.sections import Count
from runner.config.schema.train import Train


@dataclass(frozen=True, kw_only=True)
class Predict(Train):
    """What `predict` adds: the images, what is said of each, and where it is written."""

    input: str | list[str] | None = None
    weights: Weights = "auto"
    output: str | None = None
    top_k: Count = 1
    probabilities: bool = False
    logits: bool = False
    features: str | list[str] | None = None
    tta: View | list[View] | None = None
    tta_mean: TtaMean = "logits"
    strict: bool = False
    json: bool = False
