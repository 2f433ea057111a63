"""The parts of a step in named ranges, for profiling; a run that is not profiled pays nothing for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

WAIT, PREPARE = "data wait", "copy and augment"
FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"

Mark = Callable[[str], contextlib.AbstractContextManager[object]]
"""Gives a context for a range of that name."""

T = TypeVar("T")


def step_in_ranges(
    mark: Mark,
    forward: Callable[..., Any],
    share_of: Callable[..., Any],
    backward: Callable[..., Any],
    update_weights: Callable[..., Any],
) -> Callable[..., None]:
    """A training step for `Loop` with its parts in ranges: the same work in the same order as `engine.step.train_step`."""

    def step(state: Any, parts: Any, batch: Any, weight: float, samples: int, *, update: bool) -> None:
        with mark(FORWARD):
            loss = forward(state, parts, batch, samples)
        with mark(BACKWARD):
            backward(state, loss, share_of(state, parts, batch.data, weight))
        if update:
            with mark(OPTIMIZER):
                update_weights(state, parts)

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
