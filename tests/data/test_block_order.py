"""`data.shuffle=blocks`: shards in random order, samples shuffled within windows of a few shards."""

from __future__ import annotations

import itertools
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from read_splits import read_words
from small_loaders import PART, Listed
from tar_files import cls, samples, write_tar
from torch import Tensor

from runner.base.errors import UserError
from runner.data.sampler import LISTED, AllSamples, BlockOrder, block_ends

block_sizes = st.lists(st.integers(0, 30), min_size=1, max_size=40).filter(any)
windows = st.integers(1, 45)


def ends_of(sizes: list[int]) -> Tensor:
    return torch.tensor(sizes).cumsum(0)


def whole(ends: Tensor, window: int, seed: int = 3, epoch: int = 1) -> Tensor:
    return BlockOrder(ends, window, seed, epoch).slice(0, int(ends[-1]))


def windows_of(ends: Tensor, window: int, order: Tensor) -> list[set[int]]:
    """The blocks of each window; asserts that each has all samples of `window` blocks, the last one of fewer, and no others."""
    sizes, blocks = ends.diff(prepend=torch.tensor([0])), torch.searchsorted(ends, order, right=True)
    occurring, found, start = list(dict.fromkeys(blocks.tolist())), [], 0
    assert sorted(occurring) == sizes.nonzero()[:, 0].tolist()
    for first in range(0, len(occurring), window):
        some = occurring[first : first + window]
        stop = start + int(sizes[some].sum())
        assert set(blocks[start:stop].tolist()) == set(some)
        found.append(set(some))
        start = stop
    return found


@settings(deadline=None)
@given(sizes=block_sizes, window=windows, seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 10_000))
def test_every_sample_comes_once_and_a_window_has_whole_blocks(
    sizes: list[int], window: int, seed: int, epoch: int
) -> None:
    ends = ends_of(sizes)
    order = whole(ends, window, seed, epoch)
    assert order.dtype == torch.int64
    assert order.sort().values.tolist() == list(range(len(order)))
    windows_of(ends, window, order)


@settings(deadline=None)
@given(sizes=block_sizes, window=windows, start=st.integers(0, 1300), length=st.integers(0, 300))
def test_any_part_of_an_order_is_that_part_of_the_whole(sizes: list[int], window: int, start: int, length: int) -> None:
    ends = ends_of(sizes)
    part = BlockOrder(ends, window, 3, 1).slice(start, start + length)
    assert torch.equal(part, whole(ends, window)[start : start + length])


@pytest.mark.parametrize(
    ("sizes", "window"),
    [
        ([LISTED + 1], 1),
        ([40_003, 0, 50_021, 7, 40_009], 3),  # a window that is too long for a list
        ([1237] * 101 + [1], 16),
        ([3] * 30_001, 1),
    ],
    ids=["one block", "long window", "short windows", "many windows"],
)
def test_orders_of_many_samples_are_one_to_one_and_known_in_parts(sizes: list[int], window: int) -> None:
    ends = ends_of(sizes)
    order = whole(ends, window)
    assert torch.equal(order.sort().values, torch.arange(sum(sizes)))
    windows_of(ends, window, order)
    for start in (0, 1, LISTED - 3, LISTED, len(order) - 70, len(order)):
        assert torch.equal(BlockOrder(ends, window, 3, 1).slice(start, start + 100), order[start : start + 100])
    for size in (64, 20_000):
        assert torch.equal(torch.cat(list(BlockOrder(ends, window, 3, 1).pieces(size, 0, len(order)))), order)


def test_a_part_of_an_order_of_a_billion_samples_takes_time_for_that_part_and_the_shards() -> None:
    ends = torch.arange(1, 100_001) * 10_000
    begin = time.perf_counter()
    part = BlockOrder(ends, 16, 3, 1).slice(999_990_000, 10**9 + 50)
    assert time.perf_counter() - begin < 5  # a list of all takes longer, and 8 GB
    assert len(part) == len(part.unique()) == 10_000
    assert len(torch.searchsorted(ends, part, right=True).unique()) <= 16


def test_epochs_and_seeds_have_other_windows_and_other_orders_in_them() -> None:
    ends = ends_of([20] * 64)
    found = [windows_of(ends, 4, whole(ends, 4, seed, epoch)) for seed, epoch in itertools.product(range(3), range(3))]
    for one, other in itertools.combinations(found, 2):
        assert len([window for window in one if window in other]) <= 1
    # In the order of one window, places of samples are independent of their number, and of those in other windows
    order = whole(ends, 4).view(16, 80)
    places = order.argsort(dim=1).argsort(dim=1).double()
    correlation = torch.corrcoef(torch.cat([places, torch.arange(80)[None].double()])) - torch.eye(17)
    assert correlation.abs().max() < 4.5 / 80**0.5


def test_a_window_of_all_blocks_is_a_full_shuffle() -> None:
    ends = ends_of([10] * 10)
    firsts = torch.stack([whole(ends, 10, 1, epoch)[:2] for epoch in range(4000)])
    for place in (0, 1):
        counts = torch.bincount(firsts[:, place], minlength=100).double()
        # Chi-square with 99 degrees of freedom, five standard deviations
        assert float(((counts - 40) ** 2 / 40).sum()) < 99 + 5 * (2 * 99) ** 0.5
    same_block = float((firsts[:, 0] // 10 == firsts[:, 1] // 10).double().mean())
    assert abs(same_block - 9 / 99) < 5 * (9 / 99 * 90 / 99 / 4000) ** 0.5


# Splits

ENDS = [4, 4, 13, 20, 21, 40, 44, 60]


def in_shards(ends: Any = ENDS) -> Any:
    """Sixty samples in shards."""
    dataset = Listed(range(60))
    dataset.block_ends = ends  # type: ignore[attr-defined]
    return dataset


def test_the_blocks_of_a_split_are_its_samples_in_each_shard() -> None:
    assert block_ends(in_shards(), AllSamples(60)).tolist() == ENDS
    expected = [sum(int(index) < end for index in PART) for end in ENDS]
    assert block_ends(in_shards(), PART).tolist() == expected
    assert block_ends(in_shards(), torch.tensor([5, 6, 59])).tolist() == [0, 0, 2, 2, 2, 2, 2, 3]


@pytest.mark.parametrize("ends", [[], [60, 50], [30, 59], [30, 61], [30.0, 60.0], [[30, 60]], 60], ids=str)
def test_ends_that_are_not_those_of_the_data_set_are_refused(ends: Any) -> None:
    with pytest.raises(UserError, match="does not say where its shards end") as caught:
        block_ends(in_shards(ends), AllSamples(60))
    assert caught.value.problems[0].key == "data.dataset"


# The program

SMALL = (
    "data=shards", "data.image_size=8", "data.batch_size=4", "model=mlp", "scheduler=constant", "logger=none",
    "log.progress=false", "evaluate.test=false", "data.shuffle=blocks",
)  # fmt: skip
STARTS = range(0, 48, 6)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Eight shards of six images."""
    for start in STARTS:
        write_tar(tmp_path / "shards" / f"{start:03d}.tar", samples(range(start, start + 6), cls))
    return tmp_path / "shards"


def order_of(compose: Any, epoch: int, *words: str) -> Tensor:
    """The samples of an epoch of training."""
    train = read_words(compose, *SMALL, *words).train
    batches = math.ceil(train.samples / train.loader.batch_size)
    return torch.cat([batch.indices for batch in train.loader.batches(epoch, 0, batches)])


def test_shards_of_a_run_come_whole_in_windows(root: Path, compose: Any) -> None:
    ends, words = torch.tensor(STARTS) + 6, (f"data.root={root}", "data.split.val=0", "data.split.test=0")
    orders = [order_of(compose, epoch, *words, "data.shuffle_window=1") for epoch in (0, 1)]
    for order in orders:
        assert len(windows_of(ends, 1, order)) == 8
    assert not torch.equal(*orders)
    assert len(windows_of(ends, 3, order_of(compose, 0, *words, "data.shuffle_window=3"))) == 3
    assert torch.equal(order_of(compose, 0, *words), order_of(compose, 0, *words, "data.shuffle_window=16"))
    held = order_of(compose, 0, *words[:1], "data.split.val=0.3", "data.shuffle_window=1")
    assert len((held // 6).unique_consecutive()) == 8


def test_a_window_without_blocks_is_reported(root: Path, compose: Any) -> None:
    whole = ("data.images=['0']", "transform=none", "data.normalize={mean: [0.5], std: [1]}")
    for words, reported in (((), False), (("data.shuffle=true",), True), ((*whole, "data.shuffle=false"), True)):
        warnings = read_words(compose, *SMALL, f"data.root={root}", "data.shuffle_window=2", *words).warnings
        assert any("data.shuffle_window=2 has no effect" in text for text in warnings) == reported


def test_a_killed_run_resumes_with_other_workers_to_the_same_bits(root: Path, train: Any, killed: Any) -> None:
    words = (*SMALL, f"data.root={root}", "data.shuffle_window=2", "epochs=2", "max_steps=null")
    whole_run = train(*words)
    directory = killed(5, "threads=1", "checkpoint.every_steps=1", *words)
    resumed = train(f"ckpt_path={directory}", "callbacks=none", "max_steps=null", "data.num_workers=2")
    assert resumed.summary["resumed_from"] is not None
    assert resumed.summary["weights_sha256"] == whole_run.summary["weights_sha256"]
    cached = train(*words, "data.cache=disk")
    assert cached.summary["weights_sha256"] == whole_run.summary["weights_sha256"]
    assert train(*words, "data.shuffle=true").summary["weights_sha256"] != whole_run.summary["weights_sha256"]


def test_inside_an_epoch_a_run_refuses_another_window_and_other_shards(root: Path, train: Any, rejected: Any) -> None:
    stopped = train(*SMALL, f"data.root={root}", "data.shuffle_window=2", "epochs=2", "max_steps=5")
    resume = ("train", f"ckpt_path={stopped.directory}", "max_steps=null")
    assert "data.shuffle_window: cannot change when resuming inside" in rejected(*resume, "data.shuffle_window=3").err
    write_tar(root / "006.tar", samples([*range(6, 11), 41], cls))
    assert "has other images" in rejected(*resume).err
    # The same images in the same order, in another number of files
    write_tar(root / "000.tar", samples(range(12), cls))
    (root / "006.tar").unlink()
    for words in ((), ("data.identity=ignore",)):
        assert "is divided into other shards" in rejected(*resume, *words).err


@pytest.mark.parametrize(
    ("words", "key", "reason"),
    [
        (("data=digits", "data.shuffle=blocks"), "data.shuffle", "is blocks, and the data set has no shards"),
        (("data.shuffle=blocks", "data.sampler=balanced"), "data.shuffle", "is blocks, but data.sampler=balanced"),
        (
            ("data.shuffle=blocks", "data.batch_sampler={_target_: runner.data.repeated.repeated_augmentation}"),
            "data.shuffle",
            "is blocks, and data.batch_sampler gives the order",
        ),
        (("data.shuffle=blocks", "data.shuffle_window=0"), "data.shuffle_window", "cannot be 0"),
        (("data.shuffle=block",), "data.shuffle", "did you mean 'blocks'"),
        (("data.shuffle=false", "data.sampler=balanced"), "data.shuffle", "is false, but data.sampler=balanced draws"),
        (("data.sampler=balanced", "task=regression", "loss=mse"), "data.sampler", "and task=regression has none"),
        (("data.sampler=weighted",), "data.sampler", "cannot be weighted"),
    ],
)
def test_orders_that_exclude_each_other_are_refused(
    rejected: Any, words: tuple[str, ...], key: str, reason: str
) -> None:
    result = rejected("train", *words, "logger=none", "log.progress=false")
    assert f"{key}: " in result.err
    assert reason in result.err
