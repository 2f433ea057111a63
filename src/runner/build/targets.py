"""Whether the targets of a data set are what the task expects, found before they are trained on."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import Tensor

from runner.config.errors import UserError
from runner.data.build import DataModule
from runner.data.workers import WorkerLoader
from runner.engine.tasks import Classification, Task

WrongTarget = Callable[[Tensor, bool], tuple[int, str] | None]


def check_targets(task: Task, splits: DataModule) -> None:
    """Check all targets that are known without reading samples; others are checked in each batch, before it is used.

    Raises:
        UserError: if the task cannot take one; it names sample and split.
    """
    wrong = _method_of(task)
    if wrong is None:
        return
    allowed = "class numbers from 0 on" if isinstance(task, Classification) else "finite numbers"
    for name, (_, indices) in splits.parts.items():
        refuse = functools.partial(_refuse, wrong, name, name == "train", f"{allowed}, or another task")
        if name in splits.targets:
            samples = indices[:]
            refuse(splits.targets[name][samples], samples)
            continue
        refuse(splits.examples[name][1][None], indices[:1])
        for split in (splits.eval_split(name), splits.train if name == "train" else None):
            if split is not None and isinstance(split.loader, WorkerLoader):
                split.loader.check = refuse


def _method_of(task: Task) -> WrongTarget | None:
    """The task's own `wrong_target`; one that it inherits says nothing of a task that has targets of its own kind."""
    for kind in type(task).__mro__:
        if "wrong_target" in vars(kind):
            return task.wrong_target  # type: ignore[attr-defined, no-any-return]
        if "targets" in vars(kind):
            return None
    return None


def _refuse(wrong: WrongTarget, split: str, training: bool, allowed: str, targets: Tensor, samples: Tensor) -> None:
    if found := wrong(targets, training):
        place, reason = found
        problem = f"the target of sample {int(samples[place])} of '{split}' {reason}"
        raise UserError("data.dataset", problem, allowed)
