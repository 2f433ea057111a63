"""Decides when weights are trained, and which modules stay in evaluation mode."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from runner.engine.plan import Position
from runner.instrument.no_trace import no_trace


@dataclass(frozen=True, eq=False)
class Frozen:
    """A part of a model that is not trained: for so many steps, for so many epochs, or permanently."""

    name: str
    parameters: tuple[nn.Parameter, ...]
    modules: tuple[nn.Module, ...]  # kept in evaluation mode meanwhile, so that BatchNorm's statistics do not change
    steps: int | None = None
    epochs: int | None = None

    @property
    def size(self) -> int:
        """Number of its weights."""
        return sum(parameter.numel() for parameter in self.parameters)

    @property
    def permanent(self) -> bool:
        """True if it is never trained."""
        return self.steps is None and self.epochs is None

    @property
    def until(self) -> str:
        """For how long, for people."""
        if self.permanent:
            return "permanently"
        return f"until after epoch {self.epochs:,}" if self.steps is None else f"until after step {self.steps:,}"

    def holds(self, position: Position) -> bool:
        """True if the part is frozen in the step after this position."""
        if self.steps is not None:
            return position.global_step < self.steps
        return self.epochs is None or position.epoch < self.epochs


class Freezing:
    """Decides what is trained from the position alone, so that a resumed run agrees.

    Modules that are in evaluation mode at construction stay in it, as their constructor chose it. If the whole model is in
    evaluation mode, as loaded models often are, all of it is trained. A weight in several parts is frozen until the last of
    them is trained.

    `report` gets a sentence about each part that is trained from a step on.
    """

    def __init__(self, model: nn.Module, parts: Sequence[Frozen] = ()) -> None:
        self.report: Callable[[str], object] = str
        self.parts = tuple(parts)
        self._model = model
        self._evaluating = [module for module in model.modules() if not module.training] if model.training else []
        self._frozen: list[Frozen] = []

    def follow_parameters(self, now: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Go on with the parameters that have replaced some of the model's, before training."""
        self.parts = tuple(
            replace(part, parameters=tuple(now.get(parameter, parameter) for parameter in part.parameters))
            for part in self.parts
        )

    def train(self, position: Position) -> None:
        """Put the model into training mode for the step after a position, except for what is frozen there."""
        self._train_all_but([part for part in self.parts if part.holds(position)])

    @contextlib.contextmanager
    def as_at(self, position: Position | None) -> Iterator[None]:
        """The model in training mode as after a position, None for when only permanently frozen parts are left; see `no_trace`."""
        parts = self._frozen
        try:
            with no_trace(self._model):
                self._train_all_but(
                    [part for part in self.parts if (part.holds(position) if position else part.permanent)]
                )
                yield
        finally:
            self._frozen = parts

    def follow(self, position: Position, ends: bool = False) -> None:
        """Train the parts that are no longer frozen at a later position, and report them unless training `ends` there."""
        freed = [part for part in self._frozen if not part.holds(position)]
        if freed:
            self.train(position)
        for part in freed if not ends else ():
            self.report(f"step {position.global_step}: {part.name} is trained from now on, {part.size:,} parameters")

    def _train_all_but(self, parts: list[Frozen]) -> None:
        self._frozen = parts
        frozen = {parameter for part in parts for parameter in part.parameters}
        for part in self.parts:
            for parameter in part.parameters:
                parameter.requires_grad_(parameter not in frozen)
        self._model.train()
        for module in (*self._evaluating, *(module for part in parts for module in part.modules)):
            module.training = False
