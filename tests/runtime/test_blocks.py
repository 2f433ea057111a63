"""The blocks of a model are found by repetition, or by name."""

from __future__ import annotations

import pytest
import torch
import torchvision
from torch import nn

from runner.base.errors import UserError
from runner.models.mlp import MLP
from runner.models.resnet_cifar import ResNet18
from runner.models.small_cnn import SmallCNN
from runner.models.vit import ViT
from runner.runtime.blocks import named_blocks, repeated_blocks


def vit() -> ViT:
    return ViT(3, (16, 16), 4, dim=12, depth=5, heads=3)


@pytest.mark.parametrize(
    ("name", "count", "kinds"),
    [
        ("resnet50", 16, {"Bottleneck"}),
        ("vit_b_16", 12, {"EncoderBlock"}),
        ("convnext_tiny", 18, {"CNBlock"}),
        ("efficientnet_b0", 16, {"MBConv"}),
        ("densenet121", 4, {"_DenseBlock"}),
        ("mobilenet_v2", 17, {"InvertedResidual"}),
        ("swin_t", 12, {"SwinTransformerBlock"}),
        ("vgg11", 0, set()),
    ],
)
def test_the_blocks_of_known_models_are_found(name: str, count: int, kinds: set[str]) -> None:
    with torch.device("meta"):
        model = torchvision.models.get_model(name)
    blocks = repeated_blocks(model)
    assert len(blocks) == count
    assert {type(module).__name__ for _, module in blocks} == kinds
    assert all(model.get_submodule(at) is module for at, module in blocks)


def test_the_blocks_of_the_project_s_own_models_are_found() -> None:
    assert [name for name, _ in repeated_blocks(SmallCNN(3, 4))] == ["stages.0", "stages.1", "stages.2"]
    assert len(repeated_blocks(ResNet18(3, 4, width=4))) == 8
    assert [name for name, _ in repeated_blocks(vit())] == [f"blocks.{number}" for number in range(5)]
    assert repeated_blocks(MLP(3, (8, 8), 4, [8, 8, 8])) == []


def test_a_stage_that_holds_blocks_is_looked_into() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoders = nn.ModuleList(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False) for _ in range(2))
    names = [name for name, _ in repeated_blocks(nn.Sequential(nn.Linear(8, 8), encoders))]
    assert names == [f"1.{encoder}.layers.{number}" for encoder in range(2) for number in range(3)]


def test_a_list_of_modules_stands_for_what_it_holds() -> None:
    assert [name for name, _ in named_blocks(SmallCNN(3, 4), ["stages"], "key", "true")] == [
        "stages.0",
        "stages.1",
        "stages.2",
    ]


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("blocs.*", r"the model has no module 'blocs\.\*'; did you mean 'blocks"),
        ("encoder", r"the model has no module 'encoder'\n.*begin with embed, dropout, blocks, norm, head"),
        ("", "the model has no module ''"),
    ],
)
def test_a_name_that_matches_nothing_is_a_sentence(pattern: str, words: str) -> None:
    with pytest.raises(UserError, match=rf"^key: {words}"):
        named_blocks(vit(), ["blocks.0", pattern], "key", "true")
