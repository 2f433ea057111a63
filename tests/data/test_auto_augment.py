"""RandAugment and TrivialAugment: each change is torchvision's, with draws of its own for every image."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from scripted_draws import draws
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as F

from runner.data.transforms import auto_augment
from runner.data.transforms.auto_augment import RandAugment, TrivialAugment, changed

NEAREST = {"interpolation": InterpolationMode.NEAREST}


def pictures(count: int, channels: int = 3, size: int = 24) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    smooth = torch.randn(count, channels, 4, 4, generator=generator)
    images = torch.nn.functional.interpolate(smooth, size=(size, size), mode="bilinear") * 50 + 110
    return images.clamp(0, 255).round().to(torch.uint8)


def sheared(image: Tensor, shear: list[float]) -> Tensor:
    degrees = [math.degrees(math.atan(value)) for value in shear]
    return F.affine(image, angle=0.0, translate=[0, 0], scale=1.0, shear=degrees, center=[0, 0], **NEAREST)


def moved(image: Tensor, translate: list[int]) -> Tensor:
    return F.affine(image, angle=0.0, translate=translate, scale=1.0, shear=[0.0, 0.0], **NEAREST)


BLENDS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "brightness": F.adjust_brightness,
    "colour": F.adjust_saturation,
    "contrast": F.adjust_contrast,
    "sharpness": F.adjust_sharpness,
}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("factor", [0.1, 0.7, 1.0, 1.6])
@pytest.mark.parametrize("name", BLENDS)
def test_blends_are_torchvisions(name: str, factor: float, channels: int) -> None:
    images = pictures(6, channels)
    ours = changed(name, images, torch.full((6,), factor - 1)).int()
    assert int((ours - BLENDS[name](images, factor).int()).abs().max()) <= (
        2 if name in ("contrast", "colour") else 1
    ), "it cuts off more often"


@pytest.mark.parametrize("channels", [1, 3])
def test_changes_of_levels_are_torchvisions(channels: int) -> None:
    images, ones = pictures(6, channels), torch.ones(6)
    images[0] = 77
    for bits in (2, 4, 8):
        assert torch.equal(changed("posterize", images, bits * ones), F.posterize(images, bits))
    for share in (0.0, 0.31, 1.0):
        found = changed("solarize", images, share * ones)
        assert torch.equal(found, F.solarize(images, share * 255))
    assert int((changed("auto_contrast", images, ones).int() - F.autocontrast(images).int()).abs().max()) <= 1
    assert torch.equal(changed("equalize", images, ones), F.equalize(images))


@pytest.mark.parametrize(
    ("name", "strength", "expected"),
    [
        ("shear_x", 0.25, lambda image, s: sheared(image, [-0.25 * s, 0.0])),
        ("shear_y", 0.25, lambda image, s: sheared(image, [0.0, -0.25 * s])),
        ("translate_x", 5.7, lambda image, s: moved(image, [int(-5 * s), 0])),
        ("translate_y", 5.7, lambda image, s: moved(image, [0, int(-5 * s)])),
        ("rotate", math.sin(math.radians(25)), lambda image, s: F.rotate(image, -25.0 * s, **NEAREST)),
        ("rotate", 2 - math.sin(math.radians(120)), lambda image, s: F.rotate(image, -120.0 * s, **NEAREST)),
    ],
    ids=["shear_x", "shear_y", "translate_x", "translate_y", "rotate", "rotate_far"],
)
def test_images_are_moved_as_torchvision_moves_them(name: str, strength: float, expected: Any) -> None:
    images = pictures(4)
    for sign in (1.0, -1.0):
        found = changed(name, images, torch.full((4,), sign * strength))
        wanted = {s: torch.stack([expected(image, s) for image in images]) for s in (1.0, -1.0)}
        # Nearest pixels where two are as near may differ; which direction is called positive plays no part.
        shares = [float((found == other).float().mean()) for other in wanted.values()]
        assert max(shares) > 0.97


@pytest.mark.parametrize(
    "policy", [RandAugment(), RandAugment(3, 20, p=0.5), TrivialAugment()], ids=lambda p: type(p).__name__
)
def test_every_image_has_a_change_of_its_own_and_all_occur(policy: Any) -> None:
    image = pictures(1)
    images = image.expand(300, -1, -1, -1).clone()
    before = images.clone()
    found = policy(images, draws(300))
    assert torch.equal(images, before), "the images themselves are left alone"
    assert len({tuple(one.flatten().tolist()) for one in found}) > 15
    assert (found != image).flatten(1).any(1).float().mean() > 0.5
    assert not torch.equal(found, policy(images, draws(300, epoch=1)))


def test_each_operation_has_its_probability() -> None:
    images = pictures(400)
    kept = [
        (RandAugment(1, 20, p=p)(images, draws(400)) == images).flatten(1).all(1).float().mean() for p in (0, 0.5, 1)
    ]
    assert kept[0] == 1
    assert kept[2] < 0.2, "some operations change nothing"
    assert kept[1] == pytest.approx((1 + float(kept[2])) / 2, abs=0.1)


@pytest.mark.parametrize("policy", [RandAugment(), TrivialAugment()], ids=lambda p: type(p).__name__)
def test_a_device_that_makes_all_changes_and_selects_one_gives_the_same_bits(
    policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = pictures(60)
    here = policy(images, draws(60))
    monkeypatch.setattr(auto_augment, "_made_where_chosen", auto_augment._made_and_selected)
    assert torch.equal(policy(images, draws(60)), here)
