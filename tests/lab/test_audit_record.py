"""Two records of a step are compared bit by bit, in the order in which they were made."""

from __future__ import annotations

import math

import pytest
import torch

from runner.lab.audit.record import Difference, Entry, Recorder, amount_of, differences, same


def entry(value: object, budget: int = 1000) -> Entry:
    recorder = Recorder(budget)
    recorder.add("weight", "w", value)
    return recorder.entries[0]


@pytest.mark.parametrize("budgets", [(1000, 1000), (0, 0), (1000, 0)], ids=["kept", "fingerprints", "one of each"])
@pytest.mark.parametrize(
    ("a", "b", "equal"),
    [
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, -math.nan]), True),
        (torch.tensor([0.0]), torch.tensor([-0.0]), False),
        (torch.tensor([1.0]), torch.tensor([1.0 + 2**-23]), False),
        (torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 2.0]]), False),
        (torch.tensor([1]), torch.tensor([1.0]), False),
        (torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([1.0], dtype=torch.bfloat16), True),
        (torch.tensor([True]), torch.tensor([False]), False),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 3j]), False),
        (torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.zeros(2, 3, 4, 4), True),
        (torch.tensor([math.inf]), torch.tensor([math.inf]), True),
    ],
)  # fmt: skip
def test_tensors_are_the_same_if_every_bit_is_but_those_of_nan(
    a: torch.Tensor, b: torch.Tensor, equal: bool, budgets: tuple[int, int]
) -> None:
    assert same(entry(a, budgets[0]), entry(b, budgets[1])) is equal


def test_what_is_no_tensor_is_compared_by_its_text() -> None:
    assert same(entry((3, (1, 2), None)), entry((3, (1, 2), None)))
    assert not same(entry((3, (1, 2), None)), entry((3, (1, 3), None)))


def test_a_record_holds_what_the_tensors_were_and_no_more_than_it_may() -> None:
    recorder = Recorder(16)
    tensor = torch.ones(4)
    recorder.add("weight", "first", tensor)
    recorder.add("weight", "second", tensor)
    tensor.zero_()
    kept, other = recorder.entries
    assert kept.tensor is not None
    assert kept.tensor.tolist() == [1, 1, 1, 1]
    assert other.tensor is None
    assert other.digest == kept.digest != entry(tensor).digest


def test_the_first_difference_is_the_first_that_was_computed_and_a_second_call_has_a_place_of_its_own() -> None:
    records = []
    for last in (2.0, 3.0):
        recorder = Recorder(1000)
        for name, value in (("z", 1.0), ("a", 1.0), ("a", last), ("z", last)):
            recorder.add("activation", name, torch.tensor([value]))
        records.append(recorder.entries)
    found = differences(*records)
    assert [(each.entry.name, each.entry.tensor) for each in found] == [
        ("a", torch.tensor([2.0])),
        ("z", torch.tensor([2.0])),
    ]
    assert differences(records[0], records[0]) == []
    lacking = differences(records[0][:3], records[0])
    assert [(each.a, each.entry.name) for each in lacking] == [(None, "z")]


def test_the_amount_says_how_many_elements_how_far_and_where() -> None:
    a, b = torch.tensor([[1.0, 2.0], [4.0, 0.0]]), torch.tensor([[1.0, 2.5], [5.0, 0.0]])
    found = amount_of(Difference(entry(a), entry(b)))
    assert found == {
        "elements": 4,
        "differing": 2,
        "largest": 1.0,
        "relative": pytest.approx(0.2),
        "place": [0, 1],
        "values": [2.0, 2.5],
    }
    endless = amount_of(Difference(entry(torch.tensor([1.0, math.nan])), entry(torch.tensor([2.0, 0.0]))))
    assert endless is not None
    assert (endless["differing"], endless["largest"]) == (2, None)
    assert amount_of(Difference(entry(a), entry(b[0]))) is None
    assert amount_of(Difference(entry(a, 0), entry(b))) is None
