"""What `bench` takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt

from runner.config.schema.sections import Count
from runner.config.schema.train import Train

Toggle = Literal[
    "amp",
    "channels_last",
    "compile",
    "activation_checkpointing",
    "optimizer.fused",
    "optimizer.foreach",
    "cudnn_benchmark",
    "tf32",
    "matmul_precision",
    "threads",
    "data.placement",
    "data.num_workers",
    "data.prefetch",
    "performance",
]


@dataclass(frozen=True, kw_only=True)
class Bench(Train):
    """What `bench` adds: what is compared with what, and how long that may take."""

    part: Literal["train", "data"] = "train"
    toggles: list[Toggle] | None = None
    vary: dict[str, Any] = field(default_factory=dict)
    combine: bool = True
    steps: Count | None = None
    repeats: Annotated[int, Ge(2)] = 7
    compare_steps: Annotated[int, Ge(2)] = 20
    budget_s: Annotated[float, Gt(0)] = 60.0
    tolerance: Annotated[float, Ge(0)] | None = None
    json: bool = False
