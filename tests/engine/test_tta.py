"""Test-time augmentation is the mean over views, and each view is what its name says."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from runner.config.schema import verbs as schema
from runner.engine.tta import VIEWS, TTAModel, views_named


class Probe(nn.Module):
    """Three outputs that tell views apart."""

    def forward(self, images: Tensor) -> Tensor:
        flat = images.flatten(1)
        places = torch.arange(flat.shape[1], dtype=torch.float32)
        return torch.stack([flat.mean(1), (flat * places).mean(1), (flat * places.sin()).sum(1)], 1)


@pytest.fixture
def images() -> Tensor:
    return torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def test_every_name_of_the_schema_is_a_view_and_the_reverse() -> None:
    assert set(get_args(schema.View)) == set(VIEWS)


@pytest.mark.parametrize("name", VIEWS)
def test_the_output_is_the_mean_over_the_plain_image_and_its_views(name: str, images: Tensor) -> None:
    views = views_named([name])
    assert torch.equal(views[0](images), images)
    expected = torch.stack([Probe()(view(images)) for view in views]).mean(0)
    torch.testing.assert_close(TTAModel(Probe(), views)(images), expected)
    for activation in ("softmax", "sigmoid"):
        of = (lambda logits: logits.softmax(1)) if activation == "softmax" else torch.sigmoid
        shares = torch.stack([of(Probe()(view(images))) for view in views]).mean(0)
        torch.testing.assert_close(of(TTAModel(Probe(), views, activation)(images)), shares)


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_differs_from_the_image_and_keeps_its_shape(name: str, images: Tensor) -> None:
    for view in VIEWS[name]:
        seen = view(images)
        assert seen.shape == images.shape
        assert not torch.equal(seen, images)


def test_each_view_of_a_name_is_seen_in_each_view_of_the_others(images: Tensor) -> None:
    views = views_named(["flip", "shifts", "hflip"])
    seen = [view(images) for view in views]
    assert len(seen) == 2 * 5, "flip and hflip are one"
    moved = (images, *(shift(images) for shift in VIEWS["shifts"]))
    for expected in (*moved, *(each.flip(-1) for each in moved)):
        assert any(torch.equal(expected, each) for each in seen)


@pytest.mark.parametrize(("size", "pixels"), [(16, 1), (96, 3)])
def test_a_shift_moves_by_a_thirty_second_at_least_a_pixel_and_repeats_the_edge(size: int, pixels: int) -> None:
    images = torch.rand(2, 3, size, size)
    moved = VIEWS["shifts"][1](images)
    assert torch.equal(moved[..., pixels:, :], images[..., :-pixels, :])
    assert torch.equal(moved[..., :pixels, :], images[..., :1, :].expand(-1, -1, pixels, -1))


def test_corners_are_the_corners_and_a_tenth_crop_is_a_mirrored_one(images: Tensor) -> None:
    crops = VIEWS["ten_crop"]
    ramp = torch.arange(16.0).expand(1, 1, 16, 16)
    left, right = crops[0](ramp).mean(), crops[1](ramp).mean()
    assert left < ramp.mean() < right
    for plain, mirrored in zip(crops[:5], crops[5:], strict=True):
        assert torch.equal(mirrored(images), plain(images).flip(-1))


def test_images_that_are_not_square_are_not_rotated() -> None:
    with pytest.raises(ValueError, match="8x4"):
        VIEWS["rotations"][0](torch.zeros(1, 1, 8, 4))


def test_a_class_that_every_view_rules_out_is_finite() -> None:
    class Sure(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return torch.tensor([[500.0, -500.0]]).expand(len(images), 2)

    assert TTAModel(Sure(), views_named(["flip"]), "sigmoid")(torch.zeros(1, 1, 2, 2)).isfinite().all()
    outputs = TTAModel(Sure(), views_named(["flip"]), "softmax")(torch.zeros(1, 1, 2, 2))
    assert outputs.isfinite().all()
    torch.testing.assert_close(outputs.softmax(1), torch.tensor([[1.0, 0.0]]))
