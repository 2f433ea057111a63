"""What is not finite is found, named by module and by sample."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from runner.instrument.nonfinite import is_finite, join_names, nonfinite_outputs, nonfinite_samples


@pytest.mark.parametrize(
    ("value", "finite"),
    [
        (torch.ones(3), True),
        (torch.tensor([1.0, math.inf]), False),
        ({"a": torch.ones(2), "b": [torch.tensor(math.nan)]}, False),
        (torch.tensor([1, 2]), True),
        (torch.tensor([[0.0, math.nan]]).to_sparse(), False),
        (torch.tensor([[0.0, 1.0]]).to_sparse(), True),
        (None, True),
    ],
)
def test_every_tensor_counts(value: object, finite: bool) -> None:
    assert is_finite(value) is finite


def test_modules_are_named_from_the_inside_out() -> None:
    model = nn.Sequential(nn.Identity(), nn.Sequential(nn.LogSigmoid(), nn.Softplus()))
    with nonfinite_outputs(model) as found:
        model(torch.full((1, 2), -math.inf))
    assert found == ["0", "1.0", "1", ""] or found[:2] == ["0", "1.0"]
    with nonfinite_outputs(model) as found:
        model(torch.ones(1, 2))
    assert found == []


def test_samples_are_named_by_their_index() -> None:
    values = torch.zeros(4, 2)
    indices = torch.tensor([7, 12, 3, 9])
    assert nonfinite_samples(values, indices) == ""
    values[1, 0] = math.nan
    assert nonfinite_samples(values, indices) == "sample 12"
    values[3] = math.inf
    assert nonfinite_samples(values, indices) == "samples 12, 9"
    assert nonfinite_samples(values[:, 0], indices) == "samples 12, 9"
    assert nonfinite_samples(torch.tensor(math.nan), indices) == ""


def test_a_long_list_is_cut() -> None:
    assert join_names(map(str, range(10))) == "0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
