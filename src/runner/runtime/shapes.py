"""Shapes and dtypes at the borders of every module: noted in the first batch, compared in all others."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from runner.base.errors import UserError
from runner.instrument.nested import tensors_in
from runner.instrument.observer import Observer, module_label

COLUMNS = ["module", "type", "takes", "gives"]


@dataclass(frozen=True)
class _Side:
    """Shapes and dtypes of the tensors that went into a module, or came out, and the size of the batch."""

    tensors: list[tuple[torch.dtype, tuple[int, ...]]]
    batch: int

    def is_like(self, first: _Side) -> bool:
        """True if these tensors are those of the first batch, apart from its size."""
        # The first axis is the batch, or a multiple of it, such as heads or windows of each sample; or has nothing to do with it.
        return len(self.tensors) == len(first.tensors) and all(
            (dtype, len(shape), shape[1:]) == (dtype_before, len(before), before[1:])
            and (shape[:1] == before[:1] or shape[0] * first.batch == before[0] * self.batch)
            for (dtype, shape), (dtype_before, before) in zip(self.tensors, first.tensors, strict=True)
        )

    def __str__(self) -> str:
        """The tensors for people, `B` for the size of the batch."""
        parts = []
        for dtype, shape in self.tensors:
            axes = [str(size) for size in shape]
            if shape and shape[0] and self.batch and shape[0] % self.batch == 0:
                axes[0] = "B" if shape[0] == self.batch else f"{shape[0] // self.batch}B"
            parts.append(f"{str(dtype).removeprefix('torch.')} ({', '.join(axes)})")
        return ", ".join(parts) or "-"


_Calls = dict[str, list[dict[str, _Side]]]  # what each module takes and gives, call by call


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
        # The model itself begins, so a table always shows one forward pass
        if not name:
            rows.clear()
            running.clear()
            batch = next((len(tensor) for tensor in tensors_in(inputs) if tensor.ndim), 0)
        row = [name or "(model)", type(module).__name__, str(_side(inputs, batch)), "fails"]
        # Only the innermost module that runs can be the one that fails
        for outer in running:
            outer[-1] = "-"
        rows.append(row)
        running.append(row)

    def end(name: str, module: nn.Module, inputs: list[Any], output: Any) -> None:
        if running:
            running.pop()[-1] = str(_side(output, batch))
        if running:
            running[-1][-1] = "fails"

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
    """Checks the inputs and outputs of every module of a model with hooks, after each forward pass.

    Training and evaluation are checked separately, as some models return more in training. A module that is called several times
    in a forward pass is compared call by call.
    """

    def __init__(self, model: nn.Module, show: Callable[[list[list[str]]], None]) -> None:
        self._model, self._show = model, show
        self._first: dict[bool, _Calls] = {}  # of the first batch in training, and in evaluation
        self._calls: _Calls | None = (
            None  # None outside of a forward pass, where recomputing in backward calls modules too
        )
        self._batches: Counter[bool] = Counter()
        self._batch = 0
        Observer(model, before=self._begin, names=[""])
        Observer(model, after=self._note)

    def _begin(self, name: str, module: nn.Module, inputs: list[Any]) -> None:
        tensors = tensors_in(inputs)
        self._batch = len(tensors[0]) if tensors and tensors[0].ndim else 0
        self._batches[module.training] += 1
        self._calls = {}

    def _note(self, name: str, module: nn.Module, inputs: list[Any], output: Any) -> None:
        if self._calls is None:
            return
        sides = {"takes": _side(inputs, self._batch), "gives": _side(output, self._batch)}
        self._calls.setdefault(name, []).append(sides)
        if name:
            return
        calls, self._calls = self._calls, None
        training = module.training
        if training in self._first:
            self._compare(calls, self._first[training])
            return
        self._first[training] = calls
        if training:
            kinds = {name: type(module).__name__ for name, module in self._model.named_modules()}
            self._show(
                [[name or "(model)", kinds[name], *map(str, each.values())] for name in calls for each in calls[name]]
            )

    def _compare(self, calls: _Calls, first: _Calls) -> None:
        for name in {**first, **calls}:
            now, before = calls.get(name, []), first.get(name, [])
            if len(now) != len(before):
                raise self._error(name, f"is called {len(now)} times", f"called {len(before)} times")
            for sides, expected in zip(now, before, strict=True):
                for verb, side in sides.items():
                    if not side.is_like(expected[verb]):
                        raise self._error(name, f"{verb} {side}", str(expected[verb]))

    def _error(self, name: str, now: str, then: str) -> UserError:
        training = self._model.training
        batch = f"batch {self._batches[training]} of {'training' if training else 'evaluation'}"
        label = module_label(name, self._model.get_submodule(name), "the model")
        return UserError(
            "watch.shapes",
            f"{label} {now} in {batch}, and {then} in the first",
            "modules whose shapes and dtypes follow from the size of the batch alone",
        )


def _side(value: Any, batch: int) -> _Side:
    return _Side([(tensor.dtype, tuple(tensor.shape)) for tensor in tensors_in(value)], batch)
