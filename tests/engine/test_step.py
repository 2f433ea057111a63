"""One step: the right gradient, bounded as asked, in the documented order, without waiting for the device."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner.engine.plan import EpochPlan
from runner.engine.state import TrainState
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
    for a, b in zip(big.optimizer.seen, small.optimizer.seen, strict=True):  # type: ignore[attr-defined]
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    for a, b in zip(big.model.parameters(), small.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


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
