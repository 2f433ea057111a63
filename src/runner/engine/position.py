"""Where training stands, and the best evaluation so far."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Position:
    """Where training stands, always at a boundary between optimizer steps.

    Attributes:
        epoch: completed epochs.
        batch: completed batches of the current epoch.
        micro_batch: accumulated batches of the current step; 0, because states are saved between steps.
        global_step: completed optimizer steps.
        evaluation_due: whether the validation split must be evaluated before training continues.
        skipped_steps: numbers of the optimizer steps, from 1, that are skipped because their gradients are not finite.
        pieces: micro-batches that each batch is divided into because memory ran out.
        turns: [step, epoch] pairs at which the number of steps per epoch changed, see `runner.engine.plan.Timeline`.
    """

    epoch: int = 0
    batch: int = 0
    micro_batch: int = 0
    global_step: int = 0
    evaluation_due: bool = False
    skipped_steps: list[int] = field(default_factory=list)
    pieces: int = 1
    turns: list[list[int]] = field(default_factory=list)


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
        """Whether another evaluation is better; the lower loss breaks ties."""
        if value == self.value:
            return loss < self.loss
        return value > self.value if self.mode == "max" else value < self.value
