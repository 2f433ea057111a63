"""Several optimizers as one, for tasks whose steps update one part of the weights after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from itertools import islice
from types import SimpleNamespace
from typing import Any

from torch.optim import Optimizer

from runner.engine.protocols import Schedule


class Optimizers(Optimizer):
    """Optimizers by name, whose parameter groups and moments are saved, scheduled and shown like those of one.

    Each of their groups has its optimizer's name under `optimizer`. A step is taken with one of `named` at a time.
    """

    def __init__(self, named: Mapping[str, Optimizer]) -> None:
        self.named = dict(named)
        for name, each in named.items():
            for group in each.param_groups:
                group["optimizer"] = name
        super().__init__([group for each in named.values() for group in each.param_groups], {})
        for each in named.values():
            self.state.update(each.state)
        self._share()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share()

    def _share(self) -> None:
        """Let each optimizer work on its groups, and on the moments of all."""
        groups = iter(self.param_groups)
        for each in self.named.values():
            own = list(islice(groups, len(each.param_groups)))
            each.__setstate__({"state": self.state, "param_groups": own})

    def register_step_pre_hook(self, hook: Any) -> Any:
        """Call a function before each step of any of them; the handle that is returned has `remove()`."""
        handles = contextlib.ExitStack()
        for each in self.named.values():
            handles.callback(each.register_step_pre_hook(hook).remove)
        return SimpleNamespace(remove=handles.close)


class Schedules:
    """Schedules by the name of the optimizer whose rates they are; as one schedule, it is the first of them."""

    def __init__(self, named: Mapping[str, Schedule]) -> None:
        self.named = dict(named)

    def factor(self, step: int) -> float:
        """The multiple of the first optimizer's rates."""
        return next(iter(self.named.values())).factor(step)

    def observe(self, metric: float) -> None:
        """Tell all of them the monitored metric."""
        for each in self.named.values():
            each.observe(metric)

    def state_dict(self) -> dict[str, Any]:
        """Their states by name."""
        return {name: each.state_dict() for name, each in self.named.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from saved states."""
        for name, each in self.named.items():
            each.load_state_dict(state.get(name, {}))
