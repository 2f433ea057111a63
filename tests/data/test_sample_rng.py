"""Draws are functions of (seed, epoch, sample, stream, call), and look random in each of them."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from runner.data.sample_rng import (
    SampleRNG,
    _hash,
    _hash_anywhere,
    beta,
    hash_ints,
    log_uniform,
    preserved_rng,
    seed_generators,
)

MANY = torch.arange(20_000)


def correlation(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1])


@given(
    indices=st.lists(st.integers(0, 2**40), min_size=2, max_size=40),
    cut=st.integers(1, 39),
    seed=st.integers(0, 2**63 - 1),
    epoch=st.integers(0, 10_000),
)
def test_a_batch_split_changes_no_bit(indices: list[int], cut: int, seed: int, epoch: int) -> None:
    def draw(part: list[int]) -> list[Tensor]:
        rng = SampleRNG(seed, epoch, torch.tensor(part, dtype=torch.int64), stream=2)
        return [rng.uniform(), rng.integers(17), rng.uniform()]

    parts = [draw(part) for part in (indices[:cut], indices[cut:]) if part]
    joined = [torch.cat(pieces) for pieces in zip(*parts, strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(draw(indices), joined, strict=True))


@given(seed=st.integers(0, 2**70), epoch=st.integers(0, 2**40), stream=st.integers(0, 50), count=st.integers(1, 1000))
def test_numbers_are_in_range(seed: int, epoch: int, stream: int, count: int) -> None:
    rng = SampleRNG(seed, epoch, torch.arange(500), stream)
    for values, dtype, end in ((rng.uniform(), torch.float32, 1), (rng.integers(count), torch.int64, count)):
        assert values.dtype == dtype
        assert values.min() >= 0
        assert values.max() < end


@pytest.mark.parametrize(("seed", "epoch", "stream"), [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (12345, 99, 3)])
def test_draws_over_the_samples_are_uniform(seed: int, epoch: int, stream: int) -> None:
    rng = SampleRNG(seed, epoch, MANY, stream)
    for values in (rng.uniform(), rng.uniform()):
        # Standard errors of the mean and the variance are 0.002 and 0.0005.
        assert abs(float(values.mean()) - 0.5) < 0.011
        assert abs(float(values.var()) - 1 / 12) < 0.003
        counts = torch.histc(values, 20, 0, 1)
        assert float(((counts - 1000).square() / 1000).sum()) < 50  # chi-squared with 19 degrees of freedom


def test_draws_of_one_sample_over_the_epochs_are_uniform() -> None:
    values = torch.cat([SampleRNG(7, epoch, torch.tensor([42])).uniform() for epoch in range(4000)])
    assert abs(float(values.mean()) - 0.5) < 0.025
    assert abs(float(values.var()) - 1 / 12) < 0.006
    assert abs(correlation(values[1:], values[:-1])) < 0.08


def test_streams_epochs_seeds_calls_forks_and_neighbours_are_uncorrelated() -> None:
    rng = SampleRNG(0, 0, MANY)
    first, second = rng.uniform(), rng.uniform()
    others = {
        "calls": second,
        "epochs": SampleRNG(0, 1, MANY).uniform(),
        "seeds": SampleRNG(1, 0, MANY).uniform(),
        "streams": SampleRNG(0, 0, MANY, 1).uniform(),
        "first fork": rng.fork(0).uniform(),
        "second fork": rng.fork(1).uniform(),
        "neighbours": first.roll(1),
    }
    # The standard error of a correlation of 20,000 pairs is 0.007.
    for one, other in itertools.combinations([first, *others.values()], 2):
        assert abs(correlation(one, other)) < 0.035


def test_integers_are_equally_likely() -> None:
    counts = torch.bincount(SampleRNG(3, 1, MANY).integers(9), minlength=9)
    assert float(((counts - 20_000 / 9).square() / (20_000 / 9)).sum()) < 30  # chi-squared, 8 degrees of freedom


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=40))
def test_the_cpu_draws_the_bits_that_other_devices_draw(values: list[int]) -> None:
    tensor = torch.tensor(values)
    assert torch.equal(_hash(tensor), _hash_anywhere(tensor))


@given(count=st.integers(1, 60), epoch=st.integers(0, 50), data=st.data())
def test_a_ring_pairs_every_sample_with_another_whatever_their_order(
    count: int, epoch: int, data: st.DataObject
) -> None:
    indices = torch.arange(count) * 7
    neighbours = indices[SampleRNG(4, epoch, indices).partners()]
    assert sorted(neighbours.tolist()) == indices.tolist()
    assert count == 1 or not (neighbours == indices).any()
    places = torch.tensor(data.draw(st.permutations(range(count))))
    assert torch.equal(indices[places][SampleRNG(4, epoch, indices[places]).partners()], neighbours[places])


def test_every_other_sample_is_as_often_the_neighbour() -> None:
    counts = torch.zeros(6, 6)
    for epoch in range(3000):
        counts[torch.arange(6), SampleRNG(0, epoch, torch.arange(6)).partners()] += 1
    others = counts[~torch.eye(6, dtype=torch.bool)]
    assert (others - 600).abs().max() < 110  # five standard errors


def test_a_batch_draws_one_number_whatever_the_order_of_its_samples() -> None:
    indices = torch.arange(32)
    drawn = [int(SampleRNG(0, epoch, indices).batch_integer(3)) for epoch in range(900)]
    assert [int(SampleRNG(0, epoch, indices.flip(0)).batch_integer(3)) for epoch in range(900)] == drawn
    assert all(abs(drawn.count(number) - 300) < 75 for number in range(3))
    assert SampleRNG(0, 0, indices).batch_integer(3).shape == ()
    assert len({int(SampleRNG(0, 0, indices + batch).batch_integer(1000)) for batch in range(20)}) > 15


def test_epoch_independent_numbers_are_the_same_in_every_epoch_and_of_no_epoch() -> None:
    lasting = [SampleRNG(0, epoch, MANY).without_epoch().uniform() for epoch in (0, 7)]
    assert torch.equal(*lasting)
    for epoch in range(3):
        assert abs(correlation(lasting[0], SampleRNG(0, epoch, MANY).uniform())) < 0.035
    assert not torch.equal(lasting[0], SampleRNG(1, 0, MANY).without_epoch().uniform())


def test_mix_tells_numbers_and_their_order_apart() -> None:
    hashes = [hash_ints(*parts) for parts in itertools.product(range(12), repeat=3)]
    assert len(set(hashes)) == len(hashes)
    assert hash_ints(1, 2) != hash_ints(2, 1)
    assert hash_ints(1) != hash_ints(1, 0)
    assert all(0 <= hash_ints(2**80 + part) < 2**63 for part in range(99))


def test_mix_changes_half_of_its_bits_with_one_bit_of_input() -> None:
    flips = [
        (hash_ints(5, value) ^ hash_ints(5, value ^ (1 << bit))).bit_count()
        for value in range(50)
        for bit in range(0, 60, 7)
    ]
    assert 29 < sum(flips) / len(flips) < 34
    assert min(flips) > 10


def drawn() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def test_a_seeded_sample_draws_the_same_from_every_library() -> None:
    def draw(index: int) -> list[float]:
        with preserved_rng():
            seed_generators(1, 2, index)
            return drawn()

    assert draw(5) == draw(5)
    assert len({*draw(5), *draw(6)}) == 6


def test_preserved_generators_go_on_as_if_nothing_had_been_drawn() -> None:
    seed_generators(0, 0, 0)
    expected = drawn()
    seed_generators(0, 0, 0)

    def fails_on_the_way() -> None:
        with preserved_rng():
            random.random(), np.random.rand(3), torch.rand(3)
            raise ValueError("on the way")

    with pytest.raises(ValueError, match="on the way"):
        fails_on_the_way()
    assert drawn() == expected


# Tables of quantiles

EVENLY = (torch.arange(2**20) + 0.5) / 2**20


@pytest.mark.parametrize("alpha", [0.01, 0.1, 0.2, 0.4, 1.0, 2.0, 8.0, 300.0])
def test_beta_has_the_moments_of_the_beta_distribution(alpha: float) -> None:
    values = beta(alpha)(EVENLY).double() - 0.5
    variance = 1 / (4 * (2 * alpha + 1))
    assert float(values.mean()) == pytest.approx(0, abs=1e-7)
    assert float(values.square().mean()) == pytest.approx(variance, rel=2e-3)
    assert float(values.pow(4).mean()) == pytest.approx(3 / (16 * (2 * alpha + 1) * (2 * alpha + 3)), rel=5e-3)


@pytest.mark.parametrize(
    ("alpha", "share"),
    [
        (0.5, lambda x: 2 / math.pi * math.asin(math.sqrt(x))),  # the arcsine distribution
        (1.0, lambda x: x),
        (2.0, lambda x: 3 * x**2 - 2 * x**3),
        (3.0, lambda x: 10 * x**3 - 15 * x**4 + 6 * x**5),
    ],
)
def test_beta_has_the_distribution_function_where_it_has_a_simple_form(alpha: float, share: object) -> None:
    knots = torch.arange(1, 64) / 64
    values = beta(alpha)(knots).tolist()
    assert [share(value) for value in values] == pytest.approx(knots.tolist(), abs=2e-6)  # type: ignore[operator]


def test_beta_is_symmetric_and_increasing() -> None:
    for alpha in (0.05, 0.3, 5.0):
        values = beta(alpha)(torch.arange(4096) / 4096).double()
        assert (values[1:] + values[1:].flip(0)).sub(1).abs().max() < 1e-7
        assert (values.diff() >= 0).all()
        assert values[2048] == 0.5


def test_log_uniform_is_uniform_in_the_logarithm() -> None:
    values = log_uniform(0.5, 3.0)(EVENLY).double()
    expected = math.log(0.5) + EVENLY.double() * math.log(6)
    assert (values.log() - expected).abs().max() < 1e-6
    assert values.min() >= 0.5
    assert values.max() <= 3


def test_a_number_does_not_depend_on_its_place() -> None:
    table = beta(0.2)
    together = table(EVENLY[:1001])
    assert torch.equal(together, torch.cat([table(part) for part in EVENLY[:1001].split(7)]))
    assert together.dtype == torch.float32
