"""Changes of colour mean what they mean in torchvision, within their limits and the range of pixels."""

from __future__ import annotations

import pytest
import torch
from scripted_draws import Scripted
from torch import Tensor
from torchvision.transforms.v2 import functional as reference

from runner.data.sample_rng import SampleRNG
from runner.data.transforms.color_jitter import ColorJitter


def pictures(count: int = 6, channels: int = 3) -> Tensor:
    images = torch.rand(count, channels, 9, 7, generator=torch.Generator().manual_seed(0))
    images[:, :, 0] = images[:, :1, 0]  # a row of greys, whose hue is not defined
    images[:, :, 1] = 0
    images[:, :, 2] = 1
    return images


@pytest.mark.parametrize("drawn", [0.0, 0.25, 0.5, 0.875])
@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation"])
def test_a_factor_does_what_it_does_in_torchvision(name: str, drawn: float) -> None:
    images = pictures()
    off = dict.fromkeys(("brightness", "contrast", "saturation", "hue"), 0.0)
    out = ColorJitter(**off | {name: 0.6})(images, Scripted(6, drawn))
    expected = getattr(reference, f"adjust_{name}")(images, 0.4 + 1.2 * drawn)
    assert torch.allclose(out, expected, atol=2e-4)  # torchvision rounds the weights of the channels to 4 digits


@pytest.mark.parametrize("drawn", [0.0, 0.2, 0.5, 0.625, 0.999])
@pytest.mark.parametrize("hue", [0.1, 0.5])
def test_a_hue_is_turned_as_in_torchvision(hue: float, drawn: float) -> None:
    images = pictures()
    out = ColorJitter(0, 0, 0, hue)(images, Scripted(6, drawn))
    assert torch.allclose(out, reference.adjust_hue(images, (2 * drawn - 1) * hue), atol=1e-5)


def test_the_order_is_brightness_contrast_saturation_hue() -> None:
    images = pictures()
    out = ColorJitter(0.5, 0.5, 0.5, 0.2)(images, Scripted(6, 0.9, 0.8, 0.7, 0.6))
    expected = reference.adjust_contrast(reference.adjust_brightness(images, 1.4), 1.3)
    expected = reference.adjust_hue(reference.adjust_saturation(expected, 1.2), 0.04)
    assert torch.allclose(out, expected, atol=5e-4)


def test_bytes_are_those_of_floats_rounded() -> None:
    images = (pictures() * 255).round().to(torch.uint8)
    jitter = ColorJitter(0.4, 0.4, 0.4, 0.1)
    out = jitter(images, SampleRNG(2, 0, torch.arange(6)))
    floats = jitter(images.float() / 255, SampleRNG(2, 0, torch.arange(6)))
    assert out.dtype == torch.uint8
    assert (out.float() - floats * 255).abs().max() <= 0.51


def test_factors_are_uniform_and_never_negative() -> None:
    grey = torch.full((5000, 1, 1, 1), 0.25)
    out = ColorJitter(2.0, 0, 0, 0)(grey, SampleRNG(1, 0, torch.arange(5000))) / 0.25
    counts = torch.histc(out, 10, 0, 3)
    assert 0 <= out.min() < 0.01
    assert 2.99 < out.max() <= 3 + 1e-6
    assert float(((counts - 500).square() / 500).sum()) < 30  # chi-squared, 9 degrees of freedom


def test_grey_images_take_brightness_and_contrast_and_refuse_the_rest() -> None:
    images = pictures(channels=1)
    out = ColorJitter(0.4, 0.4, 0, 0)(images, Scripted(6, 0.75, 0.25))
    expected = reference.adjust_contrast(reference.adjust_brightness(images, 1.2), 0.8)
    assert torch.allclose(out, expected, atol=1e-4)
    for saturation, hue in ((0.4, 0.0), (0.0, 0.1)):
        with pytest.raises(ValueError, match="3 channels, and these have 1; allowed: saturation: 0 and hue: 0"):
            ColorJitter(0, 0, saturation, hue)(images, SampleRNG(0, 0, torch.arange(6)))
