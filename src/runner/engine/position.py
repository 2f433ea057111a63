"""The position of training, and the best evaluation so far."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass
class Position:
    """The position of training, always at a boundary between optimizer steps."""

    epoch: int = 0  # completed epochs
    batch: int = 0  # completed batches of the current epoch
    global_step: int = 0  # completed optimizer steps
    evaluation_due: bool = False  # whether the validation split must be evaluated before training continues
    turns: list[list[int]] = field(default_factory=list)  # [step, epoch], see `runner.engine.plan.Timeline`


@dataclass
class Best:
    """The best evaluation so far."""

    metric: str
    mode: str
    value: float
    loss: float
    global_step: int
    epoch: int

    def beaten_by(self, value: float, loss: float) -> bool:
        """True if a later evaluation is better: by its value, if equal by the lower loss, and if both are equal it is not.

        On a small split many evaluations have the same accuracy, and the loss still tells them apart.
        """
        if value == self.value:
            return loss < self.loss or (math.isnan(self.loss) and not math.isnan(loss))
        return value > self.value if self.mode == "max" else value < self.value
