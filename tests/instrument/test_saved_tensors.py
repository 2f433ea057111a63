"""What the graph keeps for backward is counted to the byte."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from runner.instrument.saved_tensors import bytes_for_backward

ONE = 32 * 64 * 4  # bytes of the output of a layer


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


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("again", "expected"), [(False, 4 * ONE), (True, 3 * ONE)], ids=["plain", "checkpointed"])
def test_activations_are_counted_to_the_byte_without_weights_and_inputs(
    again: bool, expected: int, device: str
) -> None:
    model, images = Tower(4, again).to(device), torch.randn(32, 64, device=device)
    assert bytes_for_backward(model, lambda: model(images)) == expected


def test_what_the_loss_keeps_is_counted_and_targets_are_not_inputs_of_the_model() -> None:
    model, images, targets = Tower(1), torch.randn(32, 64), torch.zeros(32, dtype=torch.int64)
    plain = bytes_for_backward(model, lambda: model(images))
    found = bytes_for_backward(model, lambda: nn.functional.cross_entropy(model(images), targets))
    assert found >= plain + ONE + 32 * 8, "the logarithms and the targets"


def test_views_count_once_and_as_the_storage_that_they_keep() -> None:
    whole = torch.randn(100, 64, requires_grad=True) * 1
    found = bytes_for_backward(nn.Identity(), lambda: (whole[:2].tanh() * 1).sum() + (whole[2:4] * whole[4:6]).sum())
    assert found == 100 * 64 * 4 + 2 * 64 * 4


def test_autocast_copies_of_weights_are_counted_and_sparse_tensors_by_their_values() -> None:
    model, images = Tower(1), torch.randn(32, 64)
    with torch.autocast("cpu", torch.bfloat16):
        assert bytes_for_backward(model, lambda: model(images)) >= 32 * 64 * 2
    weight, sparse = torch.randn(3, 2, requires_grad=True), torch.eye(3).to_sparse()
    assert bytes_for_backward(nn.Identity(), lambda: torch.sparse.mm(sparse, weight)) > 0


def test_counting_changes_no_bit_and_leaves_no_hook() -> None:
    images, model = torch.randn(32, 64), Tower(3, again=True)
    other, losses = copy.deepcopy(model), list[Tensor]()
    bytes_for_backward(model, lambda: losses.append(model(images).sum()))
    losses[0].backward()  # type: ignore[no-untyped-call]
    other(images).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), other.parameters(), strict=True))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="shapes"):
        bytes_for_backward(model, functools.partial(model, torch.randn(2, 63)))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
