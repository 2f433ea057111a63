"""A resized crop is the part it says, enlarged, of the areas and shapes it says."""

from __future__ import annotations

import pytest
import torch
from scripted_draws import Scripted
from torch import Tensor
from torch.nn import functional as F

from runner.data.sample_rng import SampleRNG
from runner.data.transforms.resized_crop import RandomResizedCrop


def ramps(count: int, height: int, width: int) -> Tensor:
    """Images whose two channels say where a pixel is, from 0 to 1 between the edges of the image."""
    down, across = (torch.arange(size) + 0.5 for size in (height, width))
    grid = torch.stack(torch.broadcast_tensors((down / height)[:, None], (across / width)[None]))
    return grid.expand(count, -1, -1, -1).contiguous()


def boxes(out: Tensor) -> tuple[Tensor, Tensor]:
    """Height and width of the parts that images of ramps were cut from, as shares; taken away from the edges."""
    height, width = out.shape[-2:]
    rows, columns = out[:, 0, :, width // 2], out[:, 1, height // 2]
    middle = height // 2, width // 2
    tall = (rows[:, middle[0]] - rows[:, middle[0] - 1]) * height
    wide = (columns[:, middle[1]] - columns[:, middle[1] - 1]) * width
    return tall, wide


@pytest.mark.parametrize(("start", "offset"), [(0.0, 0), (0.5, 2), (1.0, 4)])
def test_a_part_is_enlarged_bilinearly(start: float, offset: int) -> None:
    images = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    out = RandomResizedCrop((0.25, 0.25), (1.0, 1.0))(images, Scripted(2, 0.0, 0.0, start, 0.5))
    expected = F.interpolate(images[:, :, offset : offset + 4, 2:6], size=(8, 8), mode="bilinear", align_corners=False)
    # The outermost pixels look half a pixel over the edge of the part.
    assert torch.allclose(out[..., 1:-1, 1:-1], expected[..., 1:-1, 1:-1], atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float16])
def test_the_whole_image_comes_out_as_it_is(dtype: torch.dtype) -> None:
    images = torch.randint(0, 256, (2, 3, 5, 7), dtype=torch.uint8)
    images = images if dtype == torch.uint8 else (images / 255).to(dtype)
    out = RandomResizedCrop((1.0, 1.0), (7 / 5, 7 / 5))(images, SampleRNG(0, 0, torch.arange(2)))
    assert out.dtype == dtype
    assert torch.allclose(out.float(), images.float(), atol=2e-6)


def test_areas_are_uniform_and_shapes_log_uniform_within_their_limits() -> None:
    images = ramps(4000, 48, 48)
    tall, wide = boxes(RandomResizedCrop((0.1, 0.4), (0.5, 2.0))(images, SampleRNG(3, 0, torch.arange(4000))))
    area, shape = tall * wide, (wide / tall).log2()
    for values, low, high in ((area, 0.1, 0.4), (shape, -1.0, 1.0)):
        assert low - 2e-3 < values.min() < low + 0.01 * (high - low) + 2e-3
        assert high + 2e-3 > values.max() > high - 0.01 * (high - low) - 2e-3
        counts = torch.histc(values, 10, low, high)
        assert float(((counts - 400).square() / 400).sum()) < 30  # chi-squared, 9 degrees of freedom


@pytest.mark.parametrize(("height", "width"), [(8, 40), (40, 8), (24, 24)])
def test_a_part_lies_within_the_image_whatever_its_shape(height: int, width: int) -> None:
    images = ramps(1000, height, width)
    tall, wide = boxes(RandomResizedCrop((0.5, 1.0))(images, SampleRNG(5, 0, torch.arange(1000))))
    assert max(tall.max(), wide.max()) <= 1 + 1e-4
    area = tall * wide
    assert 0.5 - 1e-3 < area.min() < 0.52
    assert 0.98 < area.max() < 1 + 1e-3


def test_parts_come_from_everywhere() -> None:
    out = RandomResizedCrop((0.25, 0.25), (1.0, 1.0))(ramps(2000, 16, 16), SampleRNG(1, 0, torch.arange(2000)))
    for channel in range(2):
        middles = out[:, channel].mean((1, 2))
        counts = torch.histc(middles, 5, 0.25, 0.75)
        assert float(((counts - 400).square() / 400).sum()) < 25  # chi-squared, 4 degrees of freedom
