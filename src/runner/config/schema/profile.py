"""What `profile` takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt

from runner.config.schema.sections import Count, NonNegative
from runner.config.schema.train import Train


@dataclass(frozen=True, kw_only=True)
class Profile(Train):
    """What `profile` adds: how many steps are measured, how long that may take, and where to write."""

    warmup_steps: NonNegative = 5
    steps: Count = 20
    trace_steps: NonNegative = 3
    budget_s: Annotated[float, Gt(0)] = 45.0
    output: str | None = None
    json: bool = False
