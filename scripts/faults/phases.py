"""Places inside a run, told as it comes to them: changes to a forked process."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

from faults.lives import Prepare

STEP_PHASES = ("after fetch", "after forward", "after backward", "after update", "after log")
OTHER_PHASES = ("while restoring", "while evaluating")
Tell = Callable[[str, int], None]
"""Called with a phase and the number of the micro-batch, or evaluation, that this process is at, counted from 0."""


class _Watched:
    """A source of batches that tells before and after each."""

    def __init__(
        self, inner: Any, before: Callable[[], None], after: Callable[[], None], asked: Callable[[], None]
    ) -> None:
        self._inner, self._before, self._after, self._asked = inner, before, after, asked

    def __len__(self) -> int:  # Python does not ask `__getattr__` for it
        return len(self._inner)

    def batches(self, *place: int) -> Iterator[Any]:
        batches = self._inner.batches(*place)
        while True:
            self._before()
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._after()
            try:
                yield batch
            finally:  # the next one is asked for, or none is any more
                self._asked()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _WatchedStep:
    """A step that tells after each batch."""

    def __init__(self, inner: Any, after: Callable[[], None]) -> None:
        self._inner, self._after = inner, after

    def __call__(self, *values: Any, update: bool) -> None:
        self._inner(*values, update=update)
        self._after()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def telling(tell: Tell) -> None:
    """Report every phase of every micro-batch, of evaluations, and of restoring."""
    from runner.checkpoint import resume
    from runner.engine.loop import Loop
    from runner.engine.step import Step
    from runner.run import evaluation

    at = {"batch": -1, "evaluation": -1}
    begin = Loop.__init__

    @functools.wraps(begin)
    def begin_watched(self: Loop, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)

        def arrive() -> None:
            at["batch"] += 1
            tell("after fetch", at["batch"])

        self.source = _Watched(  # type: ignore[assignment]
            self.source,
            lambda: tell("while loading", at["batch"] + 1),
            arrive,
            lambda: tell("after log", at["batch"]),
        )
        self.step = _WatchedStep(self.step, lambda: tell("after update", at["batch"]))  # type: ignore[assignment]

    Loop.__init__ = begin_watched  # type: ignore[method-assign]
    for name in ("forward", "backward"):
        original = getattr(Step, name)

        def run(*args: Any, original: Callable[..., Any] = original, name: str = name) -> Any:
            result = original(*args)
            tell(f"after {name}", at["batch"])
            return result

        setattr(Step, name, run)

    evaluate, restore = evaluation.evaluate, resume.restore

    def evaluate_watched(model: Any, source: Any, *args: Any, **options: Any) -> Any:
        at["evaluation"] += 1
        inside = functools.partial(tell, "while evaluating", at["evaluation"])
        return evaluate(model, _Watched(source, lambda: None, inside, lambda: None), *args, **options)

    def restore_watched(found: Any, state: Any, *others: Any) -> None:
        tell("while restoring", 0)
        restore(found, state, *others)
        tell("while restoring", 1)

    evaluation.evaluate = evaluate_watched  # type: ignore[assignment]
    resume.restore = restore_watched


def signalling(phase: str, number: int, *signals: int) -> Prepare:
    """Send signals to the process itself when it comes to a place."""

    def prepare() -> None:
        def tell(here: str, at: int) -> None:
            if (here, at) == (phase, number):
                for each in signals:
                    os.kill(os.getpid(), each)

        telling(tell)

    return prepare


def dying(phase: str, number: int) -> Prepare:
    """End the process with SIGKILL when it comes to a place."""
    return signalling(phase, number, signal.SIGKILL)
