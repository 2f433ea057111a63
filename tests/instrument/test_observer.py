"""Hooks see what modules take and return, change nothing, and are gone afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner.instrument.observer import Observer, module_label, observe_gradients


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.alias = self.first
        self.second = nn.Sequential(nn.ReLU(), nn.Linear(3, 2))

    def forward(self, images: Tensor, *, scale: float = 1.0) -> Tensor:
        outputs: Tensor = self.second(self.first(images))
        return outputs * scale


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_modules_are_observed_in_the_order_in_which_they_run_and_end() -> None:
    model, seen = Net(), []
    with Observer(
        model,
        before=lambda name, module, inputs: seen.append(f"{name}({len(inputs)})"),
        after=lambda name, module, inputs, output: seen.append(f"/{name}"),
    ):
        model(torch.ones(1, 3), scale=2.0)
    assert seen == [
        "(2)", "first(1)", "/first", "second(1)", "second.0(1)", "/second.0", "second.1(1)", "/second.1", "/second", "/",
    ]  # fmt: skip
    model(torch.ones(1, 3))
    assert len(seen) == 10
    assert hooks(model) == 0


def test_what_is_returned_changes_nothing() -> None:
    model, images = Net(), torch.ones(2, 3)
    plain = model(images)
    with Observer(model, before=lambda *_: (0,), after=lambda *_: 0):
        assert torch.equal(model(images), plain)


def test_only_named_modules_are_observed_under_the_name_that_was_given() -> None:
    model, seen = Net(), []
    with Observer(model, after=lambda name, *_: seen.append(name), names=["alias", "second.1"]):
        model(torch.ones(1, 3))
    assert seen == ["alias", "second.1"]


def test_hooks_are_gone_after_an_error() -> None:
    model = Net()
    with pytest.raises(RuntimeError), Observer(model, before=lambda *_: None, after=lambda *_: None):
        model(torch.ones(1, 5))
    assert hooks(model) == 0


def test_with_always_a_module_that_raises_ends_too() -> None:
    model, ended = Net(), []

    def end(name: str, module: nn.Module, inputs: list[Any], output: Any) -> None:
        ended.append((name, output))

    with pytest.raises(RuntimeError), Observer(model, after=end, always=True):
        model(torch.ones(1, 5))
    assert ended == [("first", None), ("", None)]


def test_gradients_are_seen_and_not_changed() -> None:
    a, b = torch.ones(2, requires_grad=True), torch.ones(2)
    seen: list[Tensor] = []
    observe_gradients({"a": a, "b": [b]}, seen.append)
    (a * b * 3).sum().backward()
    assert [each.tolist() for each in seen] == [[3, 3]]
    assert a.grad is not None
    assert a.grad.tolist() == [3, 3]


def test_a_module_has_a_label() -> None:
    assert module_label("layers.2", nn.ReLU()) == "layers.2 (ReLU)"
    assert module_label("", nn.ReLU()) == "ReLU"
    assert module_label("", nn.ReLU(), "the model") == "the model (ReLU)"
