"""Heads of classifiers: found by what a forward pass does, and replaced."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from extended import some
from torch import Tensor, nn

from runner.models.heads import Head, HeadNotFound, find_head, replace_head
from runner.models.mlp import MLP
from runner.models.resnet_cifar import ResNet18
from runner.models.small_cnn import SmallCNN
from runner.models.vit import ViT

# Where the head of each architecture is.
FAMILIES = {
    "resnet18": "fc",
    "vgg11": "classifier.6",
    "densenet121": "classifier",
    "convnext_tiny": "classifier.2",
    "mobilenet_v3_small": "classifier.3",
    "efficientnet_b0": "classifier.1",
    "squeezenet1_1": "classifier.1",
    "shufflenet_v2_x0_5": "fc",
    "swin_t": "head",
}


def without_weights(name: str) -> nn.Module:
    """A model of torchvision's with zeros for weights, in no time."""
    from torchvision import models

    with torch.device("meta"):
        model = models.get_model(name, weights=None)
    model.to_empty(device="cpu").eval()
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.zero_()
    return model


def small_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 16, num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=16)


def found(model: nn.Module, side: int = 8, channels: int = 3) -> Head:
    images = torch.randn(1, channels, side, side, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return find_head(model.eval(), lambda: model(images))


@pytest.mark.parametrize(("name", "path"), some(FAMILIES.items(), 0, 4, 6, 8, several=True))
def test_the_head_of_each_family_of_torchvision_is_found_and_replaced(name: str, path: str) -> None:
    model = without_weights(name)
    head = found(model, 32)
    assert head == Head(path, path)
    others = {key for key in model.state_dict() if not head.covers(key)}
    replace_head(model, head, [4], 3)
    assert {key for key in model.state_dict() if not found(model, 32).covers(key)} == others
    assert found(model, 32) == Head(path, f"{path}.2")
    with torch.no_grad():
        assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 3)


@pytest.mark.parametrize(
    ("build", "path"),
    [
        (small_vit, "heads.head"),
        (lambda: MLP(3, (32, 32), 10, hidden=[8]), "head"),
        (lambda: MLP(3, (32, 32), 10, hidden=[]), "head"),
        (lambda: SmallCNN(3, 10, width=4), "head"),
        (lambda: ResNet18(3, 10, width=4), "head"),
        (lambda: ViT(3, (32, 32), 10, dim=12, depth=1, patch_size=8), "head"),
    ],
    ids=["torchvision_vit", "mlp", "linear", "small_cnn", "resnet18_cifar", "vit"],
)
@pytest.mark.parametrize("hidden", [[], [6], [6, 5], None], ids=str)
def test_a_head_has_as_many_layers_as_are_asked_for(
    build: Callable[[], nn.Module], path: str, hidden: list[int] | None
) -> None:
    model = build()
    head = found(model, 32)
    assert head.path == path
    features = model.get_submodule(path).in_features
    replace_head(model, head, hidden, 7)
    logits = model(torch.randn(2, 3, 32, 32))
    assert logits.shape == (2, features if hidden is None else 7)
    layers = [module for module in model.get_submodule(path).modules() if isinstance(module, nn.Linear)]
    assert [layer.out_features for layer in layers] == ([] if hidden is None else [*hidden, 7])
    if hidden is not None:
        assert layers[-1].weight.abs().max() < 0.06, "a small head guesses evenly at first"
        assert not any(layer.bias.any() for layer in layers)


class Odd(nn.Module):
    """Layers that a test puts together in its own way."""

    def __init__(self, forward: Callable[[Odd, Tensor], Tensor]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.late = nn.Linear(4, 5)
        self.early = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(5)
        self._run = forward

    def forward(self, images: Tensor) -> Tensor:
        return self._run(self, self.stem(images).mean(dim=(2, 3)))


def test_the_last_layer_is_that_of_the_forward_pass_not_of_the_constructor() -> None:
    assert found(Odd(lambda net, x: net.late(net.early(x)))) == Head("late", "late")


def test_what_has_no_weights_may_come_after_the_head() -> None:
    assert found(Odd(lambda net, x: F.log_softmax(net.late(x) * 2, dim=1))).path == "late"


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda net, x: net.norm(net.late(x)), r"its last layer with weights is norm \(LayerNorm\)"),
        (lambda net, x: net.early(net.early(x)), "its last layer early is used 2 times"),
        (
            lambda net, x: x[:, :2].detach() + net.late(x).sum(),
            "its last layer late has 5 outputs, and the model returns",
        ),
        (lambda net, x: net.late(x) + F.pad(x, (0, 1)), "its last layer late does not decide the outputs alone"),
        (lambda net, x: F.linear(net.early(x), net.late.weight), "its last layer early has 4 outputs"),
    ],
    ids=["norm", "twice", "width", "sum", "functional"],
)
def test_a_head_that_cannot_be_told_from_the_rest_is_said_to_be_so(
    forward: Callable[[Odd, Tensor], Tensor], message: str
) -> None:
    with pytest.raises(HeadNotFound, match=message):
        found(Odd(forward))


def test_a_model_without_layers_has_no_head() -> None:
    with pytest.raises(HeadNotFound, match="no layer of Flatten with weights is called"):
        found(nn.Flatten())


def test_finding_the_head_leaves_no_hook() -> None:
    model = SmallCNN(3, 10, width=4)
    found(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
