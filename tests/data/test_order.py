"""Sample order is a pure function of seed and epoch."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runner.data.order import order

seeds = st.integers(0, 2**63 - 1)


@given(samples=st.integers(1, 400), seed=seeds, epoch=st.integers(0, 10_000))
def test_every_sample_comes_once_an_epoch(samples: int, seed: int, epoch: int) -> None:
    assert order(samples, seed, epoch).sort().values.tolist() == list(range(samples))


@given(samples=st.integers(1, 400), seed=seeds, epoch=st.integers(0, 10_000))
def test_the_order_depends_on_nothing_but_its_arguments(samples: int, seed: int, epoch: int) -> None:
    first = order(samples, seed, epoch)
    torch.rand(7)
    order(samples, seed, epoch + 1)
    assert torch.equal(first, order(samples, seed, epoch))


def test_the_global_generator_is_untouched() -> None:
    before = torch.get_rng_state()
    order(100, 3, 4)
    assert torch.equal(before, torch.get_rng_state())


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [order(64, seed, epoch) for seed, epoch in itertools.product(range(6), range(6))]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(orders, 2))


@pytest.mark.parametrize("epoch", [0, 1, 7])
def test_without_shuffling_the_order_is_that_of_the_data(epoch: int) -> None:
    assert order(50, 3, epoch, shuffle=False).tolist() == list(range(50))


def test_a_sample_is_equally_likely_at_every_place() -> None:
    places = torch.stack([order(10, 0, epoch).argsort() for epoch in range(2000)]).float()
    # The mean place is 4.5 with a standard error of 2.87 / sqrt(2000) = 0.064.
    assert (places.mean(0) - 4.5).abs().max() < 0.3
