"""Tensors are found in whatever a module may take or return."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from runner.instrument.nested import first_tensor, named_tensors, parts_of_rows, tensors_in

A, B, C = (torch.full((1,), float(number)) for number in range(3))


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


class Output(OrderedDict[str, Tensor]):
    """A class of its own, as some libraries return."""


@pytest.mark.parametrize(
    "value",
    [
        [A, B, C],
        (A, [B, (C,)]),
        {"b": A, "a": B, "c": C},
        Output(b=A, a=B, c=C),
        UserDict(b=A, a=[B, C]),
        [Pair(A, B), None, 3, "text", C],
        {"nested": Output(x=A), "rest": [Output(y=B), C]},
    ],
    ids=lambda value: type(value).__name__,
)
def test_tensors_are_found_in_order(value: Any) -> None:
    assert [tensor.item() for tensor in tensors_in(value)] == [0, 1, 2]
    assert first_tensor(value) is A


@pytest.mark.parametrize("make", [lambda: None, list, dict, lambda: "text"])
def test_nothing_is_found_where_there_is_none(make: Callable[[], Any]) -> None:
    assert tensors_in(make()) == []
    assert first_tensor(make()) is None


def test_a_named_result_of_torch_is_a_container() -> None:
    assert len(tensors_in(torch.eye(3).max(dim=0))) == 2


def test_each_tensor_has_its_dotted_place() -> None:
    value = {"state": {0: {"exp_avg": A}}, "list": [B, Output(x=C)]}
    assert [name for name, _ in named_tensors(value)] == ["state.0.exp_avg", "list.0", "list.1.x"]
    assert [name for name, _ in named_tensors(A, "weight")] == ["weight"]


def test_the_rows_of_a_batch_are_divided_wherever_they_are_in_it() -> None:
    batch = {
        "vectors": torch.arange(10).view(5, 2),
        "pair": (torch.arange(5), [f"name {number}" for number in range(5)]),
        "scale": torch.tensor(3.0),
        "levels": [torch.arange(5), torch.zeros(5, 1)],
    }
    first, second = parts_of_rows(batch, 5, 2)
    assert first["vectors"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert second["pair"][0].tolist() == [3, 4]
    assert second["pair"][1] == ["name 3", "name 4"]
    assert [len(level) for level in second["levels"]] == [2, 2]
    assert float(second["scale"]) == 3
