"""Adaptive gradient clipping: the bound holds for every unit, measured afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner.engine.step import AdaptiveClip

RATIO = 0.02


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 6), nn.Linear(6, 3))


def units(tensor: Tensor) -> Tensor:
    """Norm of each unit, computed one by one."""
    rows = [tensor] if tensor.ndim < 2 else list(tensor)
    return torch.stack([row.detach().square().sum().sqrt() for row in rows])


def with_gradients(net: nn.Module, size: float) -> nn.Module:
    for parameter in net.parameters():
        parameter.grad = size * torch.randn_like(parameter)
    return net


@pytest.mark.parametrize("size", [1e-6, 0.05, 100.0])
def test_no_unit_has_a_gradient_above_its_bound(size: float) -> None:
    net = with_gradients(model(), size)
    before = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    AdaptiveClip(net, RATIO)()
    bounded = 0
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None
        if name.startswith("4."):  # the last linear layer
            assert torch.equal(parameter.grad, before[name])
            continue
        limits = RATIO * units(parameter).clamp_min(1e-3)
        found, was = units(parameter.grad), units(before[name])
        assert bool((found <= limits * 1.0001).all()), name
        bounded += int((was > limits).sum())
        torch.testing.assert_close(found, torch.minimum(was, limits), rtol=1e-4, atol=0.0)
        # The direction stays.
        cosine = nn.functional.cosine_similarity(parameter.grad.flatten(), before[name].flatten(), dim=0)
        assert float(cosine) > (0.999 if parameter.ndim < 2 else 0.5)
    assert bool(bounded) == (size > 1e-5)


def test_a_gradient_within_its_bound_keeps_its_bits() -> None:
    net = with_gradients(model(), 1e-7)
    before = [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
    AdaptiveClip(net, RATIO)()
    assert all(torch.equal(a, b.grad) for a, b in zip(before, net.parameters(), strict=True) if b.grad is not None)


def test_units_at_zero_can_leave_it_and_gradients_of_zero_stay() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    nn.init.zeros_(net[0].weight)
    net[0].weight.grad = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    AdaptiveClip(net, 0.5)()
    torch.testing.assert_close(net[0].weight.grad, torch.tensor([[0.6, 0.8], [0.0, 0.0]]) * 0.5e-3)


def test_the_norm_is_clipped_last(bench: Any) -> None:
    net = with_gradients(model(), 100.0)
    one = bench(build=lambda: net, parts={"clip_norm": 0.001, "clip_adaptive": AdaptiveClip(net, RATIO)})
    state = one.state()
    one.step(state).clip(state.optimizer)
    norm = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]).norm()
    torch.testing.assert_close(norm, torch.tensor(0.001), rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_step_bounds_what_the_optimizer_gets_and_waits_for_nothing(bench: Any, waits: Any, scaled: bool) -> None:
    seen: list[Tensor] = []

    class Spy(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.extend(p.grad.clone() for group in self.param_groups for p in group["params"])

    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.Linear(5, 3))
    one = bench(optimizer=Spy, build=lambda: net)
    one.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
    one.parts = {"clip_adaptive": AdaptiveClip(net, 1e-3)}
    with waits:
        one.one_step()
    assert scaled or waits.found == []  # the scaler asks the optimizer's gradients itself
    for parameter, gradient in list(zip(net.parameters(), seen, strict=True))[:2]:
        assert bool((units(gradient) <= 1.001e-3 * units(parameter).clamp_min(1e-3)).all())
        assert float(gradient.abs().max()) > 0


def test_a_run_with_it_ends_with_other_weights(train: Any) -> None:
    words = ("model=mlp", "model.hidden=[8]", "max_steps=5", "evaluate.test=false", "optimizer=sgd")
    assert len({train(*words, f"grad_clip.agc={ratio}").summary["weights_sha256"] for ratio in ("null", 0.001)}) == 2
