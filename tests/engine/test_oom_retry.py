"""Batches that do not fit are trained on in pieces, with the gradients of the whole, and a resume repeats it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner.engine.oom_retry import OOMRetryStep, is_out_of_memory
from runner.engine.plan import EpochPlan
from runner.engine.step import train_step

PARTS = """
import torch
from torch import nn

class Greedy(nn.Module):
    # Runs out of memory above a number of samples, in training, from a call on, as a device would.
    def __init__(self, in_channels: int, image_size: tuple[int, int], num_classes: int, most: int = 4, since: int = 0,
                 evaluated: int = 999):
        super().__init__()
        self.most, self.since, self.evaluated, self.calls = most, since, evaluated, 0
        self.first = nn.Linear(in_channels * image_size[0] * image_size[1], 8)
        self.dropout, self.head = nn.Dropout(0.5), nn.Linear(8, num_classes)
    def forward(self, images):
        features = self.dropout(self.first(images.flatten(1)).relu())
        if not self.training and len(images) > self.evaluated:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.")
        if self.training and torch.is_grad_enabled():
            self.calls += 1
            if len(images) > self.most and self.calls > self.since:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return self.head(features)
"""
RUN = (
    "data=synthetic", "data.dataset.samples=48", "data.image_size=4", "data.batch_size=8", "epochs=2", "model=mlp",
    "~model.hidden", "~model.dropout", "model._target_=my_greedy.Greedy", "evaluate.test=false",
)  # fmt: skip


class Layers(nn.Module):
    """A layer that notes what it draws, and runs out of memory in backward or forward above a number of samples."""

    def __init__(self, most: int, where: str) -> None:
        super().__init__()
        self.most, self.where = most, where
        self.first, self.norm, self.last = nn.Linear(12, 5), nn.BatchNorm1d(5, momentum=0.5), nn.Linear(5, 3)
        self.sizes: list[int] = []

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.first(images.flatten(1))
        if not self.where.startswith("plain"):
            hidden = self.norm(hidden)
        hidden = nn.functional.dropout(hidden, 0.5) if "dropout" in self.where else hidden
        self.sizes.append(len(images))
        if len(images) > self.most:
            if "backward" in self.where:
                hidden.register_hook(self._fail)
            else:
                self._fail()
        return self.last(hidden)

    def _fail(self, *_: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")


class Spy(torch.optim.SGD):
    """Keeps the gradients that it steps with."""

    def step(self, closure: Any = None) -> Any:
        self.seen = [p.grad.clone() for group in self.param_groups for p in group["params"] if p.grad is not None]
        return super().step(closure)


def trained(bench: Callable[..., Any], most: int, where: str, step: Any, accumulate: int = 1) -> Any:
    one = bench(14, optimizer=Spy, batch_size=14 // accumulate, build=lambda: Layers(most, where))
    state, plan = one.state(), EpochPlan(14, 14 // accumulate, accumulate)
    for batch, (size, weight, update) in zip(one.source.batches(0, 0, plan.batches), plan.parts(0), strict=True):
        step(state, one.step_parts(state.model), batch, weight, size, update=update)
    return state


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("where", ["plain forward", "plain backward"])
def test_the_gradients_are_those_of_the_whole_batch(bench: Any, where: str, accumulate: int) -> None:
    whole = trained(bench, 100, where, train_step, accumulate)
    pieces = trained(bench, 3, where, OOMRetryStep(14 // accumulate), accumulate)
    assert pieces.position.pieces == (8 if accumulate == 1 else 4)
    assert max(pieces.model.sizes[-7:]) == 2
    for a, b in zip(whole.optimizer.seen, pieces.optimizer.seen, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    for a, b in zip(whole.model.parameters(), pieces.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    assert pieces.meter.read() == pytest.approx(whole.meter.read(), rel=1e-6)


@pytest.mark.parametrize("where", ["dropout forward", "dropout backward"])
def test_an_attempt_that_failed_leaves_nothing_behind(bench: Any, where: str) -> None:
    searching = trained(bench, 4, where, OOMRetryStep(7), 2)

    def knowing(state: Any, *rest: Any, update: bool) -> None:
        state.position.pieces = 2
        step(state, *rest, update=update)

    step = OOMRetryStep(7)
    told = trained(bench, 4, where, knowing, 2)
    assert searching.position.pieces == told.position.pieces == 2
    for name, value in told.model.state_dict().items():
        assert torch.equal(value, searching.model.state_dict()[name]), name
    assert searching.meter.read() == told.meter.read()


def test_where_memory_suffices_it_is_the_plain_step_to_the_bit(bench: Any) -> None:
    plain = trained(bench, 100, "dropout forward", train_step, 2)
    split = trained(bench, 100, "dropout forward", OOMRetryStep(7), 2)
    assert split.position.pieces == 1
    assert all(torch.equal(a, b) for a, b in zip(plain.model.parameters(), split.model.parameters(), strict=True))
    assert plain.meter.read() == split.meter.read()


def test_what_does_not_fit_sample_by_sample_is_an_error(bench: Any) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        trained(bench, 0, "plain forward", OOMRetryStep(14))


def test_a_smaller_last_batch_has_fewer_pieces_and_not_smaller_ones(bench: Any) -> None:
    # Three batches of 8, the last of 4: in pieces of 2 each, as BatchNorm has nothing to do with a single sample.
    one = bench(20, batch_size=8, build=lambda: Layers(3, "norm forward"))
    state, step, plan = one.state(), OOMRetryStep(8), EpochPlan(20, 8, 1)
    for batch, (size, weight, update) in zip(one.source.batches(0, 0, plan.batches), plan.parts(0), strict=True):
        step(state, one.step_parts(state.model), batch, weight, size, update=update)
    assert state.position.pieces == 4
    assert state.model.sizes == [8, 4, *[2] * 10]


class Reassigning(Layers):
    """Reassigns a buffer in every forward pass."""

    def __init__(self, most: int, where: str) -> None:
        super().__init__(most, where)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, images: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + images.mean()
        return super().forward(images)


def test_buffers_that_are_assigned_anew_are_put_back_too(bench: Any) -> None:
    means = []
    for pieces in (1, 2):
        one = bench(8, batch_size=8, build=lambda: Reassigning(4, "forward"))
        state = one.state()
        state.position.pieces = pieces
        OOMRetryStep(8)(
            state, one.step_parts(state.model), next(iter(one.source.batches(0, 0, 1))), 1.0, 8, update=True
        )
        means.append(float(state.model.mean))
    assert means[0] == means[1]


def test_other_errors_pass_through(bench: Any) -> None:
    def wrong(*_: Any) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    one = bench(8, parts={"loss": wrong})
    state = one.state()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        OOMRetryStep(4)(
            state, one.step_parts(state.model), next(iter(one.source.batches(0, 0, 1))), 1.0, 4, update=True
        )


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: can't allocate memory"), True),
        (MemoryError(), True),
        (RuntimeError("shape mismatch"), False),
        (ValueError("not enough memory"), False),
    ],
)
def test_what_says_that_memory_is_short(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


@pytest.fixture
def greedy(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (workdir / "my_greedy.py").write_text(PARTS, encoding="utf-8")
    monkeypatch.syspath_prepend(str(workdir))
    monkeypatch.setenv("RUNNER_TRUST", "my_greedy")
    monkeypatch.delitem(sys.modules, "my_greedy", raising=False)


@pytest.mark.usefixtures("greedy")
def test_a_batch_that_does_not_fit_is_a_sentence_that_says_what_to_set(rejected: Any) -> None:
    found = rejected("train", "threads=1", "logger=none", *RUN)
    assert "data.batch_size: there is not enough memory for batches of 8: CUDA out of memory" in found.err
    assert "or on_oom=split" in found.err


@pytest.mark.usefixtures("greedy")
def test_an_evaluation_that_does_not_fit_names_its_own_key(rejected: Any) -> None:
    found = rejected("train", "threads=1", "logger=none", *RUN, "model.most=99", "model.evaluated=2")
    assert "evaluate.batch_size: there is not enough memory for batches of 512: CUDA out of memory" in found.err


@pytest.mark.usefixtures("greedy")
def test_a_run_goes_on_in_pieces_says_so_and_a_resume_repeats_it(train: Any, stopped: Any) -> None:
    words = (*RUN, "on_oom=split", "model.since=2")
    whole = train(*words)
    assert "from step 3 on each batch is trained in 2 micro-batches" in whole.out
    # The resumed process has memory enough, and goes on in pieces all the same.
    rest = train(f"ckpt_path={stopped(5, *words).directory}")
    assert rest.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert "in 2 micro-batches" in rest.out


@pytest.mark.usefixtures("greedy")
def test_memory_enough_gives_the_bits_of_a_plain_run(train: Any) -> None:
    found = {train(*RUN, "model.most=100", f"on_oom={word}").summary["weights_sha256"] for word in ("raise", "split")}
    assert len(found) == 1
