"""What ranks tell each other and compare: errors, the time, reasons to stop, metrics, what each begins with, and buffers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import rank_functions
import torch
from extended import some
from torch import nn

from runner.base.errors import UserError
from runner.distributed import gather
from runner.distributed.world import World
from runner.run import ranks


def test_an_error_that_cannot_be_sent_reaches_every_rank(on_ranks: Any) -> None:
    expected = ["RuntimeError: Holding: no room", "RuntimeError: Demanding: code 7", "KeyError: 'gone'"]
    assert on_ranks(rank_functions.errors, 2) == [expected, expected]


def test_ranks_whose_clocks_differ_agree(on_ranks: Any) -> None:
    assert on_ranks(rank_functions.agreed, 2) == [[5.0, "", 6.0, "SIGTERM", 7.0, "", 8.0, "a time limit"]] * 2


@pytest.mark.slow
@pytest.mark.parametrize("count", some([2, 3, 4], 0))
def test_splits_of_many_sizes_give_the_same_numbers_on_any_number_of_ranks(on_ranks: Any, count: int) -> None:
    # One process, without a process group.
    expected = json.loads(json.dumps(rank_functions.evaluated_splits()))  # JSON keeps every bit of a float
    found = on_ranks(rank_functions.evaluated, count)
    for strategy, kinds in (("ddp", ("classes", "numbers")), ("fsdp", ("classes",))):
        for one, *parts in zip(expected, *(each[strategy] for each in found), strict=True):
            for kind in kinds:
                ids = itertools.chain.from_iterable(part[kind]["ids"] for part in parts)
                assert sorted(ids) == one[kind]["ids"]
                assert all(part[kind]["values"] == one[kind]["values"] for part in parts)
    sizes = [size for size in rank_functions.SIZES for _ in rank_functions.BATCHES]
    for size, one in zip(sizes, expected, strict=True):
        assert one["classes"]["ids"] == list(range(size))
        if size == 0:
            assert "no sample" in one["classes"]["values"]
            continue
        assert set(one["classes"]["values"]) == {"loss", "accuracy", "fading"}
        assert set(one["numbers"]["values"]) == {"loss", "mae", "rmse", "fading"}


def first_of_two(other: Callable[[dict[str, str]], dict[str, str]]) -> Any:
    """The world of rank 0, in which rank 1 compares what a function makes of the values of rank 0."""
    return mock.Mock(size=2, gather=lambda own: [own, other(own)])


@pytest.mark.parametrize("cause", ["version of torch", "data", "config", "initial weights"])
def test_a_rank_that_begins_with_something_else_is_named(monkeypatch: pytest.MonkeyPatch, cause: str) -> None:
    monkeypatch.setattr(ranks.stored, "dump", lambda config: "")
    run = mock.Mock(model=nn.Linear(2, 2))
    run.state.loss = nn.MSELoss()
    ranks.check_same(run, first_of_two(lambda own: own))
    with pytest.raises(UserError, match=f"rank 1 of 2 has (a )?different {cause} from rank 0"):
        ranks.check_same(run, first_of_two(lambda own: {name: own[name] + "x" * (cause in name) for name in own}))


@pytest.mark.parametrize(
    ("step", "changed", "named"), [(1, "hidden", ["hidden"]), (11, "queue", []), (10, "queue", ["queue"])]
)
def test_buffers_that_differ_between_ranks_are_named_once(
    monkeypatch: pytest.MonkeyPatch, step: int, changed: str, named: list[str]
) -> None:
    model, directory = nn.Sequential(nn.BatchNorm1d(4)), mock.Mock()  # running statistics may differ
    model.register_buffer("hidden", torch.zeros(4))
    model.register_buffer("queue", torch.zeros(4))
    compared = ranks.RankBuffers(mock.Mock(model=model, loss=nn.MSELoss()), directory)
    for number in range(1, 12):
        found = {"0.running_mean", changed} if number >= step else {"0.running_mean"}
        other = first_of_two(lambda own, found=found: {name: "x" if name in found else own[name] for name in own})
        monkeypatch.setattr(ranks, "world", lambda other=other: other)
        compared.on_step(None)
    said = [call.args[0] for call in directory.console.warn.call_args_list]
    assert [f"are kept: {name};" in text for name, text in zip(named, said, strict=True)] == [True] * len(named)


def test_gather_refuses_what_has_no_row_for_each_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "world", lambda: World(1, 2))
    with gather.training_on(16, whole=True):
        with pytest.raises(ValueError, match="8 here, got 16: gather each view by itself"):
            gather.gather(torch.zeros(16, 2))
        with pytest.raises(ValueError, match="a tensor without dimensions"):
            gather.gather(torch.tensor(1.0))
