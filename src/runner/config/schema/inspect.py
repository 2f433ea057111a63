"""What `inspect` takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Le

from runner.config.schema.checkpoints import Weights
from runner.config.schema.train import Train

Part = Literal["layers", "weights", "activations", "gradients", "inputs", "filters", "features", "errors"]

FEATURE_FILES = (".npz", ".safetensors")
"""Endings of a file of features."""


@dataclass(frozen=True, kw_only=True)
class Inspect(Train):
    """What `inspect` adds: which parts of a model are looked at, and which features are written."""

    what: list[Part] | None = None
    tensors: list[str] = field(default_factory=list)
    features: list[str] = field(default_factory=list)
    split: Literal["train", "val", "test"] = "val"
    weights: Weights = "auto"
    samples: Annotated[int, Ge(1), Le(100)] = 16
    output: str | None = None
    json: bool = False
