"""Protocols of the objects that the engine is given."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor


class Batch(Protocol):
    """Samples on the device, see `runner.data.loaders.Batch`."""

    @property
    def data(self) -> Any:
        """What the task trains on: for most tasks images (B, C, H, W), augmented and normalised, and targets (B, ...)."""

    @property
    def indices(self) -> Tensor:
        """(B,) int64."""


class Source(Protocol):
    """A loader, see `runner.data.loaders.Loader`."""

    def __len__(self) -> int:
        """Batches per epoch."""

    def batches(self, epoch: int, start: int, stop: int) -> Iterator[Any]:
        """Batches `start` to `stop` of an epoch."""


class Metric(Protocol):
    """The part of the torchmetrics interface that evaluation uses."""

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        """Add a batch."""

    def compute(self) -> Tensor:
        """The value over all batches, a scalar except for tables."""


class Schedule(Protocol):
    """Learning rate as a multiple of each parameter group's `initial_lr`."""

    def factor(self, step: int) -> float:
        """The multiple for optimizer step number `step`, from 0."""

    def observe(self, metric: float) -> None:
        """Receive the monitored metric after an evaluation."""

    def state_dict(self) -> dict[str, Any]:
        """The state for `load_state_dict`; empty for a pure function of the step."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
