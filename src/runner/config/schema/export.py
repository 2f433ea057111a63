"""What `export` takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Gt

from runner.config.schema.checkpoints import Weights
from runner.config.schema.sections import Count
from runner.config.schema.train import Train

Format = Literal["safetensors", "torch_export", "onnx", "torchscript"]


@dataclass(frozen=True, kw_only=True)
class Export(Train):
    """What `export` adds: the formats, what goes into them, and how closely they have to agree with the model."""

    format: Format | list[Format] = "torch_export"
    weights: Weights = "auto"
    include_preprocessing: bool = False
    int8: bool = False
    batch_sizes: list[Count] = field(default_factory=lambda: [1, 8])
    tolerance: Annotated[float, Gt(0)] = 1e-5
    output: str | None = None
    json: bool = False
