"""The parts of a step in named ranges, for profiling; a run that is not profiled pays nothing for them."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

WAIT, PREPARE = "data wait", "copy and augment"
FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"

Mark = Callable[[str], contextlib.AbstractContextManager[object]]
"""Gives a context for a range of that name."""

T = TypeVar("T")


def step_in_ranges(step: Any, mark: Mark) -> Any:
    """A `runner.engine.step.Step` with its parts in ranges: the same work in the same order."""

    def within(name: str, part: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with mark(name):
                return part(*args)

        return call

    step = copy.copy(step)
    for name, part in ((FORWARD, "forward"), (BACKWARD, "backward"), (OPTIMIZER, "update")):
        setattr(step, part, within(name, getattr(step, part)))
    return step


def items_in_range(begin: Callable[[], Iterator[T]], mark: Mark, name: str) -> Iterator[T]:
    """The items of an iterator, each made in a range."""
    with mark(name):
        items = begin()
    while True:
        with mark(name):
            item = next(items, None)
        if item is None:
            return
        yield item
