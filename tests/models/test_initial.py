"""Schemes of initial weights: what each of them leaves in the weights."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner.models.initial import draw_weights, set_prior
from runner.models.resnet_cifar import ResNet18


class Layers(nn.Module):
    """One of each kind, with biases that are not zero."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(32, 64, 3)
        self.linear = nn.Linear(300, 200)
        self.attention = nn.MultiheadAttention(48, 2)
        self.norm = nn.BatchNorm2d(64)


def drawn(scheme: str, seed: int = 0) -> Layers:
    torch.manual_seed(seed)
    layers = Layers()
    torch.manual_seed(seed)
    draw_weights(layers, scheme)  # type: ignore[arg-type]
    return layers


@pytest.mark.parametrize(
    ("scheme", "conv", "linear", "attention"),
    [
        ("normal", 0.02, 0.02, 0.02),
        ("trunc_normal", 0.0176, 0.0176, 0.0176),  # of a normal distribution cut at two deviations
        ("xavier", math.sqrt(2 / (9 * (32 + 64))), math.sqrt(2 / 500), math.sqrt(2 / 96)),
        ("kaiming", math.sqrt(2 / (9 * 32)), math.sqrt(2 / 300), math.sqrt(2 / 48)),
    ],
)
def test_weights_have_the_spread_of_the_scheme_and_biases_are_zero(
    scheme: str, conv: float, linear: float, attention: float
) -> None:
    layers = drawn(scheme)
    for weight, std in (
        (layers.conv.weight, conv),
        (layers.linear.weight, linear),
        *((part, attention) for part in layers.attention.in_proj_weight.chunk(3)),
        (layers.attention.out_proj.weight, attention),
    ):
        assert weight.mean().item() == pytest.approx(0, abs=std / 10)
        assert weight.std().item() == pytest.approx(std, rel=0.05)
    for bias in (layers.conv.bias, layers.linear.bias, layers.attention.in_proj_bias, layers.attention.out_proj.bias):
        assert not bias.any()
    assert layers.norm.weight.eq(1).all()


def test_the_cut_normal_has_nothing_beyond_two_deviations() -> None:
    assert drawn("trunc_normal").linear.weight.abs().max() <= 0.04
    assert drawn("normal").linear.weight.abs().max() > 0.06


def test_orthogonal_weights_are() -> None:
    layers = drawn("orthogonal")
    for rows in (layers.linear.weight, layers.conv.weight.flatten(1), layers.attention.in_proj_weight[:48]):
        torch.testing.assert_close(rows @ rows.T, torch.eye(len(rows)), atol=1e-4, rtol=0)


@pytest.mark.parametrize("scheme", ["normal", "xavier", "kaiming", "orthogonal", "trunc_normal"])
def test_the_global_seed_alone_decides_what_is_drawn(scheme: str) -> None:
    with pytest.raises(ValueError, match="Flatten has no linear layer and no convolution"):
        draw_weights(nn.Flatten(), scheme)  # type: ignore[arg-type]
    first, again, other = drawn(scheme, 1), drawn(scheme, 1), drawn(scheme, 2)
    assert torch.equal(first.linear.weight, again.linear.weight)
    assert not torch.equal(first.linear.weight, other.linear.weight)


def test_with_the_priors_as_bias_the_first_loss_is_the_entropy() -> None:
    counts = torch.tensor([70, 20, 10])
    model = ResNet18(3, 3, width=4).eval()
    set_prior(model.head, counts)
    targets = torch.repeat_interleave(torch.arange(3), counts)
    loss = F.cross_entropy(model(torch.randn(100, 3, 8, 8)), targets).item()
    shares = counts / 100
    entropy = -(shares * shares.log()).sum().item()
    assert loss == pytest.approx(entropy, rel=0.02)
    assert abs(loss - math.log(3)) > 0.2


def test_a_class_without_samples_counts_as_one() -> None:
    layer = nn.Linear(2, 3)
    set_prior(layer, torch.tensor([9, 0, 0]))
    torch.testing.assert_close(layer.bias.exp(), Tensor([9, 1, 1]) / 11)


@pytest.mark.parametrize(
    ("layer", "message"),
    [(nn.Linear(2, 3, bias=False), "the head has no bias"), (nn.Linear(2, 4), "has 4 outputs, and the data 3 classes")],
)
def test_a_head_that_cannot_hold_priors_is_said_to_be_so(layer: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        set_prior(layer, torch.tensor([1, 2, 3]))
