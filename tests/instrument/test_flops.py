"""Operations are counted right, and counting them leaves no trace."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from runner.instrument.flops import Flops, count_flops


class Net(nn.Module):
    """A convolution, a norm, dropout and two layers, of which the first may be checkpointed."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.hidden = nn.Sequential(nn.Linear(4 * 8 * 8, 32), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(32, 5)
        self.again = again

    def forward(self, images: Tensor) -> Tensor:
        x = self.norm(self.conv(images)).flatten(1)
        x = checkpoint(self.hidden, x, use_reentrant=False) if self.again else self.hidden(x)
        return self.head(x)  # type: ignore[no-any-return]


def counted(model: nn.Module, samples: int = 2, **keys: Any) -> Flops:
    targets = torch.zeros(samples, dtype=torch.int64)
    images = torch.randn(samples, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return count_flops(model, samples, lambda: nn.functional.cross_entropy(model(images), targets), **keys)


CONV = 2 * 4 * 8 * 8 * 3 * 9
HIDDEN = 2 * 256 * 32
HEAD = 2 * 32 * 5


def test_a_forward_pass_is_what_pencil_and_paper_say() -> None:
    found = counted(Net(), 3)
    assert found.forward == 3 * (CONV + HIDDEN + HEAD)
    assert found.by_module == {"": found.forward, "conv": 3 * CONV, "hidden": 3 * HIDDEN, "hidden.0": 3 * HIDDEN,
                               "head": 3 * HEAD}  # fmt: skip


def test_a_backward_pass_costs_two_products_a_layer_and_one_where_the_input_needs_no_gradient() -> None:
    found = counted(Net(), 3)
    assert found.backward == 3 * (CONV + 2 * HIDDEN + 2 * HEAD)
    assert found.of_sample == 2 * CONV + 3 * HIDDEN + 3 * HEAD


def test_what_checkpointing_computes_again_is_not_counted() -> None:
    plain, again = counted(Net()), counted(Net(again=True))
    assert (again.forward, again.backward) == (plain.forward, plain.backward)


def test_frozen_layers_cost_no_gradient() -> None:
    model = Net()
    model.conv.requires_grad_(False)
    model.norm.requires_grad_(False)
    assert counted(model).backward == 2 * (HIDDEN + 2 * HEAD)
    model.requires_grad_(False)
    assert counted(model).backward == 0


def test_autocast_changes_no_count() -> None:
    assert counted(Net(), autocast=lambda: torch.autocast("cpu", torch.bfloat16)) == counted(Net())


def test_a_compiled_model_is_counted_without_running_compiled_code() -> None:
    model = Net()
    expected = counted(copy.deepcopy(model))

    def refuse(graph: Any, inputs: Any) -> Any:
        raise AssertionError("compiled")

    model.compile(backend=refuse)
    assert counted(model) == expected
