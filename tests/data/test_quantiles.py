"""Tables of quantiles give the distributions that they are named after."""

from __future__ import annotations

import math

import pytest
import torch

from runner.data.sample_rng import beta, log_uniform

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


@pytest.mark.parametrize("alpha", [0.0, -1.0, 1e-4, 1e7, math.nan])
def test_beta_refuses_what_leaves_no_distribution(alpha: float) -> None:
    with pytest.raises(ValueError, match=r"alpha must be from 0.001 to 1000000"):
        beta(alpha)


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
