"""Muon with AdamW: which parameters go where, equality with torch's two, and exact continuation."""

from __future__ import annotations

import copy
import io
import logging
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from nested import equal
from torch import nn

from runner.config.schema.sections import Compiler
from runner.models.mlp import MLP
from runner.models.small_cnn import SmallCNN
from runner.models.vit import ViT
from runner.optim import muon
from runner.optim.muon import Muon
from runner.runtime.toggles import compile_optimizer

IMAGES = torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(1))
TARGETS = torch.arange(16) % 5


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MLP(1, (8, 8), 5, hidden=[24, 16])


def gradients(model: nn.Module) -> None:
    model.zero_grad()
    F.cross_entropy(model(IMAGES), TARGETS).backward()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * (1 - step / 20)
        gradients(model)
        optimizer.step()


def names(model: nn.Module, optimizer: Muon, algorithm: str) -> set[str]:
    members = {id(p) for group in optimizer.param_groups if group["algorithm"] == algorithm for p in group["params"]}
    return {name for name, parameter in model.named_parameters() if id(parameter) in members}


def same(first: nn.Module, second: nn.Module) -> bool:
    return equal(first.state_dict(), second.state_dict())


def test_hidden_matrices_go_to_muon_and_all_else_to_adamw() -> None:
    model = ViT(1, (8, 8), 5, dim=12, depth=1)
    optimizer = Muon(model.parameters())
    muon = {f"blocks.0.{part}.weight" for part in ("attention.qkv", "attention.project", "mlp.0", "mlp.3")}
    assert names(model, optimizer, "muon") == muon
    everything = {name for name, _ in model.named_parameters()}
    assert names(model, optimizer, "adamw") == everything - muon


def test_without_hidden_matrices_adamw_trains_alone_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = SmallCNN(1, 5, width=4)
    with caplog.at_level(logging.WARNING):
        optimizer = Muon(model.parameters())
    assert "no hidden weight matrix" in caplog.text
    before = copy.deepcopy(model)
    gradients(model)
    optimizer.step()
    assert not same(before, model)


def test_it_is_torch_s_muon_and_torch_s_adamw() -> None:
    ours, theirs = network(), network()
    optimizer = Muon(ours.parameters(), lr=0.03, adamw_lr=0.004, weight_decay=0.1, momentum=0.9)
    weights = [p for p in theirs.parameters() if p.ndim == 2][:-1]
    rest = [p for p in theirs.parameters() if all(p is not weight for weight in weights)]
    references = (
        torch.optim.Muon(weights, lr=0.03, weight_decay=0.1, momentum=0.9),
        torch.optim.AdamW(rest, lr=0.004, weight_decay=0.1),
    )
    for _ in range(4):
        gradients(ours)
        optimizer.step()
        gradients(theirs)
        for reference in references:
            reference.step()
    assert same(ours, theirs)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_kernel_is_updated_as_the_matrix_of_its_outputs(layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    kernel = nn.Parameter(torch.randn(6, 4, 3, 3).to(memory_format=layout))
    matrix, head = nn.Parameter(kernel.detach().flatten(1).clone()), nn.Parameter(torch.ones(2, 6))
    ours = Muon([kernel, head], lr=0.1, kernels=True)
    theirs = torch.optim.Muon([matrix], lr=0.1, weight_decay=0.01)
    for _ in range(3):
        kernel.grad, head.grad = torch.randn(6, 4, 3, 3).to(memory_format=layout), torch.ones(2, 6)
        matrix.grad = kernel.grad.flatten(1)
        ours.step()
        theirs.step()
    assert torch.equal(kernel.flatten(1), matrix)
    assert [group["algorithm"] for group in Muon([kernel, head]).param_groups] == ["adamw"]
    positions = nn.Parameter(torch.zeros(1, 4, 6))
    assert [len(group["params"]) for group in Muon([positions, kernel, head], kernels=True).param_groups] == [1, 2]


def test_normalised_weights_have_the_norm_of_their_outputs_before_each_update() -> None:
    model = network()
    optimizer = Muon(model.parameters(), normalize=True, weight_decay=0.0)
    optimizer.param_groups[0]["lr"] = 0.0
    gradients(model)
    optimizer.step()
    weight = optimizer.param_groups[0]["params"][0]
    torch.testing.assert_close(weight.norm() ** 2, torch.tensor(float(len(weight))))


def test_weights_of_one_shape_are_updated_together_as_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(together: bool) -> nn.Module:
        if together:  # as on a GPU
            monkeypatch.setattr(muon, "_of_one_shape", lambda weights: [list(weights)])
        torch.manual_seed(0)
        model = MLP(1, (8, 8), 5, hidden=[24, 24, 24, 24], dropout=0.0)
        model.layers[0].requires_grad_(False)  # the only one of another shape
        train(model, Muon([p for p in model.parameters() if p.requires_grad], normalize=True), 4)
        return model

    torch.testing.assert_close(trained(False).state_dict(), trained(True).state_dict(), rtol=0.02, atol=0.003)


@pytest.mark.parametrize("shape", [(8, 16), (16, 8), (3, 16, 8)])
def test_more_iterations_of_polar_express_come_closer_to_orthonormal_matrices(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    far = [
        (torch.linalg.svdvals(muon._orthogonal(matrices, steps, "polar_express").float()) - 1).abs().max()
        for steps in (2, 8)
    ]
    jordan = (torch.linalg.svdvals(muon._orthogonal(matrices, 8, "jordan").float()) - 1).abs().max()
    assert far[1] < 0.03 < min(far[0], jordan)


@pytest.mark.extended
def test_a_compiled_update_is_compiled_once_for_all_rates() -> None:
    plain, compiled = network(), network()
    train(plain, Muon(plain.parameters(), weight_decay=0.1), 4)
    optimizer = Muon(compiled.parameters(), weight_decay=0.1)
    torch._dynamo.reset()
    assert compile_optimizer(optimizer, Compiler()) == "and the update of Muon"
    with torch._dynamo.config.patch(error_on_recompile=True):
        train(compiled, optimizer, 4)
    torch.testing.assert_close(plain.state_dict(), compiled.state_dict(), rtol=0.02, atol=0.003)


@pytest.mark.parametrize("cut", [0, 1, 3])
@pytest.mark.parametrize("fused", [None, True])
def test_a_restored_optimizer_continues_bit_by_bit(cut: int, fused: bool | None) -> None:
    whole = network()
    train(whole, Muon(whole.parameters(), fused=fused), 6)

    first = network()
    optimizer = Muon(first.parameters(), fused=fused)
    train(first, optimizer, cut)
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)

    second = network(seed=9)
    restored = Muon(second.parameters(), lr=0.5, adamw_lr=0.5, fused=fused)
    second.load_state_dict(saved["model"])
    restored.load_state_dict(saved["optimizer"])
    train(second, restored, 6 - cut, first=cut)
    assert same(second, whole)


def test_a_deep_copy_continues_bit_by_bit_and_apart() -> None:
    model = network()
    optimizer = Muon(model.parameters())
    train(model, optimizer, 2)
    model_copy, optimizer_copy = copy.deepcopy((model, optimizer))
    train(model, optimizer, 3, first=2)
    assert not same(model, model_copy)
    train(model_copy, optimizer_copy, 3, first=2)
    assert same(model, model_copy)


def test_each_group_keeps_its_own_rate_and_decay() -> None:
    model = network()
    weights = [p for p in model.parameters() if p.ndim == 2]
    biases = [p for p in model.parameters() if p.ndim == 1]
    groups: list[dict[str, Any]] = [
        {"params": weights, "lr": 0.01},
        {"params": biases, "weight_decay": 0.0},
    ]
    optimizer = Muon(groups, lr=0.02, adamw_lr=0.003, weight_decay=0.1)
    found = [
        (group["algorithm"], len(group["params"]), group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
    ]
    assert found == [("muon", 2, 0.01, 0.1), ("adamw", 1, pytest.approx(0.0015), 0.1), ("adamw", 3, 0.003, 0.0)]
    assert all(group["initial_lr"] == group["lr"] for group in optimizer.param_groups)
    assert "algorithm" not in groups[0]


def test_a_rate_of_zero_written_into_the_groups_stops_the_weights() -> None:
    model = network()
    optimizer = Muon(model.parameters())
    before = copy.deepcopy(model)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    gradients(model)
    optimizer.step()
    assert same(before, model)


@pytest.mark.parametrize(("foreach", "fused"), [(True, None), (None, True), (False, False)])
def test_foreach_and_fused_reach_adamw(
    foreach: bool | None, fused: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, Any]] = []
    original = torch.optim.AdamW.step

    def step(self: torch.optim.AdamW, closure: Any = None) -> Any:
        seen.extend((group["foreach"], group["fused"]) for group in self.param_groups)
        return original(self, closure)

    model = network()
    optimizer = Muon(model.parameters(), foreach=foreach, fused=fused)
    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    gradients(model)
    optimizer.step()
    assert seen == [(foreach, fused)]


@pytest.mark.parametrize("fused", [None, True])
def test_the_grad_scaler_skips_a_step_that_is_not_finite_and_takes_the_others(fused: bool | None) -> None:
    model, plain = network(), network()
    optimizer, reference = Muon(model.parameters(), fused=fused), Muon(plain.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    for broken in (False, True, False):
        before = copy.deepcopy(model)
        optimizer.zero_grad()
        scaler.scale(F.cross_entropy(model(IMAGES), TARGETS)).backward()
        if broken:
            next(model.parameters()).grad[0, 0] = torch.inf  # type: ignore[index]
        scaler.step(optimizer)
        scaler.update()
        assert same(before, model) == broken
        if not broken:
            gradients(plain)
            reference.step()
    assert scaler.get_scale() == 2.0**7
    assert same(model, plain)


def test_a_flag_on_the_device_keeps_a_step_from_changing_anything() -> None:
    model, plain = network(), network()
    optimizer, reference = Muon(model.parameters(), fused=True), Muon(plain.parameters(), fused=True)
    assert optimizer.obeys_flag
    assert not Muon(model.parameters(), fused=False).obeys_flag
    for flag in (1.0, 0.0, 1.0, 0.0):
        gradients(model)
        optimizer.found_inf = torch.tensor(flag)  # type: ignore[attr-defined]
        if flag:
            next(model.parameters()).grad[0, 0] = torch.nan  # type: ignore[index]
        else:
            gradients(plain)
            reference.step()
        optimizer.step()
    assert same(model, plain)


def test_a_group_added_later_is_trained_too() -> None:
    model = network()
    modules = [module for module in model.modules() if isinstance(module, nn.Linear)]
    optimizer = Muon([*modules[1].parameters(), *modules[2].parameters()])
    optimizer.add_param_group({"params": modules[0].parameters()})
    assert names(model, optimizer, "muon") == {"layers.0.weight", "layers.3.weight"}
    before = modules[0].weight.clone()
    gradients(model)
    optimizer.step()
    assert not torch.equal(before, modules[0].weight)


def test_named_parameters_are_taken() -> None:
    model = network()
    optimizer = Muon(model.named_parameters())
    found = [name for group in optimizer.param_groups for name in group["param_names"]]
    assert sorted(found) == sorted(name for name, _ in model.named_parameters())
    gradients(model)
    optimizer.step()


def test_a_closure_is_evaluated_once() -> None:
    model = network()
    optimizer = Muon(model.parameters())
    closure = Mock(side_effect=lambda: gradients(model) or 0.5)  # type: ignore[func-returns-value]
    assert optimizer.step(closure) == 0.5
    closure.assert_called_once_with()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr must not be negative, got -1.0"),
        ({"adamw_lr": -1.0}, "adamw_lr must not be negative, got -1.0"),
        ({"ns_steps": 0}, "ns_steps must be at least 1, got 0"),
        ({"weight_decay": -1.0}, "weight"),
        ({"coefficients": "unknown"}, "coefficients must be jordan or polar_express, got unknown"),
        ({"betas": (1.0, 0.9)}, "beta"),
        ({"adjust_lr_fn": "unknown"}, "unknown"),
    ],
)
def test_an_argument_out_of_range_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Muon(network().parameters(), **options)
