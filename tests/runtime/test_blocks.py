"""The blocks of a model are found, named, counted, and as many are checkpointed as were asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torchvision
from torch import nn

from runner.base.errors import UserError
from runner.models.mlp import MLP
from runner.models.resnet_cifar import ResNet18
from runner.models.small_cnn import SmallCNN
from runner.models.vit import ViT
from runner.runtime import activation
from runner.runtime.blocks import Recomputed, Setting, checkpoint_activations, named_blocks, repeated_blocks


@pytest.fixture(autouse=True)
def switched_off() -> Iterator[None]:
    yield
    activation.switch(False)


def apply(model: nn.Module, setting: Setting, size: int = 16) -> Recomputed:
    torch.manual_seed(0)
    image = torch.randn(1, 3, size, size)
    done = checkpoint_activations(
        model, setting, lambda samples: model(image.repeat(samples, 1, 1, 1)), contextlib.nullcontext
    )
    assert done is not None
    return done


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


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (True, [0, 1, 2, 3, 4]),
        (1, [0, 1, 2, 3, 4]),
        (2, [0, 2, 4]),
        (9, [0]),
        ("blocks.[13]", [1, 3]),
        (["blocks.0", "blocks.4*"], [0, 4]),
        ("blocks.*", [0, 1, 2, 3, 4]),
    ],
    ids=str,
)
def test_a_setting_chooses_its_blocks(setting: Setting, expected: list[int]) -> None:
    model = vit()
    done = apply(model, setting)
    assert done.names == tuple(f"blocks.{number}" for number in expected)
    assert [number for number, block in enumerate(model.blocks) if activation.is_wrapped(block)] == expected
    assert done.warnings == []
    assert f"{len(expected)} of" in done.row(64)[1]
    assert "Block" in done.row(64)[1]


def test_a_list_of_modules_stands_for_what_it_holds() -> None:
    assert [name for name, _ in named_blocks(SmallCNN(3, 4), ["stages"])] == ["stages.0", "stages.1", "stages.2"]


@pytest.mark.parametrize("share", [0.7, 0.5, 0.4])
def test_a_budget_is_kept_with_as_few_blocks_as_that_takes(share: float) -> None:
    done = apply(ResNet18(3, 4, width=4), share)
    assert 0 < len(done.names) < done.found == 8
    assert done.after <= share * done.before
    assert done.warnings == []
    for left_out in done.names:
        fewer = apply(ResNet18(3, 4, width=4), [name for name in done.names if name != left_out])
        assert fewer.after > share * fewer.before, "one fewer does not do"


def test_a_budget_beyond_reach_is_said_with_what_is_reached() -> None:
    done = apply(vit(), 0.001)
    assert len(done.names) == 5
    assert done.warnings == [
        f"activation_checkpointing=0.001 cannot be reached: all 5 blocks together leave {done.after / done.before:.2f} of the bytes"
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
    with pytest.raises(UserError, match=rf"^activation_checkpointing: {words}"):
        apply(vit(), ["blocks.0", pattern])


def test_what_has_no_effect_is_said() -> None:
    said = apply(MLP(3, (16, 16), 4, [8, 8]), True)
    assert [warning.split(":")[0] for warning in said.warnings] == ["activation_checkpointing=true has no effect"]
    assert "MLP has no repeated blocks" in said.warnings[0]
    assert said.row(8)[1] == "nothing recomputed"
    idle = apply(MLP(3, (16, 16), 4, [8, 8]), "layers.2")  # dropout with probability 0 keeps nothing
    assert "the 1 blocks keep nothing" in idle.warnings[0]


@pytest.mark.parametrize("name", ["resnet50", "vit"])
def test_resnet50_and_a_vision_transformer_keep_less_than_half(name: str) -> None:
    torch.manual_seed(0)
    if name == "vit":
        model: nn.Module = torchvision.models.VisionTransformer(32, 8, 3, 4, 48, 96, num_classes=4)
    else:
        model = torchvision.models.resnet50(num_classes=4)
    done = apply(model, True, size=32)
    assert done.after <= 0.5 * done.before
