"""Schedules against closed forms, and what must hold for every one of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.base.errors import UserError
from runner.optim.schedules import WSD, Constant, Cosine, OneCycle, Plateau, Schedule, Step, Torch

PURE: dict[str, Callable[..., Schedule]] = {
    "constant": Constant,
    "cosine": Cosine,
    "onecycle": OneCycle,
    "step": lambda total_steps, **kwargs: Step(total_steps, steps_per_epoch=7, every=2, gamma=0.5, **kwargs),
    "torch": lambda total_steps, **kwargs: Torch(
        total_steps, name="StepLR", options={"step_size": 2}, steps_per_epoch=7, **kwargs
    ),
    "wsd": WSD,
    "wsd-sqrt": lambda total_steps, **kwargs: WSD(total_steps, curve="1-sqrt", **kwargs),
}
every_schedule = pytest.mark.parametrize("build", PURE.values(), ids=PURE.keys())
warmups = st.one_of(st.floats(0, 0.8), st.integers(1, 300).map(float))


@every_schedule
@given(total=st.integers(1, 500), warmup=warmups, steps=st.lists(st.integers(0, 2000), min_size=1, max_size=20))
@settings(deadline=None, max_examples=60)
def test_the_factor_follows_from_the_step_alone(build: Any, total: int, warmup: float, steps: list[int]) -> None:
    used, fresh = build(total_steps=total, warmup=warmup), build(total_steps=total, warmup=warmup)
    forwards = {step: used.factor(step) for step in sorted(steps)}
    used.observe(1.0)
    assert used.state_dict() == {}
    assert {step: used.factor(step) for step in steps} == forwards
    assert {step: fresh.factor(step) for step in reversed(steps)} == forwards


@every_schedule
@given(total=st.integers(50, 500), warmup=st.floats(0, 0.8))
@settings(deadline=None, max_examples=60)
def test_the_warm_up_rises_to_its_border_without_a_jump(build: Any, total: int, warmup: float) -> None:
    schedule = build(total_steps=total, warmup=warmup)
    border = schedule.warmup_steps
    assert border == round(warmup * total)
    rising = [schedule.factor(step) for step in range(border)]
    assert rising == sorted(rising)
    if border > 1 and not isinstance(schedule, Step | Torch):
        assert schedule.factor(border) == pytest.approx(1)
        assert 0 < schedule.factor(border) - schedule.factor(border - 1) <= 1.6 / border


@every_schedule
@given(total=st.integers(1, 300), warmup=st.floats(0, 0.8) | st.integers(1, 300).map(float))
@settings(deadline=None, max_examples=60)
def test_the_factor_is_0_in_no_step_at_most_1_and_never_rises_after_the_warm_up(
    build: Any, total: int, warmup: float
) -> None:
    schedule = build(total_steps=total, warmup=warmup)
    assert all(0 < schedule.factor(step) <= 1 for step in range(total))
    assert 0 <= schedule.factor(10_000) <= 1
    falling = [schedule.factor(step) for step in range(schedule.warmup_steps, total + 20)]
    assert all(after <= before + 1e-12 for before, after in itertools.pairwise(falling))


@every_schedule
def test_a_warm_up_below_1_is_a_share_and_from_1_on_a_number_of_steps(build: Any) -> None:
    assert build(total_steps=200, warmup=0.25).warmup_steps == 50
    assert build(total_steps=200, warmup=1.0).warmup_steps == 1
    assert build(total_steps=200, warmup=80.0).warmup_steps == 80


def test_linear_warm_up_has_equal_increments() -> None:
    schedule = Constant(total_steps=100, warmup=4.0)
    assert [schedule.factor(step) for step in range(6)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1])


def test_cosine_is_torch_s_cosine_annealing() -> None:
    parameter = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50, eta_min=0.1)
    schedule = Cosine(total_steps=50, final=0.1)
    for step in range(51):
        assert schedule.factor(step) == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-9)
        optimizer.step()
        reference.step()
    assert schedule.factor(500) == pytest.approx(0.1)


def test_one_cycle_goes_from_one_part_in_div_through_1_to_final() -> None:
    schedule = OneCycle(total_steps=100, warmup=0.3, div=20, final=0.01)
    assert schedule.factor(0) == pytest.approx(1 / 20)
    assert schedule.factor(15) == pytest.approx((1 + 1 / 20) / 2)
    assert schedule.factor(30) == pytest.approx(1)
    assert schedule.factor(65) == pytest.approx((1 + 0.01) / 2)
    assert schedule.factor(100) == pytest.approx(0.01)
    assert schedule.factor(1000) == pytest.approx(0.01)


def test_step_drops_every_so_many_epochs() -> None:
    schedule = Step(total_steps=60, steps_per_epoch=5, every=3, gamma=0.1)
    factors = [schedule.factor(step) for step in (0, 14, 15, 29, 30, 1500)]
    assert factors == pytest.approx([1, 1, 0.1, 0.1, 0.01, 1e-100])


@pytest.mark.parametrize(("curve", "middle"), [("linear", 0.5), ("1-sqrt", 1 - math.sqrt(0.5))])
def test_wsd_is_stable_and_then_decays(curve: Any, middle: float) -> None:
    schedule = WSD(total_steps=100, warmup=0.1, decay=0.2, curve=curve, final=0.0)
    assert [schedule.factor(step) for step in (10, 50, 80)] == [1, 1, 1]
    assert schedule.factor(90) == pytest.approx(middle)
    assert schedule.factor(100) == 0
    assert WSD(total_steps=100, decay=0.5, final=0.2).factor(75) == pytest.approx(0.6)
    assert WSD(total_steps=100, decay=0.0).factor(10_000) == 1


def observed(schedule: Plateau, metrics: list[float]) -> list[float]:
    factors = []
    for metric in metrics:
        schedule.observe(metric)
        factors.append(schedule.factor(10_000))
    return factors


@given(
    metrics=st.lists(st.floats(-10, 10), min_size=1, max_size=60),
    patience=st.integers(0, 4),
    mode=st.sampled_from(["min", "max"]),
)
@settings(deadline=None, max_examples=60)
def test_plateau_counts_as_torch_does(metrics: list[float], patience: int, mode: Any) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
    reference = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, mode=mode, factor=0.5, patience=patience, threshold=0.1, threshold_mode="abs", min_lr=0.1, eps=0.0
    )
    schedule = Plateau(total_steps=1, mode=mode, factor=0.5, patience=patience, threshold=0.1, min_factor=0.1)
    for metric in metrics:
        reference.step(metric)
        schedule.observe(metric)
        assert schedule.factor(0) == pytest.approx(optimizer.param_groups[0]["lr"])


@given(
    metrics=st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=1, max_size=40),
    cut=st.integers(0, 40),
    mode=st.sampled_from(["min", "max"]),
)
@settings(deadline=None, max_examples=60)
def test_plateau_resumed_at_any_moment_continues_as_if_it_had_not_stopped(
    metrics: list[float], cut: int, mode: Any
) -> None:
    whole = Plateau(total_steps=10, mode=mode, factor=0.7, patience=2)
    expected = observed(whole, metrics)
    before, after = (Plateau(total_steps=10, mode=mode, factor=0.7, patience=2) for _ in range(2))
    factors = observed(before, metrics[:cut])
    after.load_state_dict(before.state_dict())
    assert factors + observed(after, metrics[cut:]) == expected
    assert after.state_dict() == whole.state_dict()
    assert all(type(value) in (int, float) for value in whole.state_dict().values())


def test_plateau_starts_afresh_from_another_schedule_s_empty_state() -> None:
    schedule = Plateau(total_steps=10, mode="max", patience=0)
    schedule.load_state_dict({})
    assert schedule.factor(0) == 1


def test_plateau_knows_that_larger_is_better_and_that_nan_is_no_improvement() -> None:
    schedule = Plateau(total_steps=10, mode="max", factor=0.5, patience=0)
    assert observed(schedule, [0.1, 0.2, 0.3]) == [1, 1, 1]
    assert observed(schedule, [math.nan, 0.2, 0.4]) == [0.5, 0.25, 0.25]


def test_plateau_warms_up() -> None:
    schedule = Plateau(total_steps=100, mode="max", warmup=0.03)
    assert [schedule.factor(step) for step in range(5)] == pytest.approx([0.25, 0.5, 0.75, 1, 1])


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Constant(total_steps=0), "total_steps must be at least 1, got 0"),
        (lambda: Cosine(total_steps=10, warmup=-0.1), "warmup must not be negative, got -0.1"),
        (lambda: Cosine(total_steps=10, warmup=1.5), "warmup must be a share below 1 or a whole number of steps"),
        (lambda: Cosine(total_steps=10, warmup=math.nan), "warmup must not be negative, got nan"),
        (lambda: Cosine(total_steps=10, final=1.1), "final must be from 0 to 1, got 1.1"),
        (lambda: OneCycle(total_steps=10, div=0.5), "div must be at least 1, got 0.5"),
        (lambda: OneCycle(total_steps=10, final=-1), "final must be from 0 to 1, got -1"),
        (lambda: Step(total_steps=10, steps_per_epoch=0), "steps_per_epoch must be at least 1, got 0"),
        (lambda: Step(total_steps=10, steps_per_epoch=1, every=0), "every must be at least 1 epoch, got 0"),
        (lambda: Step(total_steps=10, steps_per_epoch=1, gamma=0), "gamma must be above 0 and at most 1, got 0"),
        (lambda: WSD(total_steps=10, decay=1.2), "decay must be a share from 0 to 1, got 1.2"),
        (lambda: WSD(total_steps=10, warmup=0.5, decay=0.6), "warmup and decay must not overlap"),
        (lambda: WSD(total_steps=10, final=2), "final must be from 0 to 1, got 2"),
        (lambda: Plateau(total_steps=10), "mode must be 'min' or 'max', got None"),
        (lambda: Plateau(total_steps=10, mode="min", factor=1.0), "factor must be above 0 and below 1, got 1.0"),
        (lambda: Plateau(total_steps=10, mode="min", patience=-1), "patience must not be negative, got -1"),
        (lambda: Plateau(total_steps=10, mode="min", min_factor=2), "min_factor must be from 0 to 1, got 2"),
        (lambda: Plateau(total_steps=10, mode="min", threshold=-1), "threshold must not be negative, got -1"),
        (lambda: Plateau(total_steps=10, mode="min", warmup=-1), "warmup must not be negative, got -1"),
    ],
)
def test_an_argument_out_of_range_is_named(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


COSINE = {"name": "CosineAnnealingLR", "options": {"T_max": 18}}
WARMED = {"schedulers": [{"name": "LinearLR", "options": {"total_iters": 4}}, COSINE], "milestones": [4]}


@pytest.mark.parametrize(
    ("name", "options", "build"),
    [
        ("StepLR", {"step_size": 3}, lambda kinds, optimizer: kinds.StepLR(optimizer, 3)),
        ("CosineAnnealingLR", {"eta_min": 0.01}, lambda kinds, optimizer: kinds.CosineAnnealingLR(optimizer, 20, 0.01)),
        ("PolynomialLR", {"power": 0.9}, lambda kinds, optimizer: kinds.PolynomialLR(optimizer, 20, 0.9)),
        (
            "OneCycleLR",
            {"max_lr": 0.7},
            lambda kinds, optimizer: kinds.OneCycleLR(optimizer, 0.7, 20, cycle_momentum=False),
        ),
        (
            "SequentialLR",
            WARMED,
            lambda kinds, optimizer: kinds.SequentialLR(
                optimizer, [kinds.LinearLR(optimizer, total_iters=4), kinds.CosineAnnealingLR(optimizer, 18)], [4]
            ),
        ),
    ],
)
@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_a_scheduler_of_torch_gives_the_rates_that_torch_gives(
    name: str, options: dict[str, Any], build: Callable[[Any, Any], Any], interval: Any
) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    scheduler, rates = build(torch.optim.lr_scheduler, optimizer), []
    for _ in range(20):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if len(rates) < 20:
            scheduler.step()
    each = 1 if interval == "step" else 5
    ours = Torch(20 * each, name=name, options=options, interval=interval, steps_per_epoch=each, lr=0.3)
    assert [ours.factor(step) * 0.3 for step in range(0, 20 * each, each)] == pytest.approx(rates, rel=1e-12)
    assert ours.factor(10_000) == ours.factor(10_000)
    if interval == "epoch":
        assert len({ours.factor(step) for step in range(5, 10)}) == 1


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"name": "SteppLR"}, "'StepLR'"),
        ({"name": "LRScheduler"}, "torch has no"),
        ({"name": "ReduceLROnPlateau"}, "scheduler=plateau"),
        ({"name": "StepLR"}, "step_size"),
        ({"options": {"T_mx": 3}}, "T_mx"),
        ({"options": {"optimizer": 3}}, "multiple values"),
        ({"name": "OneCycleLR", "options": {"max_lr": 1, "cycle_momentum": True}}, "momentum is not scheduled"),
    ],
)
def test_a_scheduler_that_torch_lacks_or_refuses_is_a_mistake(given: dict[str, Any], reason: str) -> None:
    with pytest.raises((UserError, ValueError, TypeError), match=reason):
        Torch(20, **given)
