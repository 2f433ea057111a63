"""Averages of the weights: the formulas, what is left alone, and exact continuation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from runner.engine.weight_average import AveragedModel, loss_for
from runner.optim.schedules import Annealed, Constant, Cosine

STEPS = 12
KINDS = pytest.mark.parametrize("kind", ["ema", "swa"])


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.Dropout(0.5), nn.Flatten(), nn.Linear(12, 2))


def walk(
    model: nn.Module, averaged: AveragedModel, steps: range, skipped: frozenset[int] = frozenset()
) -> list[list[Tensor]]:
    """Weights after each step of a random walk; skipped ones move nothing, and set a flag."""
    after = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for parameter in model.parameters():
                move = torch.randn(parameter.shape, generator=generator)
                if step not in skipped:
                    parameter.add_(move)
        averaged.update(step, torch.tensor(float(step in skipped)) if averaged._counted is not None else None)
        after.append([parameter.detach().clone().double() for parameter in model.parameters()])
    return after


def average_of(model: nn.Module, kind: Any = "ema", **keys: Any) -> AveragedModel:
    return AveragedModel(kind, model, list(model.parameters()), **{"decay": 0.7, **keys})


def averages(averaged: AveragedModel, model: nn.Module) -> list[Tensor]:
    weights = averaged.weights()
    return [weights[name] for name, _ in model.named_parameters()]


@pytest.mark.parametrize("warmup", [True, False])
def test_ema_equals_the_closed_form(warmup: bool) -> None:
    model = network()
    start = [parameter.detach().clone().double() for parameter in model.parameters()]
    averaged = average_of(model, warmup=warmup)
    after = walk(model, averaged, range(1, STEPS + 1))
    decays = [min(0.7, (1 + n) / (10 + n)) if warmup else 0.7 for n in range(STEPS)]
    # What is left of the weights after step k: their share, times the decay of every later update.
    kept = [torch.tensor(decays[k:]).double().prod() for k in range(STEPS + 1)]
    for place, found in enumerate(averages(averaged, model)):
        expected = kept[0] * start[place]
        for k in range(STEPS):
            expected = expected + (1 - decays[k]) * kept[k + 1] * after[k][place]
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_swa_is_the_mean_of_the_weights_at_its_steps() -> None:
    model = network()
    averaged = average_of(model, "swa", start=4, every=3)
    assert not averaged.begun
    after = walk(model, averaged, range(1, 6))
    assert not averaged.begun
    after += walk(model, averaged, range(6, STEPS + 1))
    assert averaged.updates == 2
    for place, found in enumerate(averages(averaged, model)):
        expected = (after[6][place] + after[9][place]) / 2
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)


@KINDS
def test_a_step_left_out_on_the_device_changes_no_bit_of_the_average(kind: Any) -> None:
    model, other = network(), network()
    on_device = average_of(model, kind, can_skip=True)
    on_host = average_of(other, kind)
    walk(model, on_device, range(1, STEPS + 1), frozenset({1, 5, 6}))
    for step in range(1, STEPS + 1):
        if step not in (1, 5, 6):
            walk(other, on_host, range(step, step + 1))
    assert on_device.updates == on_host.updates == STEPS - 3
    assert all(torch.equal(a, b) for a, b in zip(averages(on_device, model), averages(on_host, other), strict=True))


@pytest.mark.parametrize("can_skip", [False, True])
def test_an_update_never_waits_for_the_device(waits: Any, can_skip: bool) -> None:
    model = network()
    averaged = average_of(model, can_skip=can_skip)
    with waits:
        walk(model, averaged, range(1, 4))
    assert waits.found == []


@KINDS
def test_the_average_is_applied_and_taken_back_bit_for_bit(kind: Any) -> None:
    model = network()
    averaged = average_of(model, kind)
    walk(model, averaged, range(1, 4))
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def failing_evaluation() -> None:
        with averaged.applied():
            if kind == "swa":
                averaged.recalibrate(lambda: [model(torch.randn(4, 1, 3, 3)) for _ in range(2)] and None)
            expected = averaged.weights()
            assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
            assert not torch.equal(before["0.weight"], expected["0.weight"])
            raise KeyError("an evaluation that fails")

    with pytest.raises(KeyError):
        failing_evaluation()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_statistics_are_computed_anew_as_torch_does_and_dropout_adds_no_noise() -> None:
    model = network()
    averaged = average_of(model, "swa")
    walk(model, averaged, range(1, 4))
    batches = list(torch.randn(3, 5, 1, 3, 3))
    momentum = model[1].momentum  # type: ignore[union-attr]
    model.train()
    with averaged.applied(), torch.no_grad():
        averaged.recalibrate(lambda: [model(batch) for batch in batches] and None)
        reference = network()
        reference.load_state_dict(model.state_dict())
    update_bn(batches, reference)
    for name in ("1.running_mean", "1.running_var"):
        torch.testing.assert_close(averaged.weights()[name], reference.state_dict()[name])
    assert model[1].momentum == momentum  # type: ignore[union-attr]
    assert all(module.training for module in model.modules())


def test_statistics_of_a_frozen_layer_stay_as_they_are() -> None:
    model = nn.Sequential(nn.BatchNorm2d(1), nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3))
    averaged = average_of(model, "swa")
    walk(model, averaged, range(1, 4))
    model[0].eval()

    def feed() -> None:
        model(torch.randn(4, 1, 3, 3))

    with averaged.applied(), torch.no_grad():
        averaged.recalibrate(feed)
    weights, own = averaged.weights(), model.state_dict()
    assert torch.equal(weights["0.running_mean"], own["0.running_mean"])
    assert not torch.equal(weights["2.running_mean"], own["2.running_mean"])
    assert [module.training for module in model] == [False, True, True]


@KINDS
@pytest.mark.parametrize("can_skip", [False, True])
def test_a_restored_average_continues_bit_for_bit(kind: Any, can_skip: bool) -> None:
    whole = network()
    expected = average_of(whole, kind, can_skip=can_skip)
    walk(whole, expected, range(1, 9))

    first = network()
    averaged = average_of(first, kind, can_skip=can_skip)
    walk(first, averaged, range(1, 5))
    second = network(seed=3)
    second.load_state_dict(first.state_dict())
    restored = average_of(second, kind, can_skip=can_skip)
    restored.load_state_dict(averaged.state_dict())
    walk(second, restored, range(5, 9))
    assert restored.updates == expected.updates
    assert all(torch.equal(a, b) for a, b in zip(averages(restored, second), averages(expected, whole), strict=True))


@pytest.mark.parametrize(
    "state", [None, {"kind": "swa", "updates": 3, "weights": {}}, {"kind": "ema", "updates": 0, "weights": None}]
)
def test_without_a_state_of_its_kind_it_begins_with_the_weights_as_they_are(state: Any) -> None:
    model = network()
    averaged = average_of(model)
    walk(model, averaged, range(1, 4))
    averaged.load_state_dict(state)
    assert averaged.updates == 0
    assert all(torch.equal(a, b) for a, b in zip(averages(averaged, model), model.parameters(), strict=True))


def test_averages_of_another_model_are_refused() -> None:
    model = network()
    averaged = average_of(model)
    state = averaged.state_dict()
    state["weights"] = {**state["weights"], "0.weight": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"no '0.weight' of the shape"):
        averaged.load_state_dict(state)


def test_parameters_that_are_not_trained_and_buffers_are_the_models_own() -> None:
    model = network()
    averaged = AveragedModel("ema", model, [model[4].weight], decay=0.7)  # type: ignore[union-attr, list-item]
    walk(model, averaged, range(1, 4))
    model(torch.randn(4, 1, 3, 3))
    weights, own = averaged.weights(), model.state_dict()
    assert [name for name in own if not torch.equal(own[name], weights[name])] == ["4.weight"]


@pytest.mark.parametrize(
    ("metric", "loss"),
    [("val/accuracy", "val/loss"), ("val/ema_accuracy", "val/ema_loss"), ("val/swa_loss", "val/swa_loss")],
)
def test_ties_are_broken_by_the_loss_of_the_same_weights(metric: str, loss: str) -> None:
    assert loss_for(metric) == loss


def test_a_schedule_goes_over_to_a_constant_rate() -> None:
    found = Annealed(Constant(100), start=10, steps=4, final=0.5)
    factors = [found.factor(step) for step in range(20)]
    assert factors[:10] == [1.0] * 10
    assert factors[13:] == [pytest.approx(0.5)] * 7
    assert factors[9] > factors[10] > factors[11] > factors[12] > factors[13]
    rising = Annealed(Cosine(100), start=90, steps=2, final=0.3)
    assert [rising.factor(step) for step in (92, 99)] == [pytest.approx(0.3)] * 2


@pytest.fixture(autouse=True)
def _generator() -> Iterator[None]:
    with torch.random.fork_rng():
        yield


def test_updates_follow_the_steps_of_a_loop(bench: Any) -> None:
    one = bench(accumulate=2, limits={"epochs": 3, "max_steps": None})
    state = one.state()
    state.averaged = AveragedModel("swa", state.model, list(state.model.parameters()), start=2, every=2)
    seen: list[list[Tensor]] = []

    class Watch:
        def on_step(self, loop: Any) -> None:
            seen.append([parameter.detach().clone() for parameter in state.model.parameters()])

    one.loop(Watch(), state=state).run()
    assert len(seen) == 6  # two steps an epoch
    assert state.averaged.updates == 2
    for place, found in enumerate(averages(state.averaged, state.model)):
        torch.testing.assert_close(found, (seen[3][place] + seen[5][place]) / 2)
