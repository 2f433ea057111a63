"""What the graph keeps for backward is counted to the byte, and peaks are those of the block that is measured."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from runner.instrument.saved_tensors import OUTSIDE, SavedTensors

CPU = torch.device("cpu")
MIB = 2**20


class Tower(nn.Module):
    """Layers of 64 features, each checkpointed or not."""

    def __init__(self, layers: int, again: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(layers))
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
        return x


def saved_by(model: nn.Module, images: Tensor, steps: int = 1) -> SavedTensors:
    with SavedTensors(model) as saved:
        for _ in range(steps):
            model(images).sum().backward()
    return saved


def test_activations_parameters_and_inputs_are_counted_apart_and_to_the_byte() -> None:
    model, images = Tower(3), torch.randn(32, 64)
    saved = saved_by(model, images)
    one = 32 * 64 * 4
    assert saved.activations == 3 * one, "each tanh keeps its result, which is the next layer's input as well"
    assert saved.by_module == {f"layers.{number}.1": one for number in range(3)}
    assert saved.inputs == one
    assert saved.parameters == 2 * 64 * 64 * 4, "the first layer's weight is not needed: images have no gradient"


def test_several_steps_count_as_the_largest_of_them() -> None:
    model = Tower(2)
    once, thrice = saved_by(model, torch.randn(32, 64)), saved_by(model, torch.randn(32, 64), steps=3)
    assert thrice.activations == once.activations
    assert thrice.by_module == once.by_module
    with SavedTensors(model) as saved:
        for size in (8, 32, 16):
            model(torch.randn(size, 64)).sum().backward()
    assert saved.activations == once.activations


def test_a_checkpointed_model_saves_the_inputs_of_its_regions_only() -> None:
    images = torch.randn(32, 64)
    plain, again = saved_by(Tower(4), images), saved_by(Tower(4, again=True), images)
    one = 32 * 64 * 4
    assert plain.activations == 4 * one
    assert again.activations == 3 * one, "the first region's input is the model's"
    assert again.parameters < plain.parameters


def test_the_peak_of_a_forward_alone_has_no_recomputation_in_it() -> None:
    model = Tower(4, again=True)
    with SavedTensors(model) as saved:
        out = model(torch.randn(32, 64))
    out.sum().backward()
    assert saved.activations == 3 * 32 * 64 * 4
    assert list(saved.by_module) == [""], "the model itself gave them to its regions"


def test_what_the_loss_keeps_is_counted_outside_and_given_tensors_are_not_activations() -> None:
    model, images, targets = Tower(1), torch.randn(32, 64), torch.zeros(32, dtype=torch.int64)
    with SavedTensors(model) as saved:
        nn.functional.cross_entropy(model(images), targets).backward()
    with SavedTensors(model, [targets]) as told:
        nn.functional.cross_entropy(model(images), targets).backward()
    assert OUTSIDE in saved.by_module
    assert saved.activations - told.activations == 32 * 8
    assert told.inputs - saved.inputs == 32 * 8


def test_without_a_model_everything_is_an_activation() -> None:
    model, images = Tower(1), torch.randn(32, 64)
    with SavedTensors() as saved:
        model(images).sum().backward()
    assert saved.activations == 2 * 32 * 64 * 4
    assert (saved.parameters, saved.inputs) == (0, 0)


def test_views_count_once_and_as_the_storage_that_they_keep() -> None:
    whole = torch.randn(100, 64, requires_grad=True) * 1
    with SavedTensors() as saved:
        (whole[:2].tanh() * 1).sum() + (whole[2:4] * whole[4:6]).sum()
    assert saved.activations == 100 * 64 * 4 + 2 * 64 * 4


def test_autocast_copies_of_weights_are_activations() -> None:
    model, images = Tower(2), torch.randn(32, 64)
    with torch.autocast("cpu", torch.bfloat16), SavedTensors(model) as saved:
        model(images).sum()
    assert saved.parameters == 0
    assert saved.by_module["layers.1.0"] >= 64 * 64 * 2


def test_counting_changes_no_bit_and_leaves_no_hook() -> None:
    images = torch.randn(32, 64)
    model = Tower(3, again=True)
    other = copy.deepcopy(model)
    hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    saved_by(model, images)
    other(images).sum().backward()
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert torch.equal(a.grad, b.grad)
    assert [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()] == hooks


def test_hooks_are_gone_after_an_error_too() -> None:
    model = Tower(1)
    with pytest.raises(RuntimeError, match="shapes"), SavedTensors(model):
        model(torch.randn(2, 63))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_it_works_without_any_memory_on_the_meta_device() -> None:
    model = Tower(3).to("meta")
    assert saved_by(model, torch.randn(32, 64, device="meta")).activations == 3 * 32 * 64 * 4


def test_a_sparse_tensor_counts_its_values() -> None:
    weight = torch.randn(3, 2, requires_grad=True)
    sparse = torch.eye(3).to_sparse()
    with SavedTensors() as saved:
        torch.sparse.mm(sparse, weight).sum().backward()
    assert saved.activations > 0
