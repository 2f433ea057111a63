"""Shapes and dtypes at the borders of every module: noted in the first batch, compared in all others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from runner.config.errors import UserError
from runner.instrument.nested import tensors_in
from runner.instrument.observer import Observer, module_label


@dataclass(frozen=True)
class _Seen:
    """Shapes and dtypes of the tensors that went into a module and came out, and the size of the batch."""

    given: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    gave: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    batch: int

    def differs(self, first: _Seen) -> str:
        """`takes` or `gives` if these tensors are others than those of the first batch, apart from its size."""
        for side, now, then in (("takes", self.given, first.given), ("gives", self.gave, first.gave)):
            if len(now) != len(then) or not all(map(self._alike, now, then, [first.batch] * len(now))):
                return side
        return ""

    def _alike(self, now: Any, then: Any, batch: int) -> bool:
        (shape, dtype), (before, dtype_before) = now, then
        if dtype != dtype_before or shape[1:] != before[1:] or len(shape) != len(before):
            return False
        # The first axis is the batch, or a multiple of it, such as heads or windows of each sample; or has nothing to do
        # with it.
        return not shape or shape[0] == before[0] or shape[0] * batch == before[0] * self.batch

    def shown(self, side: str) -> str:
        """The tensors of a side for people, `B` for the size of the batch."""
        tensors = self.given if side == "takes" else self.gave
        return ", ".join(f"{str(dtype).removeprefix('torch.')} {self._axes(shape)}" for shape, dtype in tensors) or "-"

    def _axes(self, shape: tuple[int, ...]) -> str:
        first = [str(size) for size in shape[:1]]
        if shape and self.batch and shape[0] % self.batch == 0:
            times = shape[0] // self.batch
            first = ["B" if times == 1 else f"{times}B"] if times else first
        return f"({', '.join([*first, *map(str, shape[1:])])})"


class ShapeWatch:
    """Checks the inputs and outputs of every module of a model with hooks.

    Training and evaluation are checked separately, as some models return more in training. A module that is called several times
    in a forward pass is compared call by call.
    """

    def __init__(self, model: nn.Module, show: Callable[[list[list[str]]], None]) -> None:
        self._model, self._show = model, show
        self._first: dict[tuple[bool, str, int], _Seen] = {}
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
        seen = _Seen(_borders(inputs), _borders(output), self._batch)
        key = (self._training, name, self._calls[name])
        self._calls[name] += 1
        if self._training not in self._expected:
            self._first[key] = seen
        elif key in self._first and (side := seen.differs(self._first[key])):
            raise self._error(name, module, side, seen.shown(side), self._first[key].shown(side))
        if not name:
            self._end()

    def _end(self) -> None:
        self._inside = False
        is_first = self._training not in self._expected
        expected = self._expected.setdefault(self._training, self._calls.copy())
        for name in {**expected, **self._calls}:
            if expected[name] != self._calls[name]:
                now, then = (f"called {count} times" for count in (self._calls[name], expected[name]))
                raise self._error(name, self._model.get_submodule(name), "is", now, then)
        if self._training and is_first:
            self._show(self._rows())

    def _error(self, name: str, module: nn.Module, verb: str, now: str, then: str) -> UserError:
        where = "training" if self._training else "evaluation"
        return UserError(
            "watch.shapes",
            f"{module_label(name, module, 'the model')} {verb} {now} in batch {self._batches[self._training]} of {where}, "
            f"and {then} in the first",
            "modules whose shapes and dtypes follow from the size of the batch alone",
        )

    def _rows(self) -> list[list[str]]:
        modules = dict(self._model.named_modules())
        return [
            [name or "(model)", type(modules[name]).__name__, seen.shown("takes"), seen.shown("gives")]
            for (training, name, _), seen in self._first.items()
            if training
        ]


def _borders(value: Any) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors_in(value))
