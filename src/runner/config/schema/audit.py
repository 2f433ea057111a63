"""What `audit` takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from runner.config.schema.sections import Count
from runner.config.schema.train import Train


@dataclass(frozen=True, kw_only=True)
class Audit(Train):
    """What `audit` adds: how many steps are compared, under which settings, or which two checkpoints are."""

    steps: Count = 10
    vary: dict[str, Any] = field(default_factory=dict)
    a: str | None = None
    b: str | None = None
    json: bool = False
