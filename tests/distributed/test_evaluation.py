"""Several ranks evaluate what one process evaluates: each sample once, and every number to the last digit."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import split_sizes
from extended import some

from rank_pool import RankPool


@pytest.mark.slow
@pytest.mark.parametrize("ranks", some([2, 3, 4], 0))
def test_splits_of_many_sizes_give_the_same_numbers_on_any_number_of_ranks(
    pool: RankPool, tmp_path: Path, ranks: int
) -> None:
    # One process, without a process group.
    expected = json.loads(json.dumps(split_sizes.all_found()))  # JSON keeps every bit of a float
    pool(split_sizes.on_a_rank, tmp_path, ranks)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
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
