"""What `bench` makes of its measurements, given measurements."""

from __future__ import annotations

import math

import pytest

from runner.lab.bench import stats
from runner.lab.bench.candidates import BASELINE, Candidate, setting
from runner.lab.bench.stats import Result, Spread

FASTER = [1.5, 1.4, 1.6, 1.5, 1.5]
SAME = [1.0] * 5


def result(candidate: Candidate, ratios: list[float], loss: float = 1.0) -> Result:
    return Result(candidate, 64, loss=loss, seconds=[1 / ratio for ratio in ratios], ratios=ratios)


AMP, NHWC = setting("toggle", {"amp": "bf16"}), setting("toggle", {"channels_last": True})


def test_the_fastest_that_is_fit_is_recommended() -> None:
    found = [result(AMP, FASTER), result(NHWC, [1.2] * 5)]
    best = stats.recommended(found)
    assert best is not None
    assert best.candidate == AMP


def test_of_equally_fast_ones_the_one_with_the_fewest_overrides_is_recommended() -> None:
    both = result(AMP.combined(NHWC), [1.51] * 5)
    best = stats.recommended([both, result(AMP, [1.5] * 5)])
    assert best is not None
    assert best.candidate == AMP
    both.ratios = [1.7] * 5
    best = stats.recommended([both, result(AMP, [1.5] * 5)])
    assert best is both


def test_nothing_is_recommended_if_nothing_pays() -> None:
    assert stats.recommended([result(AMP, SAME), result(NHWC, [0.7] * 5)]) is None


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (result(BASELINE, SAME), ""),
        (result(AMP, FASTER), ""),
        (result(AMP, FASTER, loss=math.nan), "loss not finite"),
        (result(AMP, [0.7, 0.9, 0.95, 0.9, 0.9]), "slower"),
        (result(AMP, [0.9, 0.95, 1.0, 1.05, 1.1]), "no clear gain"),
        (result(AMP, [0.9, 1.1, 1.2, 1.3, 1.4]), "no clear gain"),
        (result(AMP, [1.01] * 5), "no clear gain"),
        (result(AMP, [1.03] * 5), ""),
        (result(setting("varied", {"data.batch_size": 256}), FASTER), "another training"),
        (result(setting("varied", {"data.prefetch": 4}), FASTER), ""),
    ],
    ids=["baseline", "fit", "nan", "slower", "noise", "one slow round", "1 %", "3 %", "batch size", "prefetch"],
)
def test_what_is_not_fit_is_not_recommended_and_it_is_said_why(found: Result, verdict: str) -> None:
    assert found.verdict == verdict


def test_what_pays_is_combined_from_the_fastest_on() -> None:
    found = [result(NHWC, [1.2] * 5), result(AMP, FASTER), result(setting("toggle", {"tf32": True}), SAME)]
    assert [each.candidate for each in stats.paying(found)] == [AMP, NHWC]


def test_a_spread_is_median_and_quartiles_of_what_is_shown() -> None:
    assert Spread.of([1.0, 2.0, 3.0, 4.0, 5.0]) == Spread(3.0, 2.0, 4.0)
    assert result(AMP, [1.0, 2.0, 3.0, 4.0, 5.0]).samples_per_s == Spread(3.0, 2.0, 4.0)
    assert result(AMP, [0.5]).step_ms == Spread(128000.0, 128000.0, 128000.0)
