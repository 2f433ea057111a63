"""Stochastic depth in the models that have residual branches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from runner.models.drop_path import DropPath, linear_rates
from runner.models.resnet_cifar import ResNet18
from runner.models.vit import ViT


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def test_a_share_of_the_samples_is_dropped_whole_and_the_rest_scaled_up() -> None:
    dropped = DropPath(0.25)(torch.ones(4000, 2, 3))
    per_sample = dropped.flatten(1)
    assert torch.equal(per_sample.amin(1), per_sample.amax(1))
    assert per_sample[:, 0].unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert (per_sample[:, 0] == 0).double().mean().item() == pytest.approx(0.25, abs=0.03)
    assert dropped.mean().item() == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("module", [DropPath(0.0), DropPath(0.5).eval()], ids=["rate 0", "evaluating"])
def test_otherwise_a_branch_is_as_it_is_and_nothing_is_drawn(module: DropPath) -> None:
    branch = torch.randn(4, 3)
    before = torch.get_rng_state()
    assert module(branch) is branch
    assert torch.equal(torch.get_rng_state(), before)


def test_rates_rise_linearly_to_that_of_the_last_block() -> None:
    assert linear_rates(0.4, 4) == pytest.approx([0.1, 0.2, 0.3, 0.4])

    def rates(model: nn.Module) -> list[float]:
        return [module.rate for module in model.modules() if isinstance(module, DropPath)]

    assert rates(ViT(1, (8, 8), 3, dim=12, depth=2, drop_path=0.2)) == pytest.approx([0.1, 0.2])
    assert rates(ResNet18(1, 3, width=4, drop_path=0.8)) == pytest.approx([0.1 * n for n in range(1, 9)])


@pytest.mark.parametrize(
    "build",
    [
        lambda **rates: ViT(1, (8, 8), 3, dim=12, depth=2, **rates),
        lambda **rates: ResNet18(1, 3, width=4, **rates),
    ],
    ids=["vit", "resnet"],
)
@pytest.mark.parametrize("key", ["drop_path", "dropout"])
def test_it_acts_while_training_and_only_then(build: Callable[..., nn.Module], key: str) -> None:
    images = torch.randn(8, 1, 8, 8)
    model = build(**{key: 0.5})
    assert not torch.equal(model(images), model(images))
    model.eval()
    assert torch.equal(model(images), model(images))
    assert build().state_dict().keys() == model.state_dict().keys()
    with pytest.raises(ValueError, match=f"{key} must be at least 0 and below 1"):
        build(**{key: 1.0})
