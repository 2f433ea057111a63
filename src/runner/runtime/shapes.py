"""Shapes and dtypes at every module, by forward hooks, for `watch.shapes`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from runner.instrument.nested import tensors_in
from runner.instrument.observer import Observer

COLUMNS = ["module", "type", "takes", "gives"]


@contextlib.contextmanager
def watching_shapes(
    model: nn.Module,
    lines: Callable[[list[str], list[list[str]]], list[str]],
    show: Callable[[list[list[str]]], None] = lambda rows: None,
) -> Iterator[None]:
    """Within, `show` gets a row for each module of the first forward pass, in the order in which the modules begin.

    If a forward pass fails, the rows of it are added to the notes of the error, in the `lines` that are made of `COLUMNS` and rows.
    """
    rows, running, passes = list[list[str]](), list[list[str]](), 0

    def begin(name: str, module: nn.Module, inputs: list[Any]) -> None:
        if not name:  # the model itself: a forward pass begins
            rows.clear()
            running.clear()
        rows.append([name or "(model)", type(module).__name__, _shapes(inputs), "fails"])
        running.append(rows[-1])

    def end(name: str, module: nn.Module, inputs: list[Any], output: Any) -> None:
        nonlocal passes
        if running:
            running.pop()[-1] = _shapes(output)
        if not name:
            passes += 1
            if passes == 1:
                show([*rows])

    try:
        with Observer(model, before=begin, after=end):
            yield
    except Exception as error:
        if running:
            error.add_note("shapes up to the module that fails\n" + "\n".join(lines(COLUMNS, rows)))
        raise


def _shapes(value: Any) -> str:
    """The tensors in nested containers, such as `float32 (8, 3, 4, 4)`."""
    tensors = (f"{str(each.dtype).removeprefix('torch.')} {tuple(each.shape)}" for each in tensors_in(value))
    return ", ".join(tensors) or "-"
