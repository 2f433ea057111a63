"""What ranks tell each other: errors, the time, reasons to stop, and the metrics of samples that each evaluates once."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
import rank_functions
import split_sizes
from extended import some


def test_an_error_that_cannot_be_sent_reaches_every_rank(on_ranks: Callable[..., list[Any]]) -> None:
    expected = ["RuntimeError: Holding: no room", "RuntimeError: Demanding: code 7", "KeyError: 'gone'"]
    assert on_ranks(rank_functions.errors, 2) == [expected, expected]


def test_ranks_whose_clocks_differ_agree(on_ranks: Callable[..., list[Any]]) -> None:
    assert on_ranks(rank_functions.agreed, 2) == [[5.0, "", 6.0, "SIGTERM", 7.0, "", 8.0, "a time limit"]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("ranks", some([2, 3, 4], 0))
def test_splits_of_many_sizes_give_the_same_numbers_on_any_number_of_ranks(
    on_ranks: Callable[..., list[Any]], ranks: int
) -> None:
    # One process, without a process group.
    expected = json.loads(json.dumps(split_sizes.all_found()))  # JSON keeps every bit of a float
    found = on_ranks(split_sizes.by_strategy, ranks)
    for strategy, kinds in (("ddp", ("classes", "numbers")), ("fsdp", ("classes",))):
        for one, *parts in zip(expected, *(each[strategy] for each in found), strict=True):
            for kind in kinds:
                ids = itertools.chain.from_iterable(part[kind]["ids"] for part in parts)
                assert sorted(ids) == one[kind]["ids"]
                assert all(part[kind]["values"] == one[kind]["values"] for part in parts)
    sizes = [size for size in split_sizes.SIZES for _ in split_sizes.BATCHES]
    for size, one in zip(sizes, expected, strict=True):
        assert one["classes"]["ids"] == list(range(size))
        if size == 0:
            assert "no sample" in one["classes"]["values"]
            continue
        assert set(one["classes"]["values"]) == {"loss", "accuracy", "fading"}
        assert set(one["numbers"]["values"]) == {"loss", "mae", "rmse", "fading"}
