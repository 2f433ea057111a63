"""An operation without a deterministic form is named, with the way out."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.deterministic
from torch import nn

from runner.base.errors import UserError
from runner.config.load import resolve_config
from runner.config.schema import Train
from runner.runtime import device
from runner.runtime.determinism import operations_named, refusal

NETS = """
import torch
from torch import nn

class _Put(torch.autograd.Function):
    @staticmethod
    def forward(context, features):
        return features.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient.clone().put_(torch.tensor([0, 1]), torch.zeros(2))

class PutBack(nn.Module):
    def forward(self, features):
        return _Put.apply(features)

class Unpooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)

    def forward(self, images):
        return self.unpool(*self.pool(images))

class Net(nn.Module):
    def __init__(self, num_classes, kind, **unused):
        super().__init__()
        layer = {"unpool": Unpooled, "put": PutBack, "plain": nn.Identity}[kind]()
        self.layers = nn.Sequential(nn.Conv2d(1, 1, 1), layer, nn.Flatten(), nn.Linear(64, num_classes))

    def forward(self, images):
        return self.layers(images)

class Putting:
    def __call__(self, images, rng):
        return images.clone().put_(torch.tensor([0]), torch.zeros(1, dtype=images.dtype))
"""
NO_FORM = "put_ does not have a deterministic implementation"
ATTENTION = "Memory Efficient attention defaults to a non-deterministic algorithm"
FEW = (
    "epochs=1", "limit.train_batches=3", "limit.eval_batches=1", "evaluate.test=false", "threads=1", "logger=none",
    "log.progress=false", "log.curves=false",
)  # fmt: skip


@pytest.fixture
def refusing() -> Iterator[Callable[[bool], None]]:
    """Switches deterministic algorithms on, with errors or with warnings."""
    yield lambda warn: torch.use_deterministic_algorithms(True, warn_only=warn)
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (f"{NO_FORM}, but you set 'torch.use_", NO_FORM),
        (
            "Deterministic behavior was enabled, but this operation is not deterministic because it uses CuBLAS and you have "
            "CUDA >= 10.2: set CUBLAS_WORKSPACE_CONFIG=:4096:8",
            "CUBLAS_WORKSPACE_CONFIG=:4096:8",
        ),
        (f"{ATTENTION}. To", ATTENTION),
        (f"Caught RuntimeError in worker 0.\nRuntimeError: {NO_FORM}", f"deterministic: {NO_FORM}"),
    ],
)
def test_what_torch_refuses_is_an_error_with_the_key_and_the_way_out(message: str, told: str) -> None:
    error = str(refusal(RuntimeError(message)))
    assert told in error
    assert "allowed: deterministic=warn" in error
    assert refusal(ValueError(message)) is None


def test_any_other_error_and_warning_is_left_alone() -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2"), operations_named(pytest.fail):
        torch.ones(2, 3) @ torch.ones(4, 5)
    with warnings.catch_warnings(record=True) as seen, operations_named(pytest.fail):
        warnings.simplefilter("always")
        warnings.warn("something else", stacklevel=1)
    assert [str(warning.message) for warning in seen] == ["something else"]


def test_in_warn_mode_each_operation_is_reported_once(refusing: Callable[[bool], None]) -> None:
    refusing(True)
    told: list[str] = []
    with operations_named(told.append):
        for _ in range(3):
            torch.zeros(4).put_(torch.tensor([0]), torch.ones(1))
        torch.zeros(4).put_(torch.tensor([0]), torch.ones(1))
        nn.functional.max_unpool2d(torch.randn(1, 1, 2, 2), torch.arange(4).view(1, 1, 2, 2), 2)
    names = ("put_", "max_unpooling2d_forward_out")
    assert told == [f"deterministic=warn: {name} does not have a deterministic implementation" for name in names]


@pytest.mark.parametrize(
    ("words", "op"),
    [
        ("model={_target_: odd_nets.Net, kind: unpool}", "max_unpooling2d_forward_out"),
        ("model={_target_: odd_nets.Net, kind: put}", "put_"),
        ("transform.train=[{_target_: odd_nets.Putting}]", "put_"),
    ],
    ids=["forward", "backward", "transform"],
)
def test_a_run_refuses_it_or_reports_it_once_and_ends(
    run: Any, accepted: Any, rejected: Any, own_module: Any, words: str, op: str
) -> None:
    own_module("odd_nets", NETS)
    refused = rejected("train", *FEW, words, "deterministic=true")
    assert f"error: deterministic: {op} does not have a deterministic implementation" in refused.err
    warned = accepted("train", *FEW, words, "deterministic=warn")
    assert warned.out.count(f"warning: deterministic=warn: {op} does not have a deterministic implementation") == 1
    assert warned.summary["status"] == "finished"
    assert run("train", *FEW, words).status == 0, "nobody asked for it"


def test_a_deterministic_run_says_what_is_seeded_and_what_is_not(run: Any) -> None:
    told = run("train", *FEW, "deterministic=true").out
    assert "seeded      Python, NumPy, torch, each sample" in told
    assert "not: generators created by other code" in told
    assert "same bits   on this machine" in told
    assert "seeded" not in run("train", *FEW).out


def test_memory_that_nothing_was_written_to_is_filled(
    monkeypatch: pytest.MonkeyPatch, refusing: Any, compose: Any
) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    refusing(False)
    device.configure_torch(resolve_config(compose("threads=1", "deterministic=true"), Train), torch.device("cpu"))
    assert torch.empty(1000).isnan().all()


@pytest.mark.parametrize("mode", [True, "warn"])
def test_the_workspace_of_cublas_is_set_before_the_device_is_touched(
    monkeypatch: pytest.MonkeyPatch, run: Any, mode: Any
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    seen = []

    def choose(name: str) -> tuple[torch.device, str]:
        seen.append(os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
        return torch.device("cpu"), "as set"

    monkeypatch.setattr("runner.run.run.choose_device", choose)
    assert run("train", *FEW).status == 0
    assert run("train", *FEW, f"deterministic={str(mode).lower()}").status == 0
    assert seen == [None, ":4096:8"]


def test_a_workspace_that_cublas_does_not_repeat_with_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    device.prepare_repeating(True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    device.prepare_repeating("warn")
    device.prepare_repeating(False)
    with pytest.raises(UserError, match="is not deterministic with the CUBLAS_WORKSPACE_CONFIG=:0:0"):
        device.prepare_repeating(True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    device.prepare_repeating(True)
