"""Finds values that are not finite."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from runner.instrument.nested import tensors_in
from runner.instrument.observer import Observer

_NAMED = 8  # names that a sentence lists


def is_finite(value: Any) -> bool:
    """True if every floating-point tensor in nested containers is finite; waits for the device."""
    tensors = (tensor.detach() for tensor in tensors_in(value) if tensor.is_floating_point())
    stored = (tensor if tensor.layout is torch.strided else tensor.coalesce().values() for tensor in tensors)
    return all(bool(tensor.isfinite().all()) for tensor in stored)


@contextlib.contextmanager
def nonfinite_outputs(model: nn.Module) -> Iterator[list[str]]:
    """Collect the names of modules whose output is not finite, in the order in which they end: inner ones first."""
    found: list[str] = []

    def look(name: str, module: nn.Module, inputs: list[Any], output: Any) -> None:
        if not is_finite(output):
            found.append(name)

    with Observer(model, after=look):
        yield found


def nonfinite_samples(values: Tensor, indices: Tensor) -> str:
    """The samples with an element that is not finite, such as `sample 7` or `samples 7, 12 and 30 more`, or nothing.

    Args:
        values: (B, ...).
        indices: identity of each sample, (B,).
    """
    values = values.detach()
    if not values.is_floating_point() or values.shape[:1] != indices.shape:
        return ""
    wrong = indices[~values.flatten(1).isfinite().all(1) if values.ndim > 1 else ~values.isfinite()].tolist()
    return f"sample{'s' * (len(wrong) > 1)} {join_names(map(str, wrong))}" if wrong else ""


def join_names(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    listed = list(names)
    more = len(listed) - _NAMED
    return ", ".join(listed[:_NAMED]) + (f" and {more} more" if more > 0 else "")
