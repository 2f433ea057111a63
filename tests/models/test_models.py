"""The project's own models: shapes, sizes, initialisation, and the ways they are run."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from runner.models.airbench import Airbench
from runner.models.drop_path import DropPath, linear_rates
from runner.models.mlp import MLP
from runner.models.resnet_cifar import ResNet18
from runner.models.small_cnn import SmallCNN
from runner.models.vit import ViT

Build = Callable[..., nn.Module]

BUILDERS: dict[str, Build] = {
    "mlp": lambda channels, size, classes, **rates: MLP(channels, size, classes, hidden=[32, 16], **rates),
    "small_cnn": lambda channels, size, classes, **rates: SmallCNN(channels, classes, width=8, **rates),
    "resnet18_cifar": lambda channels, size, classes, **rates: ResNet18(channels, classes, width=8, **rates),
    "vit_tiny": lambda channels, size, classes, **rates: ViT(
        channels, size, classes, dim=24, depth=2, heads=3, **rates
    ),
}

every_model = pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS.keys())
SIZES = [(8, 8), (28, 28), (32, 48)]
ODD = [(1, 1), (3, 5), (9, 7), (13, 31), (65, 2)]  # which patches do not divide


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def images_of(channels: int, size: tuple[int, int], count: int = 4) -> Tensor:
    return torch.randn(count, channels, *size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("name", "size"), [(name, size) for name in BUILDERS for size in (SIZES if name == "vit_tiny" else SIZES + ODD)]
)
@pytest.mark.parametrize("channels", [1, 3, 5])
@pytest.mark.parametrize("classes", [1, 7])
def test_logits_have_one_row_per_image_and_one_column_per_class(
    name: str, channels: int, size: tuple[int, int], classes: int
) -> None:
    logits = BUILDERS[name](channels, size, classes)(images_of(channels, size))
    assert logits.shape == (4, classes)
    assert logits.dtype == torch.float32


@every_model
def test_gradients_reach_every_parameter(build: Build) -> None:
    model = build(1, (16, 16), 5)
    F.cross_entropy(model(images_of(1, (16, 16), 8)), torch.arange(8) % 5).backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.abs().sum() > 0, name


@every_model
def test_the_global_seed_alone_decides_the_weights(build: Build) -> None:
    def weights(seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        return build(3, (8, 8), 10).state_dict()

    first, again, other = weights(1), weights(1), weights(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


@every_model
def test_the_first_loss_is_that_of_guessing(build: Build) -> None:
    logits = build(3, (16, 16), 10)(images_of(3, (16, 16), 64))
    loss = F.cross_entropy(logits, torch.arange(64) % 10)
    assert loss.item() == pytest.approx(math.log(10), rel=0.05)


@every_model
def test_channels_last_images_and_weights_give_the_same_logits(build: Build) -> None:
    model = build(3, (16, 16), 6).eval()
    images = images_of(3, (16, 16))
    plain = model(images)
    model.to(memory_format=torch.channels_last)
    torch.testing.assert_close(model(images.contiguous(memory_format=torch.channels_last)), plain)


@every_model
def test_bf16_autocast_trains(build: Build) -> None:
    model = build(3, (16, 16), 6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(images_of(3, (16, 16)))
    assert logits.dtype == torch.bfloat16
    logits.float().square().sum().backward()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in model.parameters())


@every_model
def test_an_image_does_not_influence_the_others_while_evaluating(build: Build) -> None:
    model = build(1, (8, 8), 3).eval()
    images = images_of(1, (8, 8))
    changed = images.clone()
    changed[2] += 1
    before, after = model(images), model(changed)
    same = [index for index in range(4) if torch.allclose(before[index], after[index])]
    assert same == [0, 1, 3]


@every_model
def test_the_model_exports_as_one_graph_with_a_free_batch_size(build: Build) -> None:
    model = build(1, (8, 8), 3).eval()
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(model, (images_of(1, (8, 8)),), dynamic_shapes=({0: batch},))
    images = images_of(1, (8, 8), 7)
    torch.testing.assert_close(program.module()(images), model(images))


def test_parameter_counts_are_those_of_the_architectures() -> None:
    assert parameters(MLP(1, (8, 8), 10)) == 64 * 128 + 128 + 128 * 10 + 10
    assert parameters(MLP(1, (8, 8), 10, hidden=[])) == 64 * 10 + 10
    convolutions = 9 * (1 * 32 + 32 * 64 + 64 * 128)
    assert parameters(SmallCNN(1, 10)) == convolutions + 2 * (32 + 64 + 128) + 128 * 10 + 10
    assert parameters(ResNet18(3, 10)) == 11_173_962
    block = 4 * 192 + (192 * 576 + 576) + (192 * 192 + 192) + (192 * 768 + 768) + (768 * 192 + 192)
    assert parameters(ViT(3, (32, 32), 10)) == (48 * 192 + 192) + 64 * 192 + 6 * block + 2 * 192 + 192 * 10 + 10


def test_small_cnn_pools_large_images_only() -> None:
    sizes: list[int] = []
    model = SmallCNN(1, 10, width=4)
    for stage in model.stages:
        stage.register_forward_hook(lambda module, inputs, output: sizes.append(output.shape[-1]))
    for side in (28, 8, 3):
        model(images_of(1, (side, side)))
    assert sizes == [28, 14, 7, 8, 4, 2, 3, 3, 3]


def test_vit_knows_where_a_patch_lies() -> None:
    model = ViT(1, (8, 8), 3, dim=12, depth=1).eval()
    with torch.no_grad():
        model.positions.normal_()
    images = images_of(1, (8, 8))
    moved = images.roll(4, dims=3)
    assert not torch.allclose(model(images), model(moved), atol=1e-6)
    with torch.no_grad():
        model.positions.zero_()
    torch.testing.assert_close(model(images), model(moved))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: MLP(1, (8, 8), 10, hidden=[16, 0]), r"hidden\[1\] must be at least 1, got 0"),
        (lambda: MLP(0, (8, 8), 10), "in_channels must be at least 1, got 0"),
        (lambda: MLP(1, (8, 0), 10), "image_size must be at least 1, got 0"),
        (lambda: MLP(1, (8, 8), 10, dropout=1.0), r"dropout must be at least 0 and below 1, got 1\.0"),
        (lambda: SmallCNN(1, 0), "num_classes must be at least 1, got 0"),
        (lambda: SmallCNN(1, 10, width=0), "width must be at least 1, got 0"),
        (lambda: SmallCNN(1, 10, dropout=-0.1), r"dropout must be at least 0 and below 1, got -0\.1"),
        (lambda: ResNet18(1, 10, width=-1), "width must be at least 1, got -1"),
        (lambda: ViT(1, (30, 32), 10), "patch_size must divide the image: 30x32 is not a multiple of 4"),
        (lambda: ViT(1, (2, 2), 10), "patch_size must divide the image"),
        (lambda: ViT(1, (8, 8), 10, dim=20, heads=3), "heads must divide dim: 20 is not a multiple of 3"),
        (lambda: ViT(1, (8, 8), 10, depth=0), "depth must be at least 1, got 0"),
        (lambda: ViT(1, (8, 8), 10, mlp_ratio=0.0), "mlp_ratio must leave at least one hidden unit"),
    ],
)
def test_an_argument_out_of_range_is_named(build: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.extended
def test_small_cnn_learns_digits(train: Callable[..., Any]) -> None:
    result = train("model=small_cnn", "model.width=16", "epochs=4", "optimizer.lr=0.01")
    assert result.summary["test"]["accuracy"] > 0.95


def test_airbench_has_the_published_size_and_no_scale_in_its_norms() -> None:
    model = Airbench(3, 10)
    assert sum(weight.numel() for weight in model.parameters() if weight.requires_grad) == 1_971_640
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert not any(norm.weight.requires_grad for norm in norms)
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize("place", [0, 4])
def test_a_new_convolution_of_airbench_passes_its_inputs_on(place: int) -> None:
    layer = Airbench(1, 5, widths=(12, 16, 16)).stages[1][place]
    images = torch.randn(2, layer.in_channels, 6, 6)
    torch.testing.assert_close(layer(images)[:, : layer.in_channels], images)


def test_drop_path_drops_a_share_of_the_samples_whole_and_scales_up_the_rest() -> None:
    dropped = DropPath(0.25)(torch.ones(4000, 2, 3))
    per_sample = dropped.flatten(1)
    assert torch.equal(per_sample.amin(1), per_sample.amax(1))
    assert per_sample[:, 0].unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert (per_sample[:, 0] == 0).double().mean().item() == pytest.approx(0.25, abs=0.03)
    assert dropped.mean().item() == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("module", [DropPath(0.0), DropPath(0.5).eval()], ids=["rate 0", "evaluating"])
def test_drop_path_leaves_a_branch_as_it_is_otherwise_and_draws_nothing(module: DropPath) -> None:
    branch = torch.randn(4, 3)
    before = torch.get_rng_state()
    assert module(branch) is branch
    assert torch.equal(torch.get_rng_state(), before)


def test_rates_of_drop_path_rise_linearly_to_that_of_the_last_block() -> None:
    assert linear_rates(0.4, 4) == pytest.approx([0.1, 0.2, 0.3, 0.4])

    def rates(model: nn.Module) -> list[float]:
        return [module.rate for module in model.modules() if isinstance(module, DropPath)]

    assert rates(ViT(1, (8, 8), 3, dim=12, depth=2, drop_path=0.2)) == pytest.approx([0.1, 0.2])
    assert rates(ResNet18(1, 3, width=4, drop_path=0.8)) == pytest.approx([0.1 * n for n in range(1, 9)])


@pytest.mark.parametrize(
    ("key", "name"),
    [*(("dropout", name) for name in BUILDERS), ("drop_path", "vit_tiny"), ("drop_path", "resnet18_cifar")],
)
def test_drop_path_and_dropout_act_while_training_and_only_then(key: str, name: str) -> None:
    build, images = functools.partial(BUILDERS[name], 1, (8, 8), 3), torch.randn(8, 1, 8, 8)
    model = build(**{key: 0.5})
    assert not torch.equal(model(images), model(images))
    model.eval()
    assert torch.equal(model(images), model(images))
    plain = build(**{key: 0.0})
    assert torch.equal(plain(images), plain(images))
    assert plain.state_dict().keys() == model.state_dict().keys()
    with pytest.raises(ValueError, match=f"{key} must be at least 0 and below 1"):
        build(**{key: 1.0})
