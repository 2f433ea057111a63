"""What `find-lr` takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt

from runner.config.schema.train import Train


@dataclass(frozen=True, kw_only=True)
class FindLr(Train):
    """What `find-lr` adds: how many steps it takes, the first rate and the last one, and where to write."""

    num_steps: Annotated[int, Ge(10)] = 300
    start: Annotated[float, Gt(0)] = 1e-5
    end: Annotated[float, Gt(0)] = 10.0
    output: str | None = None
    json: bool = False
