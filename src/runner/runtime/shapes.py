"""Shapes and dtypes at the borders of every module: noted in the first batch, compared in all others."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from runner.config.errors import UserError
from runner.instrument.nested import tensors_in
from runner.instrument.observer import Observer, module_label

COLUMNS = ["module", "type", "takes", "gives"]


@dataclass(frozen=True)
class _Side:
    """Shapes and dtypes of the tensors that went into a module, or came out, and the size of the batch."""

    tensors: list[tuple[torch.dtype, tuple[int, ...]]]
    batch: int

    def is_like(self, first: _Side) -> bool:
        """Whether these tensors are those of the first batch, apart from its size."""
        return (
            len(self.tensors) == len(first.tensors)
            and all(
                dtype == dtype_before
                and len(shape) == len(before)
                and shape[1:] == before[1:]
                # The first axis is the batch, or a multiple of it, such as heads or windows of each sample; or has nothing to do
                # with it.
                and (shape[:1] == before[:1] or shape[0] * first.batch == before[0] * self.batch)
                for (dtype, shape), (dtype_before, before) in zip(self.tensors, first.tensors, strict=True)
            )
        )

    def __str__(self) -> str:
        """The tensors for people, `B` for the size of the batch."""
        return (
            ", ".join(f"{str(dtype).removeprefix('torch.')} {self._axes(shape)}" for dtype, shape in self.tensors)
            or "-"
        )

    def _axes(self, shape: tuple[int, ...]) -> str:
        axes = [str(size) for size in shape]
        if shape and shape[0] and self.batch and shape[0] % self.batch == 0:
            axes[0] = "B" if shape[0] == self.batch else f"{shape[0] // self.batch}B"
        return f"({', '.join(axes)})"


@contextlib.contextmanager
def shapes_on_failure(
    model: nn.Module, wanted: bool, table: Callable[[list[str], list[list[str]]], list[str]]
) -> Iterator[None]:
    """If the block raises in a forward pass, add a table of the modules up to the one that fails to the error's notes.

    `table` makes lines of `COLUMNS` and rows; of the module that fails, the last cell says so.
    """
    rows, running, batch = list[list[str]](), list[list[str]](), 0

    def begin(name: str, module: nn.Module, inputs: list[Any]) -> None:
        nonlocal batch
        if not name:
            rows.clear()
            running.clear()
            batch = next((len(tensor) for tensor in tensors_in(inputs) if tensor.ndim), 0)
        row = [name or "(model)", type(module).__name__, _side(inputs), "fails"]
        for outer in running:
            outer[-1] = "-"
        rows.append(row)
        running.append(row)

    def end(name: str, module: nn.Module, inputs: list[Any], output: Any) -> None:
        if running:
            running.pop()[-1] = _side(output)
        if running:
            running[-1][-1] = "fails"

    def _side(value: Any) -> str:
        return str(_Side([(tensor.dtype, tuple(tensor.shape)) for tensor in tensors_in(value)], batch))

    if not wanted:
        yield
        return
    try:
        with Observer(model, before=begin), Observer(model, after=end):
            yield
    except Exception as error:
        if running:
            error.add_note("shapes up to the module that fails\n" + "\n".join(table(COLUMNS, rows)))
        raise


class ShapeWatch:
    """Checks the inputs and outputs of every module of a model with hooks.

    Training and evaluation are checked separately, as some models return more in training. A module that is called several times
    in a forward pass is compared call by call.
    """

    def __init__(self, model: nn.Module, show: Callable[[list[list[str]]], None]) -> None:
        self._model, self._show = model, show
        self._first: dict[tuple[bool, str, int], dict[str, _Side]] = {}
        self._calls: Counter[str] = Counter()
        self._expected: dict[bool, Counter[str]] = {}
        self._batches: Counter[bool] = Counter()
        self._batch = 0
        self._inside = False  # recomputing in backward calls modules outside of a forward pass
        self._training = model.training
        Observer(model, before=self._begin, names=[""])
        Observer(model, after=self._look)

    def _begin(self, name: str, module: nn.Module, inputs: list[Any]) -> None:
        tensors = tensors_in(inputs)
        self._batch = len(tensors[0]) if tensors and tensors[0].ndim else 0
        self._inside, self._training = True, module.training
        self._calls.clear()
        self._batches[self._training] += 1
        if self._training not in self._expected:  # what a pass noted that failed half-way is not all there is
            self._first = {key: seen for key, seen in self._first.items() if key[0] != self._training}

    def _look(self, name: str, module: nn.Module, inputs: list[Any], output: Any) -> None:
        if not self._inside:
            return
        sides = {
            verb: _Side([(tensor.dtype, tuple(tensor.shape)) for tensor in tensors_in(value)], self._batch)
            for verb, value in (("takes", inputs), ("gives", output))
        }
        key = (self._training, name, self._calls[name])
        self._calls[name] += 1
        if self._training not in self._expected:
            self._first[key] = sides
        for verb, first in self._first.get(key, {}).items():
            if not sides[verb].is_like(first):
                raise self._error(name, module, f"{verb} {sides[verb]}", str(first))
        if not name:
            self._end()

    def _end(self) -> None:
        self._inside = False
        is_first = self._training not in self._expected
        expected = self._expected.setdefault(self._training, self._calls.copy())
        for name in {**expected, **self._calls}:
            if expected[name] != self._calls[name]:
                now, then = (f"called {count} times" for count in (self._calls[name], expected[name]))
                raise self._error(name, self._model.get_submodule(name), f"is {now}", then)
        if self._training and is_first:
            self._show(self._rows())

    def _error(self, name: str, module: nn.Module, now: str, then: str) -> UserError:
        where = "training" if self._training else "evaluation"
        return UserError(
            "watch.shapes",
            f"{module_label(name, module, 'the model')} {now} in batch {self._batches[self._training]} of {where}, "
            f"and {then} in the first",
            "modules whose shapes and dtypes follow from the size of the batch alone",
        )

    def _rows(self) -> list[list[str]]:
        modules = dict(self._model.named_modules())
        return [
            [name or "(model)", type(modules[name]).__name__, *map(str, sides.values())]
            for (training, name, _), sides in self._first.items()
            if training
        ]
