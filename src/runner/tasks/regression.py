"""Numbers per sample."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from runner.engine.metrics import Errors
from runner.engine.protocols import Metric
from runner.tasks.task import at_least_float32, first_wrong, value_count


class Regression:
    """K numbers per sample; outputs and targets (B, K), float32, or float64 for blended samples of that type.

    Args:
        num_outputs: K; None for 1.
    """

    monitor = "val/mae"
    mode: Literal["min", "max"] = "min"
    expected = "finite numbers, equally many for each sample"

    def __init__(self, num_outputs: int | None = None) -> None:
        self.num_outputs = 1 if num_outputs is None else num_outputs
        if self.num_outputs < 1:
            raise ValueError(f"num_outputs must be at least 1, got {num_outputs}")

    def outputs(self, classes: Sequence[str]) -> int:
        """One output per number."""
        return self.num_outputs

    def targets(self, targets: Tensor) -> Tensor:
        """Numbers as at least float32 of shape (B, K)."""
        return at_least_float32(targets).view(len(targets), -1)

    def wrong_target(self, targets: Tensor, training: bool) -> tuple[int, str] | None:
        """The first target that is not that many finite numbers; None if all are valid."""
        if targets[0].numel() != self.num_outputs:
            numbers = "one number is" if self.num_outputs == 1 else f"{self.num_outputs} numbers are"
            return 0, f"has {value_count(targets)}, and {numbers} expected"
        flat = targets.flatten(1).squeeze(1) if targets.ndim > 1 else targets
        finite = flat.isfinite()
        return first_wrong(flat, ~(finite if flat.ndim == 1 else finite.all(1)), "which is not finite")

    def metric_names(self) -> list[str]:
        """Mean absolute error and root of the mean squared error."""
        return ["mae", "rmse"]

    def metrics(self, device: torch.device) -> dict[str, Metric]:
        """Mean absolute error and root of the mean squared error over all outputs, in the unit of the targets."""
        return {name: Errors(self.num_outputs, device, name == "rmse") for name in self.metric_names()}

    def tables(self, device: torch.device) -> dict[str, Metric]:
        """Both errors of each output, if there are several."""
        names = self.metric_names() if self.num_outputs > 1 else []
        return {f"output_{name}": Errors(self.num_outputs, device, name == "rmse", each=True) for name in names}
