"""`watch.finite`: the first output or gradient that is not finite ends the run at once, by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from runner.engine.diagnosis import FiniteWatch
from runner.engine.errors import Diverged
from runner.engine.freezing import Freezing, Frozen
from runner.engine.step import train_step


class Root(nn.Module):
    """The square root: its gradient at 0 is infinite."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.sqrt()


class Log(nn.Module):
    """The logarithm, of which that of a negative number is NaN."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.log()


def step(bench: Any, state: Any, images: torch.Tensor | None = None) -> None:
    batch = next(iter(bench.source.batches(0, 0, 1)))
    batch = batch if images is None else batch._replace(data=(images, batch.targets))
    train_step(state, bench.step_parts(state.model), batch, 1.0, len(batch.targets), update=True)


def network(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 8), *layers, nn.Linear(8, 3))


def test_the_first_output_is_named_before_any_weight_changes(bench: Any) -> None:
    small = bench(build=network(Log(), nn.ReLU()))
    state = small.state()
    before = state.model[1].weight.clone()
    FiniteWatch(state)
    with pytest.raises(Diverged, match=r"in step 1 the output of 2 \(Log\) is the first that is not finite"):
        step(small, state)
    assert torch.equal(state.model[1].weight, before)


def test_the_first_gradient_is_named_and_where_it_was_finite_before(bench: Any) -> None:
    small = bench(build=network(nn.ReLU(inplace=True), Root()))
    state = small.state()
    state.position.global_step = 6
    FiniteWatch(state)
    said = (
        r"in step 7 the gradient at the output of 2 \(ReLU\) is the first that is not finite; "
        r"at the output of 3 \(Root\) it was finite"
    )
    with pytest.raises(Diverged, match=said):
        step(small, state)


def test_images_that_are_not_finite_are_told(bench: Any) -> None:
    small = bench()
    state = small.state()
    FiniteWatch(state)
    with pytest.raises(Diverged, match="the images of the batch"):
        step(small, state, torch.full((4, 3, 2, 2), float("inf")))


def test_a_gradient_of_a_weight_is_named(bench: Any) -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(()))

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return images + self.scale.sqrt()

    small = bench(build=network(Weighted()))
    state = small.state()
    FiniteWatch(state)
    with pytest.raises(Diverged, match=r"the gradient of 2\.scale is the first that is not finite"):
        step(small, state)


def test_an_evaluation_is_looked_at_too(bench: Any) -> None:
    small = bench(build=network(Log()))
    state = small.state()
    FiniteWatch(state)
    state.model.eval()
    with pytest.raises(Diverged, match="in the evaluation after step 0"), torch.inference_mode():
        state.model(small.images)


def test_gradients_of_a_scaled_loss_may_overflow(bench: Any) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1e38)
    small = bench(build=network(), scaler=scaler)
    state = small.state()
    FiniteWatch(state)
    small.parts = {"loss": lambda logits, targets: 1e4 * nn.functional.cross_entropy(logits, targets)}
    step(small, state)
    assert float(scaler.get_scale()) < 1e38


def test_a_run_that_is_sound_ends_with_the_same_bits(train: Any, run: Any) -> None:
    words = ("model=mlp", "model.hidden=[8]", "epochs=1", "limit.train_batches=3", "transform=none")
    plain, looked_at = train(*words), train(*words, "debug=nan")
    assert looked_at.summary["weights_sha256"] == plain.summary["weights_sha256"]
    wild = run("train", "threads=1", "logger=none", *words, "debug=nan", "optimizer=sgd", "optimizer.lr=1e30")
    assert wild.status == 3
    assert "is the first that is not finite" in wild.err


class Steep(torch.autograd.Function):
    """The identity, whose gradient is infinite for weights alone."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / 0


class Weighted(nn.Module):
    """A scale of which no output shows that its gradient is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images * Steep.apply(self.scale)


def test_weights_that_are_frozen_for_a_while_are_looked_at_once_they_are_trained(bench: Any) -> None:
    small = bench(build=network(Weighted()))
    state = small.state()
    late = Frozen("late", (state.model[2].scale,), (state.model[2],), steps=1)
    state.freezing = Freezing(state.model, [late])
    state.train()
    FiniteWatch(state)
    assert not state.model[2].scale.requires_grad
    step(small, state)
    state.position.global_step = 1
    state.freezing.follow(state.position)
    with pytest.raises(Diverged, match=r"in step 2 the gradient of 2\.scale is the first that is not finite"):
        step(small, state)
