"""How many tensors an optimizer updates at once: chosen where it is left open, and refused where it is not supported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runner.base.errors import UserError
from runner.optim.kernels import Kernels, choose_kernels, start_momentum

SMALL = [nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(3))]
NEITHER = {"fused": False, "foreach": False}
COMPLEX = [nn.Parameter(torch.randn(3, dtype=torch.complex64))]


def choose(name: str, parameters: list[Any] = SMALL, sparse: bool = False, **options: Any) -> Kernels:
    target = name if "." in name else f"torch.optim.{name}"
    return choose_kernels({"_target_": target, "foreach": None, **options}, parameters, sparse)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad", "runner.optim.muon.Muon"])
def test_left_open_it_is_fused_where_torch_has_that(name: str) -> None:
    found = choose(name)
    assert found.arguments["fused"] is True
    assert not found.arguments["foreach"]
    assert found.name == "fused"
    assert found.reason.startswith("auto: ")
    assert found.reason.endswith("on cpu")


@pytest.mark.parametrize("name", ["RMSprop", "Adadelta", "NAdam"])
def test_left_open_without_fused_kernels_it_is_torchs_default(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reason = f"auto: {name} has no fused kernel; torch's default"
    assert choose(name) == Kernels({"foreach": False}, "one tensor after the other", reason)
    monkeypatch.setattr("runner.optim.kernels._default_to_fused_or_foreach", lambda *_, **__: (False, True))
    assert choose(name) == Kernels({"foreach": True}, "foreach", reason)  # as on a GPU
    assert choose(name, foreach=False).arguments == {"foreach": False}


def test_what_has_no_such_choice_is_left_alone() -> None:
    assert choose("torch.optim.Muon", SMALL[:1]) == Kernels({}, "", "")
    assert choose("runner.models.mlp.MLP") == Kernels({}, "", ""), "what torch does not know has its own defaults"


@pytest.mark.parametrize(
    ("options", "arguments", "reason"),
    [
        ({"fused": True}, {"fused": True, "foreach": False}, "optimizer.fused=true"),
        ({"foreach": True}, {"fused": False, "foreach": True}, "optimizer.foreach=true"),
        ({"foreach": True, "fused": False}, {"fused": False, "foreach": True}, "optimizer.foreach=true"),
        ({"fused": False}, NEITHER, "auto: optimizer.fused=false; torch's default"),
        ({"fused": False, "foreach": False}, NEITHER, "optimizer.fused=false, and optimizer.foreach=false"),
        (
            {"foreach": False},
            {"fused": True, "foreach": False},
            "auto: AdamW has one kernel for the whole update on cpu",
        ),
    ],
)
def test_what_is_set_is_kept(options: dict[str, Any], arguments: dict[str, bool], reason: str) -> None:
    found = choose("AdamW", **options)
    assert (found.arguments, found.reason) == (arguments, reason)


@pytest.mark.parametrize(
    ("parameters", "sparse", "words"),
    [
        (SMALL, True, "fused kernels do not support sparse gradients"),
        (COMPLEX, False, "requires all the params to be floating point Tensors"),
    ],
)
def test_fused_where_it_cannot_be_had_is_a_sentence(parameters: list[Any], sparse: bool, words: str) -> None:
    said = rf"^optimizer.fused: true is not supported: .*{words}.*\n.*allowed: null or false"
    with pytest.raises(UserError, match=said):
        choose("AdamW", parameters, sparse, fused=True)
    found = choose("AdamW", parameters, sparse)
    assert found.arguments == NEITHER
    assert words in found.reason


def test_a_first_step_that_overflows_leaves_no_momentum_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    # Whatever the memory of a new buffer holds, here the worst of it.
    made = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *args, **named: made(*args, **named).fill_(torch.nan))
    ends = []
    for name, momentum in (("fused", 0.9), ("foreach", 0.9)):
        weight = nn.Parameter(torch.ones(4))
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=momentum, **{name: True})
        start_momentum(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for spoil in (True, False, False):
            scaler.scale(weight.square().sum() * (torch.inf if spoil else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        ends.append(weight.detach())
    assert torch.allclose(*ends)
    assert (ends[0] < 1).all()


def test_fused_sgd_with_dampening_is_not_had_as_a_first_step_may_be_left_out() -> None:
    node = {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9, "dampening": 0.5}
    weights = [torch.zeros(2, requires_grad=True)]
    assert choose_kernels(node | {"dampening": 0.0}, weights).arguments["fused"]
    assert not choose_kernels(node, weights).arguments["fused"]
    with pytest.raises(UserError, match=r"optimizer.fused: true is not supported: fused SGD with dampening"):
        choose_kernels(node | {"fused": True}, weights)


def test_a_loaded_state_follows_the_settings_of_the_optimizer_that_loads_it() -> None:
    from runner.engine.state import load_optimizer

    seen: list[Any] = []

    class Watched(torch.optim.AdamW):
        def load_state_dict(self, state: Any) -> None:
            seen.extend(group["fused"] for group in state["param_groups"])
            super().load_state_dict(state)

    def trained(kind: Any, **options: Any) -> tuple[Tensor, Any]:
        weight = torch.ones(3, requires_grad=True)
        weight.grad = torch.ones(3)
        optimizer = kind([weight], **options)
        optimizer.step()
        return weight, optimizer

    _, before = trained(torch.optim.AdamW, fused=False, lr=0.5)
    _, after = trained(Watched, fused=True, lr=0.1)
    load_optimizer(after, before.state_dict())
    assert seen == [True], "torch moves the counter of steps to where fused kernels need it only if told that they are"
    assert (after.param_groups[0]["fused"], after.param_groups[0]["lr"]) == (True, 0.1)


@pytest.mark.parametrize(
    ("words", "row"),
    [
        (("optimizer=rmsprop", "+optimizer.fused=null"), "update     one tensor after the other"),
        (("optimizer=sgd",), "update     fused"),
        (("optimizer=muon", "model=mlp"), "update     fused"),
        (("optimizer=adam", "optimizer.foreach=true"), "update     foreach"),
    ],
)
def test_a_run_says_how_its_weights_are_updated(words: tuple[str, ...], row: str, train: Any) -> None:
    result = train(*words, "data=synthetic", "data.dataset.samples=24", "max_steps=2", "evaluate.test=false")
    assert row in result.out


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("RMSprop", {"fused": True}, r"\.fused: RMSprop has no such kernels"),
        ("torch.optim.Muon", {"foreach": True}, r"\.foreach: \w+ has no such kernels"),
        ("AdamW", {"fused": False, "capturable": True}, ": AdamW cannot take a step: If capturable=True.*\n.*allowed: "),
        ("RMSprop", {"capturable": True}, ": RMSprop cannot take a step: If capturable=True.*\n.*allowed: "),
        ("NAdam", {"differentiable": True}, ": NAdam cannot take a step: a leaf Variable that requires grad.*\n.*allowed: "),
    ],
)  # fmt: skip
def test_what_an_optimizer_cannot_do_is_a_sentence(name: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=f"^optimizer{says}"):
        choose(name, **options)
