"""What `check` takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Gt

from runner.config.schema.sections import Count
from runner.config.schema.train import Train


@dataclass(frozen=True, kw_only=True)
class Check(Train):
    """What `check` adds: which checks are made, on how much, and what counts as failed."""

    only: list[str] = field(default_factory=list)
    skip: list[str] = field(default_factory=list)
    strict: bool = False
    samples: Annotated[int, Ge(16)] = 2048
    train: bool = False
    train_steps: Count = 100
    budget_s: Annotated[float, Gt(0)] = 60.0
    json: bool = False
