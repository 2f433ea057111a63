"""Steps whose gradients are not finite are skipped with every optimizer, and diagnosed."""

from __future__ import annotations

import functools
import random
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from nested import equal
from torch import Tensor, nn

from runner.engine import nonfinite
from runner.engine.errors import Diverged
from runner.engine.nonfinite import NonFiniteGuard
from runner.engine.state import RunningMean
from runner.optim.kernels import plain_step, start_momentum
from runner.optim.muon import Muon

FUSED = functools.partial(torch.optim.SGD, momentum=0.9, fused=True)
PLAIN = functools.partial(torch.optim.SGD, momentum=0.9)
ADAMW = functools.partial(torch.optim.AdamW, fused=True)
RMSPROP = torch.optim.RMSprop
LBFGS = torch.optim.LBFGS
NAN_AT = 3  # batch of the first epoch, from 0


class Spoilt:
    """A source of which one batch holds a NaN."""

    def __init__(self, source: Any, batch: int = NAN_AT, epoch: int = 0) -> None:
        self._source, self._batch, self._epoch = source, batch, epoch

    def __len__(self) -> int:
        return len(self._source)

    def batches(self, epoch: int, start: int, stop: int) -> Any:
        for number, batch in enumerate(self._source.batches(epoch, start, stop), start):
            if (epoch, number) == (self._epoch, self._batch):
                batch.images[1, 0, 0, 0] = float("nan")
            yield batch


def loop_of(bench: Any, policy: Any, optimizer: Any, *callbacks: Any, scaler: Any = None, **keys: Any) -> Any:
    made = bench(24, optimizer=optimizer, scaler=scaler, validate=False, **keys)
    state = made.state()
    start_momentum(state.optimizer)
    if policy == "skip":
        state.meter = RunningMean(torch.device("cpu"), finite_only=True)
    guard = NonFiniteGuard(state.model, state.optimizer, policy, scaler is not None)
    made.parts |= {"guard": guard, "optimizer_step": plain_step(state.optimizer)}
    loop = made.loop(*callbacks, state=state)
    loop.source = Spoilt(made.source)
    return loop


def without_the_step(loop: Any) -> Any:
    """The loop with good batches, of which it does not train on those of the step that would be skipped."""
    step, loop.source = loop.step, loop.source._source

    def skipping(part: Any, *given: Any) -> None:
        if loop.state.position.global_step != NAN_AT:
            part(*given)

    step.accumulate, step.update = (functools.partial(skipping, part) for part in (step.accumulate, step.update))
    return loop


def weights(model: nn.Module) -> list[Tensor]:
    return [tensor.clone() for tensor in model.state_dict().values()]


class Seen:
    """Notes the weights after every step, and what was skipped."""

    def __init__(self) -> None:
        self.weights: list[list[Tensor]] = []
        self.skipped: list[tuple[int, Any]] = []

    def on_step(self, loop: Any) -> None:
        self.weights.append(weights(loop.state.model))

    def on_step_skipped(self, loop: Any, step: int, diagnosis: Any) -> None:
        self.skipped.append((step, diagnosis))


class Look:
    """Asks for the outcome after some steps."""

    def __init__(self, every: int) -> None:
        self.every = every

    def on_step(self, loop: Any) -> None:
        if loop.state.position.global_step % self.every == 0:
            loop.check_nonfinite()


@pytest.mark.parametrize(
    "optimizer", [FUSED, PLAIN, ADAMW, RMSPROP, LBFGS], ids=["fused", "plain", "adamw", "rmsprop", "lbfgs"]
)
def test_no_weight_changes_from_the_first_such_step_on_until_somebody_looks(bench: Any, optimizer: Any) -> None:
    seen = Seen()
    loop = loop_of(bench, "raise", optimizer, seen, Look(6))
    with pytest.raises(Diverged, match=r"step 4 \(epoch 1\) are not finite: the images of sample \d+ have values"):
        loop.run()
    before, *after = seen.weights[2:]
    assert len(seen.weights) == 6
    assert all(equal(before, later) for later in after)
    assert not equal(seen.weights[1], before)
    [(step, diagnosis)] = seen.skipped
    assert step == 4
    assert diagnosis.batch["images"].isnan().any()
    assert len(diagnosis.batch["indices"]) == 4


@pytest.mark.parametrize("optimizer", [FUSED, PLAIN, ADAMW, RMSPROP], ids=["fused", "plain", "adamw", "rmsprop"])
def test_skip_leaves_out_the_step_alone(bench: Any, optimizer: Any) -> None:
    seen = Seen()
    loop = loop_of(bench, "skip", optimizer, seen, Look(5))
    loop.run()
    assert [step for step, _ in seen.skipped] == [4]
    assert equal(seen.weights[2], seen.weights[3])
    assert not equal(seen.weights[3], seen.weights[4])
    assert all(tensor.isfinite().all() for tensor in seen.weights[-1])
    # It is as if the batch had not been there: the same steps without it end with the same weights.
    other = without_the_step(loop_of(bench, "skip", optimizer, Look(5)))
    other.run()
    assert equal(weights(other.state.model), weights(loop.state.model))


def test_an_optimizer_that_has_to_be_asked_says_so(bench: Any) -> None:
    muon = functools.partial(Muon, fused=True)

    def waits(optimizer: Any, scaled: bool = False) -> bool:
        state = bench(8, optimizer=optimizer).state()
        return NonFiniteGuard(state.model, state.optimizer, "raise", scaled).waits

    assert [waits(optimizer) for optimizer in (FUSED, ADAMW, PLAIN, RMSPROP, muon)] == [False] * 2 + [True] * 3
    # On a GPU, of which the device without memory takes the place here, a class may see to it itself, as Muon does
    for device in ("cpu", "meta"):
        optimizer: Any = SimpleNamespace(obeys_flag=True, param_groups=[{"params": [torch.empty(1, device=device)]}])
        assert nonfinite._obeys_flag(optimizer) == (device != "cpu")
    # The scaler of fp16 asks for a number unless the optimizer's kernel takes its flag.
    assert [waits(optimizer, True) for optimizer in (ADAMW, RMSPROP, muon)] == [False, True, True]


class Drifting(nn.Module):
    """Assigns a new tensor to its buffer."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * inputs.detach().mean()
        return inputs


@pytest.mark.parametrize(
    "norm", [functools.partial(nn.BatchNorm2d, 3, momentum=None), Drifting], ids=["own", "assigned"]
)
def test_skip_puts_back_what_buffers_had_taken_in_and_how_many_batches(bench: Any, norm: Any) -> None:
    ends = []
    for skipped in (False, True):
        build = lambda: nn.Sequential(norm(), nn.Flatten(), nn.Linear(12, 3))  # noqa: E731
        loop = loop_of(bench, "skip", FUSED, Look(100), build=build)
        (without_the_step(loop) if skipped else loop).run()
        ends.append(weights(loop.state.model))
    assert equal(*ends)


def test_the_mean_loss_leaves_out_what_is_not_finite() -> None:
    meter = RunningMean(torch.device("cpu"), finite_only=True)
    for loss, samples in ((1.0, 4), (float("nan"), 4), (4.0, 2)):
        meter.add(torch.tensor(loss), samples)
    assert meter.read() == pytest.approx((4 * 1.0 + 2 * 4.0) / 6)
    assert meter.state_dict()["samples"] == 6
    meter.reset()
    assert meter.read() == 0.0


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_under_a_scaled_loss_an_overflow_belongs_to_scaling_and_a_nan_does_not(bench: Any, policy: str) -> None:
    seen = Seen()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60)
    loop = loop_of(bench, policy, FUSED, seen, Look(6), scaler=scaler)
    if policy == "raise":
        with pytest.raises(Diverged, match="step 4 "):
            loop.run()
    else:
        loop.run()
    assert [step for step, _ in seen.skipped] == [4]
    assert scaler.get_scale() < 2.0**60


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_step_is_found_again_across_epochs_and_windows(bench: Any, accumulate: int) -> None:
    seen = Seen()
    loop = loop_of(bench, "raise", FUSED, seen, Look(7), accumulate=accumulate, limits={"epochs": 9, "max_steps": None})
    # 6 batches an epoch: step 9 lies in epoch 2 (batch 2), or with windows of 3 in epoch 5.
    epoch, batch = ((8 // 6, 8 % 6), (8 // 2, 8 % 2 * 3 + 1))[accumulate == 3]
    loop.source = Spoilt(loop.source._source, batch, epoch)
    with pytest.raises(Diverged, match=rf"step 9 \(epoch {epoch + 1}\) are not finite: the images of sample"):
        loop.run()


class Roots(nn.Module):
    """Its gradient is infinite where the input is 0."""

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs * inputs).sqrt()


class Quotient(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs / inputs.detach().abs().amin()


@pytest.mark.parametrize(
    ("inner", "named"),
    [
        (Quotient, r"first in the output of inner\.1\.0 \(Quotient\)"),
        (Roots, r"outputs and loss are finite \(.*\), the gradients of inner\.0\.weight, inner\.0\.bias are not"),
    ],
    ids=["forward", "backward"],
)
def test_the_module_is_named(bench: Any, inner: Any, named: str) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(12, 8), nn.Sequential(inner()), nn.Linear(8, 3))
        nn.init.zeros_(model[0].weight)
        nn.init.zeros_(model[0].bias)
        return nn.Sequential(OrderedDict(flat=nn.Flatten(), inner=model))

    loop = loop_of(bench, "raise", FUSED, Look(1), build=build)
    loop.source = loop.source._source
    before = weights(loop.state.model)
    with pytest.raises(Diverged, match=named):
        loop.run()
    assert equal(weights(loop.state.model), before)


def test_weights_that_were_not_finite_before_are_named(bench: Any) -> None:
    loop = loop_of(bench, "raise", FUSED, Look(1))
    loop.source = loop.source._source
    with torch.no_grad():
        loop.state.model[1].bias[0] = float("inf")
    with pytest.raises(Diverged, match=r"step 1 .* weights are not finite: 1\.bias"):
        loop.run()


def test_a_plain_step_makes_the_same_weights_and_calls_hooks_that_are_registered(bench: Any) -> None:
    ends = []
    for plain in (False, True):
        torch.manual_seed(0)
        layer = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)
        step = plain_step(optimizer) if plain else optimizer.step
        for _ in range(3):
            layer(torch.ones(1, 3)).sum().backward()
            step()
        ends.append(weights(layer))
    assert equal(*ends)
    called: list[int] = []
    optimizer.register_step_post_hook(lambda *_: called.append(1))
    step()
    assert called == [1]
    own = type("Own", (torch.optim.SGD,), {})([torch.zeros(1, requires_grad=True)], lr=0.1)
    assert plain_step(own) == own.step, "a class from elsewhere keeps its step"


def test_weights_of_complex_numbers_are_watched_as_well() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    model = nn.ParameterList([weight])
    guard = NonFiniteGuard(model, torch.optim.SGD([weight], lr=0.1), "raise", False)
    weight.grad = torch.ones_like(weight)
    assert guard.allows_step()
    weight.grad[1] = float("nan")
    assert not guard.allows_step()
    weight.grad = None
    guard.start()
    assert guard.allows_step()


def test_looking_into_it_changes_no_weight_buffer_or_generator(bench: Any) -> None:
    class Drawing(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return inputs * random.random() * float(np.random.rand())

    def build() -> nn.Module:
        return nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Dropout(0.5), Drawing(), nn.Linear(12, 3))

    def ends(look: bool) -> list[Tensor]:
        random.seed(0)
        np.random.seed(0)
        seen = Seen()
        loop = loop_of(bench, "skip", FUSED, seen, *([Look(5)] if look else []), build=build)
        loop.run()
        assert [step for step, _ in seen.skipped] == [4] * look
        return [*weights(loop.state.model), torch.get_rng_state()]

    assert equal(ends(True), ends(False))
