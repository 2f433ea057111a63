"""Heads of classifiers, and the norms that end residual blocks: found by names and types, and replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from extras import needs
from torch import Tensor, nn

from runner.models.airbench import Airbench
from runner.models.heads import Head, HeadNotFound, find_head, replace_head
from runner.models.initial import zero_last_norms
from runner.models.mlp import MLP
from runner.models.resnet_cifar import ResNet18
from runner.models.small_cnn import SmallCNN
from runner.models.vit import ViT

# Model, head or why there is none, number of the norms that end residual blocks, and the first of them.
TORCHVISION = """
alexnet            | classifier.6 | 0
convnext_tiny      | classifier.2 | 0
densenet121        | classifier   | 0
efficientnet_b0    | classifier.1 | 9  | features.2.1.block.3.1
efficientnet_v2_s  | classifier.1 | 35 | features.1.0.block.0.1
googlenet          | fc           | 0
inception_v3       | fc           | 0
maxvit_t           | classifier.5 | 0
mnasnet0_5         | classifier.1 | 10 | layers.8.1.layers.7
mobilenet_v2       | classifier.1 | 10 | features.3.conv.3
mobilenet_v3_large | classifier.3 | 10 | features.1.block.1.1
mobilenet_v3_small | classifier.3 | 6  | features.3.block.2.1
resnet18           | fc           | 8  | layer1.0.bn2
resnet50           | fc           | 16 | layer1.0.bn3
resnext50_32x4d    | fc           | 16 | layer1.0.bn3
shufflenet_v2_x0_5 | fc           | 0
squeezenet1_1      | classifier.1 | 0
swin_t             | head         | 0
swin_v2_t          | head         | 24 | features.1.0.norm1
vgg11              | classifier.6 | 0
vgg11_bn           | classifier.6 | 0
vit_b_16           | heads.head   | 0
deeplabv3_mobilenet_v3_large | classifier.4 has 7 outputs, and the model returns OrderedDict | 10 | backbone.1.block.1.1
fcn_resnet50       | classifier.4 has 7 outputs, and the model returns OrderedDict | 16 | backbone.layer1.0.bn3
"""
TIMM = """
resnet18             | fc          | 8  | layer1.0.bn2
resnet26d            | fc          | 8  | layer1.0.bn3
seresnet18           | fc          | 0
regnety_002          | head.fc     | 13 | s1.b1.conv3.bn
efficientnet_lite0   | classifier  | 9  | blocks.1.1.bn3
mobilenetv3_small_050      | classifier | 7  | blocks.1.1.bn3
mobilenetv4_conv_small_035 | classifier | 10 | blocks.2.1.pw_proj.bn
dla34                | fc          | 12 | level2.tree1.bn2
mobilevit_xxs        | head.fc     | 3  | stages.0.0.conv3_1x1.bn
convnext_atto        | head.fc     | 0
selecsls42           | fc          | 0
inception_v4         | last_linear | 0
swin_tiny_patch4_window7_224 | head.fc | 0
vit_tiny_patch16_224 | head        | 0
levit_128s           | head.linear and head_dist.bn give the outputs together | 0
crossvit_tiny_240    | head is a list of layers | 0
"""
OWN: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: MLP(3, (32, 32), 10, hidden=[8]),
    "linear": lambda: MLP(3, (32, 32), 10, hidden=[]),
    "small_cnn": lambda: SmallCNN(3, 10, width=4),
    "resnet18_cifar": lambda: ResNet18(3, 10, width=4),
    "vit": lambda: ViT(3, (32, 32), 10, dim=12, depth=1, patch_size=8),
}


def built(name: str) -> nn.Module:
    """A model of torchvision without weights."""
    options: dict[str, Any] = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    if name in torchvision.models.list_models(torchvision.models.segmentation):
        options["weights_backbone"] = None
    with torch.device("meta"):
        return torchvision.models.get_model(name, weights=None, **options, num_classes=7)  # type: ignore[no-any-return]


def found(model: nn.Module, side: int = 32) -> Head:
    images = torch.zeros(1, 3, side, side, device=next(model.parameters(), torch.zeros(0)).device)
    with torch.no_grad():
        return find_head(model.eval(), lambda: model(images))


def check_row(row: str, model: nn.Module) -> None:
    _, head, count, *first = (cell.strip() for cell in row.split("|"))
    if " " in head:
        with pytest.raises(HeadNotFound, match=head):
            found(model, 64)
    else:
        assert found(model, 224) == Head(head, head)
    if int(count):
        names = zero_last_norms(model)
        assert (len(names), names[:1]) == (int(count), first)
    else:
        with pytest.raises(ValueError, match="has no residual block that ends in a norm"):
            zero_last_norms(model)


@pytest.mark.parametrize("row", TORCHVISION.strip().splitlines(), ids=lambda row: row.split()[0])
def test_the_head_and_the_last_norms_of_each_family_of_torchvision_are_known(row: str) -> None:
    check_row(row, built(row.split()[0]))


@needs("timm")
@pytest.mark.parametrize("row", TIMM.strip().splitlines(), ids=lambda row: row.split()[0])
def test_those_of_families_of_timm_are_known(row: str) -> None:
    import timm

    with torch.device("meta"):
        model = timm.create_model(row.split()[0], num_classes=7)
    check_row(row, model)


@needs("smp")
@pytest.mark.parametrize(("name", "norms"), [("unet", 8), ("fpn", 8), ("segformer", 8)])
def test_models_of_segmentation_have_no_head(name: str, norms: int) -> None:
    import segmentation_models_pytorch as smp

    model = smp.create_model(name, "resnet18", None, 3, 7)
    with pytest.raises(HeadNotFound, match=r"segmentation_head\.0"):
        found(model, 64)
    assert zero_last_norms(model)[::7] == ["encoder.layer1.0.bn2", "encoder.layer4.1.bn2"]


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("hidden", [[], [6], [6, 5], None], ids=str)
def test_a_head_has_as_many_layers_as_are_asked_for(name: str, hidden: list[int] | None) -> None:
    model = OWN[name]()
    head = found(model)
    assert head == Head("head", "head")
    features, others = model.get_submodule("head").in_features, {key for key in model.state_dict() if key[:4] != "head"}
    replace_head(model, head, hidden, 7)
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, features if hidden is None else 7)
    layers = [module for module in model.get_submodule("head").modules() if isinstance(module, nn.Linear)]
    assert [layer.out_features for layer in layers] == ([] if hidden is None else [*hidden, 7])
    again = found(model)
    assert again == Head("head", None if hidden is None else f"head.{2 * len(hidden)}" if hidden else "head")
    assert {key for key in model.state_dict() if not again.covers(key)} == others
    if hidden is not None:
        assert layers[-1].weight.abs().max() < 0.06, "a small head guesses evenly at first"
        assert not any(layer.bias.any() for layer in layers if layer.bias is not None)


@pytest.mark.parametrize(
    ("model", "side", "path"),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(256, 5), nn.LogSoftmax(1)), 8, "2"),
        (nn.Sequential(nn.Conv2d(3, 5, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()), 8, "0"),
        (nn.Sequential(nn.Flatten(), nn.Linear(12, 5), nn.LayerNorm(5)), 2, r"its last layer is 2 \(LayerNorm\)"),
        (
            nn.Sequential(nn.Linear(2, 5), nn.Flatten()),
            2,
            r"its last layer 0 has 5 outputs, and the model returns \(1, 30",
        ),
        (Airbench(3, 5, widths=(4, 4, 4)), 20, "head"),
        (nn.Flatten(), 2, "Flatten has no layers"),
    ],
    ids=["linear", "convolution", "norm", "width", "airbench", "nothing"],
)
def test_the_head_of_other_models_is_the_last_layer(model: nn.Module, side: int, path: str) -> None:
    if " " not in path:
        assert found(model, side) == Head(path, path)
    else:
        with pytest.raises(HeadNotFound, match=path):
            found(model, side)


def test_a_zeroed_block_starts_as_its_shortcut_and_nothing_else_is_zeroed() -> None:
    model = ResNet18(3, 4, width=4).eval()
    names = [f"stages.{stage}.{block}.bn2" for stage in range(4) for block in range(2)]
    assert zero_last_norms(model) == names
    norms = {name: module for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)}
    assert all(module.weight.eq(0 if name in names else 1).all() for name, module in norms.items())
    features = torch.rand(2, 4, 8, 8)
    assert torch.equal(model.stages[0][0](features), features)


class Own(nn.Module):
    """A residual block of a user."""

    has_skip = True

    def __init__(self) -> None:
        super().__init__()
        self.shortcut = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
        self.layer, self.last = nn.Conv2d(3, 3, 1), nn.GroupNorm(1, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.shortcut(images) + self.last(self.layer(images))


def test_a_block_of_another_class_says_that_it_has_a_shortcut() -> None:
    assert zero_last_norms(Own()) == ["last"]
