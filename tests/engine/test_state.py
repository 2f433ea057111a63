"""The state of a run: saved, restored, and checked against what it is restored into."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from runner.engine.plan import Best
from runner.engine.state import RunningMean, load_optimizer, load_weights, not_finite

NAN = float("nan")


@pytest.mark.parametrize(
    ("mode", "before", "later", "better"),
    [
        ("max", (0.5, 1.0), (0.6, 2.0), True),
        ("max", (0.5, 1.0), (0.4, 0.1), False),
        ("min", (0.5, 0.5), (0.4, 0.4), True),
        ("min", (0.5, 0.5), (0.6, 0.6), False),
        ("max", (0.5, 1.0), (0.5, 0.9), True),
        ("max", (0.5, 1.0), (0.5, 1.0), False),
        ("max", (0.5, 1.0), (0.5, NAN), False),
        ("max", (0.5, NAN), (0.5, 9.0), True),
    ],
)
def test_the_better_evaluation_has_the_better_value_or_with_equal_ones_the_lower_loss(
    mode: str, before: tuple[float, float], later: tuple[float, float], better: bool
) -> None:
    best = Best("val/metric", mode, before[0], loss=before[1], global_step=1, epoch=1)
    assert best.beaten_by(*later) is better


def test_the_meter_weighs_by_samples_and_survives_saving() -> None:
    meter = RunningMean(torch.device("cpu"))
    meter.add(torch.tensor(2.0), 3)
    saved = meter.state_dict()  # which does not change with the meter
    meter.add(torch.tensor(4.0), 1)
    assert meter.read() == pytest.approx(2.5)
    other = RunningMean(torch.device("cpu"))
    other.load_state_dict(saved)
    other.add(torch.tensor(4.0), 1)
    assert other.read() == meter.read()
    meter.reset()
    assert meter.read() == 0


def test_weights_of_another_model_are_refused_and_all_differences_named() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    weights = {"0.weight": torch.zeros(3, 4), "0.bias": torch.zeros(3), "1.bias": torch.zeros(1), "x": torch.zeros(1)}
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="are not those of this model") as caught:
        load_weights(model, weights)
    text = str(caught.value)
    assert "1 missing (1.weight)" in text
    assert "1 unexpected (x)" in text
    assert "0.weight (3, 4) for (3, 2)" in text
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_an_optimizer_takes_over_moments_and_keeps_its_own_settings() -> None:
    weight = nn.Parameter(torch.ones(3))
    old = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.5)
    weight.grad = torch.ones(3)
    old.step()
    new = torch.optim.AdamW([weight], lr=0.2, weight_decay=0.0)
    load_optimizer(new, old.state_dict())
    assert new.param_groups[0]["lr"] == 0.2
    assert new.param_groups[0]["weight_decay"] == 0.0
    assert torch.equal(new.state[weight]["exp_avg"], old.state[weight]["exp_avg"])
    assert int(new.state[weight]["step"]) == 1


def test_a_step_counter_in_a_group_is_that_of_the_file_also_for_an_optimizer_that_has_taken_steps() -> None:
    weight = nn.Parameter(torch.ones(3))
    old, used = (torch.optim.SGD([weight], lr=rate) for rate in (0.1, 0.2))
    for optimizer, steps in ((old, 3), (used, 7)):
        optimizer.param_groups[0]["step"] = steps  # as timm's LAMB does
    load_optimizer(used, old.state_dict())
    assert (used.param_groups[0]["step"], used.param_groups[0]["lr"]) == (3, 0.2)


def test_an_optimizer_of_other_groups_is_refused() -> None:
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))]
    old = torch.optim.SGD([{"params": [parameter]} for parameter in parameters], lr=0.1)
    with pytest.raises(ValueError, match="parameter group"):
        load_optimizer(torch.optim.SGD(parameters, lr=0.1), old.state_dict())


def first_not_finite(state: Any) -> str:
    return not_finite({"model": state.model.state_dict(), "optimizer": state.optimizer.state_dict()})


def test_whole_numbers_among_the_buffers_are_no_obstacle(bench: Any) -> None:
    build = lambda: nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 3))  # noqa: E731
    state = bench(build=build).state()
    assert first_not_finite(state) == ""
    state.model[0].running_var[0] = float("inf")
    assert first_not_finite(state) == "0.running_var"


def test_moments_count_as_well(bench: Any) -> None:
    one = bench(optimizer=torch.optim.Adam)
    state = one.state()
    one.loop(state=state).run()
    assert first_not_finite(state) == ""
    state.optimizer.state[state.model[1].bias]["exp_avg"][0] = float("nan")
    assert first_not_finite(state) == "optimizer.state.1.exp_avg"


@pytest.mark.parametrize("fused", [False, True])
def test_moments_of_another_shape_than_their_weight_are_refused(fused: bool) -> None:
    # A fused kernel looks at no shapes, and would write beyond the moments.
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    state["state"][0]["exp_avg"] = torch.zeros(1)
    with pytest.raises(ValueError, match=r"exp_avg has the shape \(1,\) for a weight of \(2, 3\)"):
        load_optimizer(torch.optim.AdamW(nn.Linear(3, 2).parameters(), fused=fused), state)


def test_moments_are_laid_out_as_their_weights_are() -> None:
    def trained(layout: torch.memory_format) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Conv2d(3, 4, 3).to(memory_format=layout)
        return model, torch.optim.AdamW(model.parameters(), fused=True)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        images = torch.linspace(0, 1, 150).view(2, 3, 5, 5)
        optimizer.zero_grad()
        model(images).square().sum().backward()
        optimizer.step()
        return model.weight.detach().clone().contiguous()

    first, optimizer = trained(torch.channels_last)
    step(first, optimizer)
    weights, state = copy.deepcopy(first.state_dict()), copy.deepcopy(optimizer.state_dict())
    expected = step(first, optimizer)
    other, resumed = trained(torch.contiguous_format)
    load_weights(other, weights)
    load_optimizer(resumed, state)
    assert resumed.state[other.weight]["exp_avg"].stride() == other.weight.stride()
    torch.testing.assert_close(step(other, resumed), expected)


def test_a_model_that_asks_for_the_version_of_its_state_dict_gets_its_weights_back() -> None:
    from torchvision.models import mnasnet0_5

    models = [mnasnet0_5(num_classes=3, dropout=0.0) for _ in range(2)]
    load_weights(models[0], dict(models[1].state_dict()))
    assert torch.equal(models[0].classifier[1].weight, models[1].classifier[1].weight)


@pytest.mark.parametrize("number", ["0", 99])
def test_moments_of_no_weight_are_refused(number: Any) -> None:
    weight = nn.Parameter(torch.ones(3))
    old = torch.optim.AdamW([weight])
    weight.grad = torch.ones(3)
    old.step()
    state = copy.deepcopy(old.state_dict())
    state["state"] = {number: state["state"][0]}
    with pytest.raises(ValueError, match=f"exp_avg belongs to weight {number!r}"):
        load_optimizer(torch.optim.AdamW([weight]), state)
