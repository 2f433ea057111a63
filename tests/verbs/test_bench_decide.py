"""What `bench` makes of its measurements, given measurements."""

from __future__ import annotations

import math
import random

import pytest

from runner.verbs.bench import stats
from runner.verbs.bench.candidates import BASELINE, Candidate, setting
from runner.verbs.bench.stats import Result, Sizes, Spread

FASTER = [1.5, 1.4, 1.6, 1.5, 1.5]
SAME = [1.0] * 5


def result(candidate: Candidate, ratios: list[float], loss: float = 1.0, repeats: bool | None = True) -> Result:
    return Result(candidate, 64, loss=loss, repeats=repeats, seconds=[1 / ratio for ratio in ratios], ratios=ratios)


def judged(*results: Result, allowed: float = 0.1, deterministic: bool = False) -> list[Result]:
    baseline = result(BASELINE, SAME)
    for each in results:
        each.verdict = stats.verdict(each, baseline, allowed, deterministic)
    return [baseline, *results]


AMP, NHWC = setting("toggle", {"amp": "bf16"}), setting("toggle", {"channels_last": True})


def test_speed_is_compared_within_a_round_so_that_drift_of_the_machine_cancels_out() -> None:
    rounds = [{BASELINE.name: drift * 1.0, AMP.name: drift * 0.5} for drift in (1.0, 7.0, 0.2)]
    assert stats.ratios(rounds, AMP.name) == pytest.approx([2.0, 2.0, 2.0])
    rounds.append({BASELINE.name: 1.0, NHWC.name: 0.8})
    assert len(stats.ratios(rounds, AMP.name)) == 3, "a round without it says nothing about it"
    assert stats.ratios(rounds, NHWC.name) == [1.25]


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        (FASTER, True),
        (SAME, False),
        ([1.01] * 5, False),
        ([1.03] * 5, True),
        ([0.8, 0.9, 1.2, 1.3, 1.4], False),
        ([0.9, 1.1, 1.2, 1.3, 1.4], False),
        ([1.4, 1.5, 1.3, 1.6, 1.4, 1.5, 9.0], True),
        ([1.2, 1.3], False),
        ([1.2, 1.3, 1.25], True),
        ([1.05, 0.99, 1.04, 1.06, 1.03, 1.05, 1.04], True),
        ([], False),
    ],
    ids=[
        "faster",
        "same",
        "one percent",
        "three percent",
        "noise",
        "one slow round",
        "an outlier",
        "two rounds",
        "three",
        "seven",
        "nothing",
    ],
)
def test_a_gain_pays_if_it_is_worth_having_and_more_than_noise(ratios: list[float], expected: bool) -> None:
    assert stats.pays(ratios) is expected


def test_chance_alone_seldom_makes_a_gain_sure() -> None:
    draw = random.Random(0)
    for rounds in (3, 7, 20):
        trials = [[math.exp(draw.gauss(0, 0.3)) for _ in range(rounds)] for _ in range(2000)]
        assert 0.004 < sum(map(stats.surely_above_one, trials)) / len(trials) < 0.02


def test_the_fastest_that_is_fit_is_recommended() -> None:
    found = judged(result(AMP, FASTER), result(NHWC, [1.2] * 5))
    best = stats.recommended(found)
    assert best is not None
    assert best.candidate == AMP


def test_of_equally_fast_ones_the_one_with_the_fewest_overrides_is_recommended() -> None:
    both = result(AMP.combined(NHWC), [1.51] * 5)
    best = stats.recommended(judged(both, result(AMP, [1.5] * 5)))
    assert best is not None
    assert best.candidate == AMP
    both.ratios = [1.7] * 5
    best = stats.recommended(judged(both, result(AMP, [1.5] * 5)))
    assert best is both


def test_nothing_is_recommended_if_nothing_pays() -> None:
    assert stats.recommended(judged(result(AMP, SAME), result(NHWC, [0.7] * 5))) is None


@pytest.mark.parametrize(
    ("found", "deterministic", "verdict"),
    [
        (result(AMP, FASTER), True, ""),
        (result(AMP, FASTER, loss=1.2), False, "loss too far off"),
        (result(AMP, FASTER, loss=0.8), False, "loss too far off"),
        (result(AMP, FASTER, loss=math.nan), False, "loss not finite"),
        (result(AMP, FASTER, repeats=False), True, "does not repeat"),
        (result(AMP, FASTER, repeats=False), False, ""),
        (result(AMP, [0.7] * 5), False, "slower"),
        (result(AMP, [0.9, 0.95, 1.0, 1.05, 1.1]), False, "no clear gain"),
        (result(setting("varied", {"data.batch_size": 256}), FASTER), False, "another training"),
        (result(setting("varied", {"data.prefetch": 4}), FASTER), False, ""),
    ],
    ids=["fit", "loss", "lower", "nan", "repeats", "not asked", "slower", "noise", "batch size", "prefetch"],
)
def test_what_is_not_fit_is_not_recommended_and_it_is_said_why(
    found: Result, deterministic: bool, verdict: str
) -> None:
    judged(found, deterministic=deterministic)
    assert found.verdict == verdict


def test_losses_may_differ_as_much_as_seeds_do_or_by_a_share() -> None:
    assert stats.allowed_difference(None, 2.0, [2.1, 1.95]) == pytest.approx(0.15)
    assert stats.allowed_difference(None, 2.0, []) == 0.0
    assert stats.allowed_difference(0.01, 2.0, [9.0]) == pytest.approx(0.02)


def test_what_pays_is_combined_from_the_fastest_on() -> None:
    found = judged(result(NHWC, [1.2] * 5), result(AMP, FASTER), result(setting("toggle", {"tf32": True}), SAME))
    assert [each.candidate for each in stats.paying(found)] == [AMP, NHWC]


WANTED = Sizes(steps=20, warmup=3, repeats=5, compare=20)


def test_as_much_is_measured_as_was_asked_for_if_there_is_time() -> None:
    assert WANTED.within(share_s=10.0, step_s=0.01, build_s=0.1) == WANTED


@pytest.mark.parametrize("step_s", [0.05, 0.5, 2.0])
def test_slow_models_get_fewer_steps_and_never_none(step_s: float) -> None:
    sizes = WANTED.within(4.0, step_s, build_s=0.1)
    assert sizes.steps < WANTED.steps
    assert sizes.seconds(step_s, 0.1) <= 4.0 or sizes == Sizes(1, 1, 4, 3)
    assert min(sizes.steps, sizes.warmup) >= 1
    assert sizes.repeats == 5 or sizes.steps == sizes.warmup == 1, "rounds are what goes last"


def test_a_measurement_takes_a_quarter_of_a_second_and_outlasts_what_was_read_ahead() -> None:
    assert stats.usual_steps(0.01) == 25
    assert stats.usual_steps(1.0) == 1
    assert stats.usual_steps(1e-5) == 200
    assert WANTED.beside_readers(0, 0.01) == (20, 3)
    assert WANTED.beside_readers(16, 0.01) == (32, 16)
    assert WANTED.beside_readers(64, 0.25) == (20, 3), "a second of steps is enough"


def test_a_spread_is_median_and_quartiles_of_what_is_shown() -> None:
    assert Spread.of([1.0, 2.0, 3.0, 4.0, 5.0]) == Spread(3.0, 2.0, 4.0)
    assert stats.rates([1.0, 1 / 2, 1 / 3, 1 / 4, 1 / 5]) == Spread(3.0, 2.0, 4.0)
    assert result(AMP, [0.5]).step_ms == Spread(128000.0, 128000.0, 128000.0)
