"""What `eval` takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from runner.config.schema.train import Train
from runner.config.schema.views import TtaMean, View, Which


@dataclass
class Eval(Train):
    """What `eval` adds: the split, with which weights and views it is evaluated, and where to write the result."""

    split: Literal["train", "val", "test"] = "test"
    weights: Which = "auto"
    tta: View | list[View] | None = None
    tta_mean: TtaMean = "logits"
    output: str | None = None
    json: bool = False
