"""What `eval` takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from runner.config.schema.train import Train


@dataclass
class Eval(Train):
    """What `eval` adds: the split to evaluate, with which weights, and where to write the result."""

    split: Literal["train", "val", "test"] = "test"
    weights: Literal["auto", "raw", "averaged"] = "auto"
    output: str | None = None
    json: bool = False


EVAL_ONLY = ("split", "weights", "output", "json")
