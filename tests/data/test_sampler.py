"""Sample order is a pure function of seed and epoch, known in any part without the rest, and looks random."""

from __future__ import annotations

import functools
import itertools
import math
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_loaders import ARRAYS, PART
from torch import Tensor

from runner.data import sampler as module
from runner.data.sampler import LISTED, BalancedOrder, ClassBalance, EpochOrder, RepeatFactors, sample_of

seeds = st.integers(0, 2**63 - 1)
SMALL, LARGE = 1000, LISTED + 1
BOTH = pytest.mark.parametrize("samples", [SMALL, LARGE], ids=["listed", "computed"])


@functools.cache
def whole(samples: int, seed: int, epoch: int, shuffle: bool = True) -> Tensor:
    return EpochOrder(samples, seed, epoch, shuffle).slice(0, samples)


def computed(samples: int, seed: int, epoch: int) -> np.ndarray:
    """The permutation that is computed, of few samples too."""
    return EpochOrder(samples, seed, epoch)._permuted(np.arange(samples, dtype=np.uint64)).astype(np.int64)


@given(samples=st.integers(1, 5000), seed=seeds, epoch=st.integers(0, 10_000))
def test_the_computed_order_is_one_to_one_for_any_number_of_samples(samples: int, seed: int, epoch: int) -> None:
    assert np.array_equal(np.sort(computed(samples, seed, epoch)), np.arange(samples))


AROUND_LIMITS = [limit + more for limit in (LISTED, 2**17) for more in (-1, 0, 1)]


@pytest.mark.parametrize("samples", [*AROUND_LIMITS, 65_543, 99_991, 317**2, 317**2 + 1, 317 * 318, 300_007])
def test_every_sample_comes_once_in_orders_that_are_too_long_for_a_list(samples: int) -> None:
    found = whole(samples, 3, 5)
    assert torch.equal(found.sort().values, torch.arange(samples))
    assert found.dtype == torch.int64


def test_up_to_a_size_the_order_is_the_one_of_torch() -> None:
    for samples in (7, LISTED):
        generator = torch.Generator().manual_seed(module.hash_ints(3, 4, 0))
        assert torch.equal(whole(samples, 3, 4), torch.randperm(samples, generator=generator))


@settings(deadline=None)
@given(start=st.integers(0, LARGE + 5), length=st.integers(0, 300), seed=seeds)
@BOTH
def test_any_part_of_an_order_is_that_part_of_the_whole(samples: int, start: int, length: int, seed: int) -> None:
    order = EpochOrder(samples, 3, 1)
    assert torch.equal(order.slice(start, start + length), whole(samples, 3, 1)[start : start + length])


@BOTH
@pytest.mark.parametrize("size", [1, 7, 64, 20_000, 10**6])
def test_the_order_does_not_depend_on_the_pieces_that_it_is_read_in(samples: int, size: int) -> None:
    if size == 1:
        samples = min(samples, SMALL)
    order, expected = EpochOrder(samples, 3, 1), whole(samples, 3, 1)
    assert torch.equal(torch.cat(list(order.pieces(size, 0, samples))), expected)
    start = 3 * size
    later = list(order.pieces(size, start, samples + 100))
    assert torch.equal(torch.cat([expected[:0], *later]), expected[start:])
    assert all(len(piece) == size for piece in later[:-1])


def test_a_part_of_an_order_of_a_billion_samples_takes_memory_for_that_part_alone() -> None:
    order = EpochOrder(10**9, 3, 1)
    order.slice(0, 64)
    tracemalloc.start()
    try:
        part = order.slice(999_990_000, 10**9 + 50)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(part) == len(set(part.tolist())) == 10_000
    assert part.min() >= 0
    assert part.max() < 10**9
    assert most < 2 * 2**20
    assert EpochOrder(10**15, 0, 0).slice(10**14, 10**14 + 3).unique().numel() == 3


@BOTH
def test_the_global_generators_are_untouched(samples: int) -> None:
    before, numpy_before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore[index,union-attr]
    whole(samples, 3, 4)
    assert torch.equal(before, torch.get_rng_state())
    assert np.random.get_state()[1].tolist() == numpy_before  # type: ignore[index,union-attr]


@pytest.mark.parametrize("samples", [64, LARGE])
def test_epochs_and_seeds_have_orders_of_their_own(samples: int) -> None:
    orders = [EpochOrder(samples, seed, epoch).slice(0, 64) for seed, epoch in itertools.product(range(6), range(6))]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(orders, 2))
    # Two orders of 64 samples agree at one place on average.
    assert max(int(a.eq(b).sum()) for a, b in itertools.combinations(orders, 2)) < 10


@pytest.mark.parametrize("epoch", [0, 1, 7])
@BOTH
def test_without_shuffling_the_order_is_that_of_the_data(samples: int, epoch: int) -> None:
    assert torch.equal(whole(samples, 3, epoch, shuffle=False), torch.arange(samples))


# Quality: the seeds are fixed, so a test gives the same verdict every time; a random order fails one in ten thousand.

P_VALUE = 1e-4


def normal_tail(z: float) -> float:
    """Chance that a normal number is as far from its mean as `z` standard deviations."""
    return math.erfc(abs(z) / math.sqrt(2))


def chi_square_tail(observed: np.ndarray, expected: float) -> float:
    """Chance of counts as uneven as these (Wilson and Hilferty's approximation)."""
    freedom = observed.size - 1
    value = float(((observed - expected) ** 2 / expected).sum())
    spread = 2 / (9 * freedom)
    return math.erfc(((value / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(2 * spread)) / 2


def test_a_sample_is_equally_likely_at_every_place() -> None:
    places = np.stack([np.argsort(computed(997, 1, epoch))[[0, 1, 500, 996]] for epoch in range(2000)])
    sizes = np.bincount(np.arange(997) * 20 // 997)
    for of_a_sample in places.T:
        counts = np.bincount(of_a_sample * 20 // 997, minlength=20)
        assert chi_square_tail(counts * (sizes.mean() / sizes), 2000 / 20) > P_VALUE


def test_any_sample_is_equally_likely_at_a_place_and_after_any_other() -> None:
    firsts, followers = np.zeros(64), np.zeros((8, 8))
    for epoch in range(3000):
        order = computed(64, 2, epoch)
        firsts[order[0]] += 1
        np.add.at(followers, (order[:-1] // 8, order[1:] // 8), 1)
    assert chi_square_tail(firsts, 3000 / 64) > P_VALUE
    # A sample does not follow itself: pairs within an eighth are rarer by one in eight.
    expected = 3000 * 63 * np.where(np.eye(8) > 0, 8 * 7, 8 * 8) / (64 * 63)
    assert chi_square_tail(followers / expected * expected.mean(), expected.mean()) > P_VALUE


@pytest.mark.parametrize("samples", [LARGE, 100_003])
def test_neither_neighbours_nor_places_a_fixed_distance_apart_go_together(samples: int) -> None:
    side = math.isqrt(samples - 1) + 1  # the rectangle that the order is computed on
    for epoch in range(3):
        order = computed(samples, 7, epoch).astype(np.float64) / samples - 0.5
        for distance in (1, 2, 3, 64, side - 1, side, side + 1, samples // 2):
            products = order[:-distance] * order[distance:] * 12
            # The mean of n products of independent uniform numbers, each with variance 1.
            assert normal_tail(float(products.mean()) * math.sqrt(len(products))) > P_VALUE
        assert normal_tail(float((order * (np.arange(samples) / samples - 0.5)).mean()) * 12 * samples**0.5) > P_VALUE


def test_neighbours_stay_neighbours_no_more_often_than_by_chance() -> None:
    kept = fixed = 0
    for epoch in range(30):
        order = computed(LARGE, 11, epoch)
        kept += int((np.abs(np.diff(order)) == 1).sum())
        fixed += int((order == np.arange(LARGE)).sum())
    # Both are Poisson: two neighbours an order, and one sample that stays where it is.
    assert normal_tail((kept - 60) / math.sqrt(60)) > P_VALUE
    assert normal_tail((fixed - 30) / math.sqrt(30)) > P_VALUE


def test_pairs_that_share_a_column_of_the_network_keep_their_distance_no_more_often_than_by_chance() -> None:
    kept, pairs = kept_in_columns()
    rows = math.isqrt(LARGE - 1) + 1
    assert normal_tail((kept - pairs / rows) / math.sqrt(pairs / rows)) > P_VALUE


def kept_in_columns() -> tuple[int, int]:
    """Of pairs that stand below each other in the rectangle, how many keep their distance in rows, and how many there are."""
    rows = math.isqrt(LARGE - 1) + 1
    columns = -(-LARGE // rows)
    kept = pairs = 0
    for seed, apart in itertools.product(range(3), (1, 2, 5, 17)):
        row = computed(LARGE, seed, 0) // columns
        kept += int(((row[apart * columns :] - row[: -apart * columns]) % rows == apart).sum())
        pairs += len(row) - apart * columns
    return kept, pairs


def test_that_statistic_finds_a_network_with_too_few_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TURNS", 4)
    kept, pairs = kept_in_columns()
    assert kept > 1.8 * pairs / (math.isqrt(LARGE - 1) + 1)


def test_orders_of_following_epochs_have_nothing_in_common() -> None:
    for seed in range(3):
        first, second = (computed(LARGE, seed, epoch).astype(np.float64) / LARGE - 0.5 for epoch in (0, 1))
        assert normal_tail(float((first * second).mean()) * 12 * LARGE**0.5) > P_VALUE


# Every class equally often; test_loaders.py has the batches

BALANCE = ClassBalance(ARRAYS.targets[PART])
SKEWED = torch.tensor([0] * 900 + [2] * 90 + [3] * 10)[torch.randperm(1000, generator=torch.Generator().manual_seed(0))]


def test_every_class_and_every_sample_of_a_class_is_drawn_equally_often() -> None:
    order = [sample_of(BalancedOrder(ClassBalance(SKEWED), 1, epoch).slice(0, 1000)) for epoch in range(60)]
    drawn = torch.cat(order)
    classes = torch.bincount(SKEWED[drawn], minlength=4) / len(drawn)
    assert classes[1] == 0
    # Four standard deviations of a share of a third in 60,000 draws.
    assert torch.allclose(classes[[0, 2, 3]], torch.tensor(1 / 3), atol=0.008)
    for number, expected in ((0, 20_000 / 900), (2, 20_000 / 90), (3, 20_000 / 10)):
        counts = torch.bincount(drawn, minlength=1000)[number == SKEWED].float()
        assert (counts - expected).abs().max() < 5 * expected**0.5
        assert 0.7 < counts.var() / expected < 1.4 or number == 3
    assert len({tuple(each.tolist()) for each in order}) == 60, "another order in every epoch"


def test_an_image_with_a_rare_class_is_drawn_more_often_by_the_root_of_its_share() -> None:
    images = [[0]] * 900 + [[0, 1]] * 64 + [[1, 2, 2]] * 16 + [[]] * 20
    order = [sample_of(BalancedOrder(RepeatFactors(images), 1, epoch).slice(0, 1000)) for epoch in range(200)]
    found = torch.bincount(torch.cat(order), minlength=1000).double()
    shares = torch.tensor([0.964] * 900 + [0.08] * 64 + [0.016] * 16 + [1.0] * 20, dtype=torch.float64)
    expected = 200_000 * shares.rsqrt() / shares.rsqrt().sum()
    # Of each image within five standard deviations, and of each group within four
    assert ((found - expected).abs() < 5 * expected.sqrt()).all()
    for group in ((0, 900), (900, 964), (964, 980), (980, 1000)):
        total = expected[slice(*group)].sum()
        assert abs(found[slice(*group)].sum() - total) < 4 * total.sqrt()


@pytest.mark.parametrize("balance", [BALANCE, RepeatFactors([[0]] * 40 + [[0, 1]] * 4 + [[]])])
def test_a_slice_is_known_without_the_rest_and_follows_the_seed(balance: ClassBalance | RepeatFactors) -> None:
    whole = BalancedOrder(balance, 5, 2).slice(0, 45)
    assert torch.equal(BalancedOrder(balance, 5, 2).slice(17, 30), whole[17:30])
    assert torch.equal(BalancedOrder(balance, 5, 2).slice(40, 99), whole[40:])
    assert len(BalancedOrder(balance, 5, 2).slice(50, 60)) == 0
    assert not torch.equal(BalancedOrder(balance, 6, 2).slice(0, 45), whole)
