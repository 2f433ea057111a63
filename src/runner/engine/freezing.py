"""Weights that are left alone for a while, or for good, and modules that stay in evaluation mode."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from runner.engine.loop import Loop
    from runner.engine.state import Position


@dataclass(frozen=True, eq=False)
class Frozen:
    """A part of a model that is not trained.

    Attributes:
        name: for people.
        parameters: its weights.
        modules: what is in evaluation mode meanwhile, such as BatchNorm, whose statistics then stay.
        steps: optimizer steps that this holds for.
        epochs: the same in epochs; with neither, it holds for good.
    """

    name: str
    parameters: tuple[nn.Parameter, ...]
    modules: tuple[nn.Module, ...]
    steps: int | None = None
    epochs: int | None = None

    @property
    def permanent(self) -> bool:
        """Whether it is never trained."""
        return self.steps is None and self.epochs is None

    def holds(self, position: Position) -> bool:
        """Whether the step after this position leaves the part alone."""
        if self.steps is not None:
            return position.global_step < self.steps
        return self.epochs is None or position.epoch < self.epochs


class Freezing:
    """What of a model is trained, which is a function of the position alone, so that a resumed run agrees.

    Modules that are in evaluation mode when this is made stay in it, as their constructor wanted it; unless the whole
    model is, as models that were loaded for use often are.

    Args:
        model: what is trained.
        parts: what is not, or not yet; of weights in several parts the one that holds longest decides.
    """

    def __init__(self, model: nn.Module, parts: Sequence[Frozen] = ()) -> None:
        self.parts = tuple(parts)
        self._model = model
        self._evaluating = [module for module in model.modules() if not module.training] if model.training else []
        self._held: list[Frozen] = []

    def train(self, position: Position) -> None:
        """Put the model into training mode for the step after a position, but for what is frozen there."""
        self._train_all_but([part for part in self.parts if part.holds(position)])

    @contextlib.contextmanager
    def as_at(self, position: Position | None) -> Iterator[None]:
        """The model in training mode as for the step after a position; afterwards it is as before.

        Args:
            position: where; None for where all that is frozen for a while is trained.
        """
        held = self._held
        modes = [(module, module.training) for module in self._model.modules()]
        needed = [(parameter, parameter.requires_grad) for parameter in self._model.parameters()]
        try:
            frozen = [part for part in self.parts if (part.holds(position) if position else part.permanent)]
            self._train_all_but(frozen)
            yield
        finally:
            for parameter, needs in needed:
                parameter.requires_grad_(needs)
            for module, mode in modes:
                module.training = mode
            self._held = held

    def _train_all_but(self, held: list[Frozen]) -> None:
        self._held = held
        frozen = {parameter for part in self._held for parameter in part.parameters}
        for part in self.parts:
            for parameter in part.parameters:
                parameter.requires_grad_(parameter not in frozen)
        self._model.train()
        for module in self._evaluating:
            module.training = False
        for part in self._held:
            for module in part.modules:
                module.training = False

    def follow(self, position: Position) -> list[Frozen]:
        """Let go of what is trained from a later position on; gives these parts."""
        freed = [part for part in self._held if not part.holds(position)]
        if freed:
            self.train(position)
        return freed


class UnfreezeCallback:
    """Trains weights from the moment on until which they are frozen.

    Args:
        tell: shows a line.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell

    def on_step(self, loop: Loop) -> None:
        """Look at the position of the next step."""
        for part in loop.state.freezing.follow(loop.state.position):
            if loop.finished:
                return
            count = sum(parameter.numel() for parameter in part.parameters)
            self._tell(
                f"step {loop.state.position.global_step}: {part.name} is trained from here on, {count:,} parameters"
            )
