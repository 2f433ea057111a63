"""One step: the right gradient, bounded as asked, in the documented order, without waiting for the device."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner.engine.plan import EpochPlan
from runner.engine.state import TrainState
from runner.engine.step import AdaptiveClip
from runner.runtime.precision import choose_precision

CPU = torch.device("cpu")


def gradients(state: TrainState) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in state.model.parameters() if parameter.grad is not None]


class Spy(torch.optim.SGD):
    """Keeps the gradients that it steps with."""

    def step(self, closure: Any = None) -> Any:
        self.seen = [p.grad.clone() for group in self.param_groups for p in group["params"]]
        return super().step(closure)


@pytest.mark.parametrize(("samples", "size", "accumulate"), [(10, 4, 3), (9, 2, 5), (8, 4, 2), (7, 3, 4)])
def test_an_accumulated_gradient_is_that_of_one_big_batch(bench: Any, samples: int, size: int, accumulate: int) -> None:
    one = bench(samples, optimizer=Spy, batch_size=samples)
    big = one.state()
    one.one_step(big)

    many = bench(samples, optimizer=Spy)
    small, plan = many.state(), EpochPlan(samples, size, accumulate)
    assert plan.steps == 1, "the case must fit one window"
    many.batch_size, step = size, many.step(small)
    for batch, (count, weight, update) in zip(many.source.batches(0, 0, plan.batches), plan.parts(0), strict=True):
        step(batch, weight, count, update=update)
    torch.testing.assert_close(big.optimizer.seen, small.optimizer.seen, rtol=1e-5, atol=1e-7)  # type: ignore[attr-defined]
    torch.testing.assert_close(big.model.state_dict(), small.model.state_dict(), rtol=1e-5, atol=1e-7)


def test_a_window_updates_once_and_leaves_no_gradient_behind(bench: Any) -> None:
    one = bench()
    state = one.state()
    step = one.step(state)
    before = [parameter.clone() for parameter in state.model.parameters()]
    step(one.first(), 0.5, 4, update=False)
    assert all(torch.equal(a, b) for a, b in zip(before, state.model.parameters(), strict=True))
    assert len(gradients(state)) == 2
    step(one.first(), 0.5, 4, update=True)
    assert not any(torch.equal(a, b) for a, b in zip(before, state.model.parameters(), strict=True))
    assert gradients(state) == []


@pytest.mark.parametrize("limit", [0.001, 0.1])
def test_clipping_bounds_the_norm_of_all_gradients_together(bench: Any, limit: float) -> None:
    state = bench(optimizer=Spy, parts={"clip_norm": limit}, batch_size=10).one_step()
    norm = torch.cat([gradient.flatten() for gradient in state.optimizer.seen]).norm()
    assert limit * 0.99 < float(norm) <= limit * 1.0001


def test_clipping_bounds_each_element_and_keeps_the_others(bench: Any) -> None:
    free, bounded = bench(optimizer=Spy), bench(optimizer=Spy, parts={"clip_value": 0.02})
    seen = [one.one_step().optimizer.seen for one in (free, bounded)]
    for a, b in zip(*seen, strict=True):
        assert torch.equal(a.clamp(-0.02, 0.02), b)
    assert any(bool((a.abs() > 0.02).any()) for a in seen[0])


def test_the_value_is_clipped_before_the_norm(bench: Any) -> None:
    one = bench(build=lambda: nn.Linear(2, 1, bias=False), parts={"clip_norm": 1.0, "clip_value": 4.0})
    state = one.state()
    (weight,) = state.model.parameters()
    weight.grad = torch.tensor([[100.0, 3.0]])
    one.step(state).clip(state.optimizer)
    torch.testing.assert_close(weight.grad, torch.tensor([[0.8, 0.6]]))


class Scaler:
    """A gradient scaler that writes down what is asked of it."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls
        self.inner = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self.calls.append(name)
            return getattr(self.inner, name)(*args)

        return call


def test_a_step_does_everything_in_the_documented_order(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    inside: list[bool] = []

    class Noting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            calls.append("optimizer.step")
            return super().step(closure)

    @contextlib.contextmanager
    def autocast() -> Any:
        calls.append("autocast")
        inside.append(True)
        yield
        inside.pop()

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        calls.append(f"loss inside={bool(inside)}")
        return nn.functional.cross_entropy(logits, targets)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_value_", lambda *_: calls.append("clip value"))
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", lambda *_: calls.append("clip norm"))
    parts = {"autocast": autocast, "loss": loss, "clip_norm": 1.0, "clip_value": 1.0}
    one = bench(optimizer=Noting, scaler=Scaler(calls), parts=parts)
    state = one.state()
    state.model[1].weight.register_hook(lambda _: calls.append(f"backward inside={bool(inside)}"))  # type: ignore[union-attr]
    one.one_step(state)
    forward = ["autocast", "loss inside=True", "scale", "backward inside=False"]
    update = ["unscale_", "clip value", "clip norm", "step", "optimizer.step", "update"]
    assert calls == forward + update
    assert all(parameter.grad is None for parameter in state.model.parameters())


def test_a_scaled_fp16_step_equals_the_plain_one(bench: Any) -> None:
    plain, scaled = bench(optimizer=Spy), bench(optimizer=Spy)
    precision = choose_precision("fp16", CPU)
    scaled.scaler, scaled.parts = precision.scaler, {"autocast": precision.autocast, "clip_norm": 100.0}
    seen = [one.one_step().optimizer.seen for one in (plain, scaled)]
    for a, b in zip(*seen, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)
        assert not torch.equal(a, b), "half precision was not used"


def test_an_overflowing_fp16_step_changes_no_weight_and_lowers_the_scale(bench: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    huge = lambda logits, targets: (logits * 1e38).sum() * 1e38  # noqa: E731
    one = bench(scaler=scaler, parts={"loss": huge})
    state = one.state()
    before = [parameter.clone() for parameter in state.model.parameters()]
    one.one_step(state)
    assert all(torch.equal(a, b) for a, b in zip(before, state.model.parameters(), strict=True))
    assert scaler.get_scale() == 512.0


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_never_waits_for_the_device(bench: Any, waits: Any, accumulate: int) -> None:
    one = bench(parts={"clip_norm": 1.0, "clip_value": 0.5})
    state = one.state()
    step = one.step(state)
    with waits:
        for number, batch in enumerate(one.source.batches(0, 0, 2)):
            step(batch, 1 / accumulate, 4, update=(number + 1) % accumulate == 0)
        assert waits.found == []
        state.meter.read()
        assert waits.found == ["_local_scalar_dense"], "the counter does not see what it should"


RATIO = 0.02  # of adaptive clipping


def layers() -> nn.Sequential:
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
    net = with_gradients(layers(), size)
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
    net = with_gradients(layers(), 1e-7)
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
    net = with_gradients(layers(), 100.0)
    one = bench(build=lambda: net, parts={"clip_norm": 0.001, "clip_adaptive": AdaptiveClip(net, RATIO)})
    state = one.state()
    one.step(state).clip(state.optimizer)
    norm = torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None]).norm()
    torch.testing.assert_close(norm, torch.tensor(0.001), rtol=1e-3, atol=0.0)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_step_bounds_what_the_optimizer_gets_and_waits_for_nothing(bench: Any, waits: Any, scaled: bool) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.Linear(5, 3))
    one = bench(optimizer=Spy, build=lambda: net)
    one.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaled else None
    one.parts = {"clip_adaptive": AdaptiveClip(net, 1e-3)}
    with waits:
        seen = one.one_step().optimizer.seen
    assert scaled or waits.found == []  # the scaler asks the optimizer's gradients itself
    for parameter, gradient in list(zip(net.parameters(), seen, strict=True))[:2]:
        assert bool((units(gradient) <= 1.001e-3 * units(parameter).clamp_min(1e-3)).all())
        assert float(gradient.abs().max()) > 0


def test_a_run_with_adaptive_clipping_ends_with_other_weights(train: Any) -> None:
    words = ("model=mlp", "model.hidden=[8]", "max_steps=5", "evaluate.test=false", "optimizer=sgd")
    assert len({train(*words, f"grad_clip.agc={ratio}").summary["weights_sha256"] for ratio in ("null", 0.001)}) == 2
