"""The range test trains with the run's own steps, and stops where the loss diverges."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

from runner.engine.errors import Preempted
from runner.engine.freezing import Freezing, Frozen
from runner.engine.nonfinite import NonFiniteGuard
from runner.engine.range_test import Curve, exponential, range_test, suggest
from runner.engine.weight_average import AveragedModel


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Dropout(0.2), nn.Flatten(), nn.ReLU(), nn.Linear(16, 3)
    )


def swept(bench: Any, state: Any, rates: list[float], instead: Any = None, look: Any = None, **options: Any) -> Curve:
    """A range test that calls `look` before each step, or `instead` of its parts."""
    step = bench.step(state)
    if look or instead:
        plain = step.accumulate
        step.accumulate = instead or (lambda *given: (look(), plain(*given)))
        step.update = (lambda: None) if instead else step.update
    return range_test(step, bench.source, bench.plan, rates, reference=bench.lr, **options)


def test_an_average_of_the_weights_takes_no_part_and_what_is_frozen_stays_so(bench: Any) -> None:
    small = bench(build=network, lr=0.1)
    state = small.state()
    frozen = list(state.model[0].parameters())
    state.freezing = Freezing(state.model, [Frozen("stem", tuple(frozen), (state.model[1],))])
    state.averaged = AveragedModel("ema", state.model, list(state.model.parameters()), decay=0.5)
    seen = []

    def look() -> None:
        seen.append((state.averaged, state.model[1].training, state.model[0].weight.requires_grad))

    swept(small, state, exponential(1e-3, 1e-1, 4), look=look)
    assert seen == [(None, False, False)] * 4


def test_a_step_is_that_of_training_at_its_rate(bench: Any) -> None:
    """Ten samples in batches of 4, windows of two: two steps an epoch, the last one of a single batch of 2."""
    small = bench(accumulate=2, optimizer=torch.optim.AdamW)
    small.parts = {"clip_norm": 0.5, "clip_value": 0.1}
    rates = exponential(1e-3, 1e-1, 5)
    curve = swept(small, small.state(), rates)
    state, losses = small.state(), []
    step = small.step(state)
    done = iter(range(5))
    for epoch in range(3):
        total = 0.0
        for (size, weight, update), batch in zip(small.plan.parts(0), small.source.batches(epoch, 0, 3), strict=True):
            with torch.no_grad():
                total += float(nn.functional.cross_entropy(state.model(batch.images), batch.targets)) * weight
            if update and (number := next(done, None)) is not None:
                state.optimizer.param_groups[0]["lr"] = rates[number]
            step(batch, weight, size, update=update)
            if update:
                losses.append(total)
                total = 0.0
    assert curve.losses == pytest.approx(losses[:5], rel=1e-5)
    assert curve.rates == rates


def test_groups_keep_their_ratios(bench: Any) -> None:
    seen: list[list[float]] = []
    small = bench(lr=0.1)
    state = small.state()
    state.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))], "lr": 0.02, "initial_lr": 0.02})

    swept(small, state, [0.001, 0.05], look=lambda: seen.append([g["lr"] for g in state.optimizer.param_groups]))
    assert seen == [pytest.approx([0.001, 0.0002]), pytest.approx([0.05, 0.01])]


def test_it_stops_where_the_loss_diverges(bench: Any) -> None:
    small = bench(build=lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 3)))
    curve = swept(small, small.state(), exponential(1e-3, 1e6, 60))
    assert "4 times its lowest" in curve.stopped
    assert len(curve.rates) == len(curve.losses) == len(curve.smoothed) < 60
    curve = swept(small, small.state(), [1e-3, 1e30, 1e30, 1e30])
    assert "the loss is" in curve.stopped


@pytest.mark.parametrize(
    "losses", [[2.0, 1.0, *[1e-4] * 25, 0.3, 0.01], [1.0, -1.0, -3.0, -4.0, -4.1, -4.0], [-0.5, -0.499, -1.0]]
)
def test_noise_of_a_loss_near_or_below_zero_is_no_divergence(bench: Any, losses: list[float]) -> None:
    small, given = bench(samples=4), iter(losses)
    state = small.state()
    rates = exponential(1e-3, 1, len(losses))
    curve = swept(small, state, rates, instead=lambda *_: state.meter.add(torch.tensor(next(given)), 1))
    assert (curve.losses, curve.stopped) == (pytest.approx(losses), "")
    assert np.isfinite(curve.losses).all()


def test_a_step_that_the_guard_leaves_out_ends_it(bench: Any) -> None:
    def loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits.register_hook(lambda gradient: gradient * float("nan"))
        return nn.functional.cross_entropy(logits, targets)

    small = bench()
    state = small.state()
    small.parts = {"guard": NonFiniteGuard(state.model, state.optimizer, "raise", scaled=False), "loss": loss}
    curve = swept(small, state, [0.1, 0.2, 0.3])
    assert curve.stopped == "the gradients are not finite at a rate of 0.1"


def test_no_batch_is_asked_for_that_is_not_used(bench: Any) -> None:
    small = bench(accumulate=2)
    source = Mock(wraps=small.source, samples=10, batch_size=4)
    range_test(small.step(small.state()), source, small.plan, [1e-4] * 5, reference=0.1)
    assert [asked.args for asked in source.batches.call_args_list] == [(0, 0, 3), (1, 0, 3), (2, 0, 2)]


def test_a_signal_ends_it(bench: Any) -> None:
    answers = iter(["", "SIGTERM"])
    small = bench()
    state = small.state()
    with pytest.raises(Preempted, match="SIGTERM"):
        swept(small, state, [0.1] * 5, interrupted=lambda: next(answers))


def test_the_running_mean_begins_at_the_first_loss_and_has_no_bias(bench: Any) -> None:
    small = bench()
    curve = swept(small, small.state(), [1e-12] * 6)
    assert curve.smoothed[0] == pytest.approx(curve.losses[0])
    flat = swept(bench(samples=4), bench(samples=4).state(), [1e-12] * 6)
    assert flat.smoothed == pytest.approx([flat.losses[0]] * 6)


def test_rates_are_evenly_spaced_on_a_logarithmic_scale() -> None:
    assert exponential(1e-3, 1e1, 5) == pytest.approx([1e-3, 1e-2, 1e-1, 1, 10])


def test_suggestions_are_where_the_curve_says() -> None:
    rates = exponential(1e-4, 1, 9)
    smoothed = [2.3, 2.3, 2.2, 1.9, 1.3, 0.9, 0.8, 1.0, 3.0]
    found = suggest(Curve(rates, smoothed, smoothed))
    assert (found.lowest, found.tenth, found.steepest) == (rates[6], pytest.approx(rates[6] / 10), rates[4])
    assert (found.edge, found.fifth) == (rates[6], pytest.approx(rates[6] / 5)), "0.95 is level with 0.8, 1.0 is not"


LEVEL = [2.3, 2.0, 1.0, 0.60, 0.61, 0.62, 0.61, 0.63, 0.62, 2.0]


@pytest.mark.parametrize(
    ("smoothed", "lowest", "edge"),
    [
        # as a regression on targets far from zero has it, or a head that is far off
        ([10000, 5000, 200, 60, 50, 55, 300, 1000.0], 4, 5),
        # noise decides where a long level part is lowest, and not where it ends
        ([*LEVEL[:3], 0.55, *LEVEL[4:]], 3, 8),
        ([*LEVEL[:8], 0.55, *LEVEL[9:]], 8, 8),
    ],
    ids=["high first loss", "low early", "low late"],
)
def test_the_edge_is_where_the_loss_begins_to_rise(smoothed: list[float], lowest: int, edge: int) -> None:
    rates = exponential(1e-4, 1, len(smoothed))
    found = suggest(Curve(rates, smoothed, smoothed))
    assert (found.lowest, found.edge) == (rates[lowest], rates[edge])


@pytest.mark.parametrize(
    ("smoothed", "words"),
    [
        ([2.3, 2.3, 2.29, 2.4], "hardly falls at any rate"),
        ([2.3, 2.6, 9.0], "hardly falls"),
        ([2.3], "not finite from the first step"),
    ],
)
def test_a_curve_that_says_nothing_is_a_sentence(smoothed: list[float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        suggest(Curve(exponential(1e-3, 1, 4)[: len(smoothed)], smoothed, smoothed))
