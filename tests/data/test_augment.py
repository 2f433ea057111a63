"""Batch transforms treat each sample by its own draws alone, and do what their arguments say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from scripted_draws import Scripted, draws
from small_loaders import CPU
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms.v2 import functional as reference

from runner.base.errors import UserError
from runner.data.sample_rng import SampleRNG
from runner.data.transforms import augment
from runner.data.transforms.augment import (
    Pipeline,
    RandomBrightnessContrast,
    RandomErasing,
    RandomFlip,
    RandomShift,
    chosen_from,
)
from runner.data.transforms.color_jitter import ColorJitter
from runner.data.transforms.growing import GrowingSize
from runner.data.transforms.resized_crop import RandomResizedCrop


def pictures(count: int, channels: int = 3, height: int = 8, width: int = 6, low: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(low, 256, (count, channels, height, width), generator=generator, dtype=torch.uint8)


PICTURES, POINTS = pictures(50), pictures(50, 1, 1, 1)
NOTHING = (RandomShift(0), RandomFlip(0), RandomBrightnessContrast(0, 0), RandomErasing(0), ColorJitter(0, 0, 0, 0))


@pytest.mark.parametrize(
    ("transform", "images", "expected"),
    [
        *((transform, PICTURES, PICTURES) for transform in NOTHING),
        (RandomShift(0.5, "reflect"), POINTS, POINTS),  # there is nothing to reflect
        *((RandomFlip(1, alternate), PICTURES, PICTURES.flip(-1)) for alternate in (False, True)),
    ],
    ids=lambda value: "" if isinstance(value, Tensor) else type(value).__name__,
)
def test_a_chance_or_strength_of_zero_changes_nothing_and_a_flip_with_certainty_everything(
    transform: Callable[[Tensor, SampleRNG], Tensor], images: Tensor, expected: Tensor
) -> None:
    assert torch.equal(transform(images, draws(50)), expected)


@pytest.mark.parametrize(("height", "width", "share"), [(6, 5, 0.4), (12, 2, 0.01), (3, 9, 0.5)])
@pytest.mark.parametrize(("padding", "mode"), [("zeros", "constant"), ("edge", "replicate"), ("reflect", "reflect")])
def test_a_shift_moves_by_no_more_than_its_share_and_what_comes_in_is_what_torch_pads_with(
    padding: Any, mode: str, height: int, width: int, share: float
) -> None:
    images, down, across = pictures(400, 2, height, width), max(1, round(share * height)), max(1, round(share * width))
    out = RandomShift(share, padding)(images, draws(400))
    padded = F.pad(images.float(), (across, across, down, down), mode=mode).to(torch.uint8)
    windows = padded.unfold(2, height, 1).unfold(3, width, 1).flatten(2, 3)  # (B, C, places, H, W)
    fits = (windows == out[:, :, None]).all(dim=(1, 3, 4))
    assert fits.any(1).all()
    assert (fits.sum(0) > 0).all(), "some shifts never occur"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.float64])
def test_the_cpu_takes_the_windows_and_choices_that_other_devices_take(dtype: torch.dtype) -> None:
    images, others = pictures(9, 3, 7, 8).to(dtype), pictures(9, 3, 7, 8, low=100).to(dtype)
    down, across = torch.arange(9) % 3, torch.arange(9) % 4
    expected = [image[:, i : i + 5, j : j + 5] for image, i, j in zip(images, down, across, strict=True)]
    for windows in (augment._rows_copied, augment._pixels_gathered):
        assert torch.equal(windows(images, down * 8 + across, 5, 5), torch.stack(expected))
    chosen = torch.arange(9) % 3 == 0
    whole = torch.where(chosen[:, None, None, None], images, others)
    assert torch.equal(chosen_from(chosen, images.clone(), others), whole)
    pixels = others[:, :1] > 180
    assert torch.equal(chosen_from(pixels, images.clone(), others), torch.where(pixels, images, others))


def test_all_shifts_occur_equally_often() -> None:
    image = torch.zeros(1, 1, 8, 8, dtype=torch.uint8)
    image[..., 4, 4] = 1
    out = RandomShift(0.125)(image.expand(9000, -1, -1, -1), draws(9000))
    places = out.sum((0, 1))[3:6, 3:6]
    assert int(places.sum()) == 9000
    assert (places - 1000).abs().max() < 150


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_flips_happen_as_often_as_asked_and_mirror_left_to_right(p: float) -> None:
    images = pictures(8000, 1, 2, 3)
    out = RandomFlip(p)(images, draws(8000))
    flipped = (out == images.flip(-1)).flatten(1).all(1)
    same = (out == images).flatten(1).all(1)
    assert (flipped | same).all()
    assert abs(float((flipped & ~same).float().mean()) - p) < 0.03


def mirrored(p: float, epochs: int, samples: int, seed: int = 11) -> Tensor:
    """Whether each sample is mirrored in each epoch, (epochs, samples)."""
    images = torch.arange(2, dtype=torch.uint8).expand(samples, 1, 1, 2)
    flip = RandomFlip(p, alternate=True)
    return torch.stack([flip(images, draws(samples, epoch, seed))[:, 0, 0, 0] == 1 for epoch in range(epochs)])


def test_an_alternating_flip_mirrors_each_image_in_every_other_epoch_by_a_parity_of_its_own() -> None:
    found = mirrored(0.5, 6, 4000)
    assert (found[1:] != found[:-1]).all()
    assert abs(float(found[0].float().mean()) - 0.5) < 0.03
    (other_seed,) = mirrored(0.5, 1, 4000, seed=12)
    assert abs(float((other_seed == found[0]).float().mean()) - 0.5) < 0.03


@pytest.mark.parametrize("p", [0.1, 0.25, 0.3, 0.8])
def test_an_alternating_flip_spreads_any_share_of_the_epochs_evenly(p: float) -> None:
    times = mirrored(p, 60, 300).int().cumsum(0)
    expected = p * torch.arange(1, 61)[:, None]
    assert (times - expected).abs().max() < 1 + 1e-3, "an image is mirrored too often or too rarely at some time"


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_erased_is_one_rectangle_no_larger_than_its_share(share: float) -> None:
    images = pictures(600, 3, 8, 12)
    out = RandomErasing(1.0, share)(images, draws(600))
    gone = out == 0
    assert torch.equal(out[~gone], images[~gone])
    assert (gone == gone[:, :1]).all(), "all channels lose the same pixels"
    rows, columns = gone[:, 0].any(2).sum(1), gone[:, 0].any(1).sum(1)
    assert (gone[:, 0].sum((1, 2)) == rows * columns).all(), "not a rectangle"
    assert rows.min() == columns.min() == 1
    assert rows.max() == round(share * 8)
    assert columns.max() == round(share * 12)
    assert gone[:, 0].any(0).all(), "some pixels are never erased"


def test_erasing_happens_as_often_as_asked() -> None:
    out = RandomErasing(0.3)(pictures(5000, 1, 4, 4), draws(5000))
    assert abs(float((out == 0).flatten(1).any(1).float().mean()) - 0.3) < 0.03


def test_light_and_contrast_stay_within_their_bounds() -> None:
    images = torch.full((4000, 1, 1, 2), 0.5)
    images[..., 1] = 0.6
    out = RandomBrightnessContrast(0.1, 0.5)(images, draws(4000))
    shift, scale = out[..., 0] - 0.5, (out[..., 1] - out[..., 0]) / 0.1
    assert 0.095 < shift.max() <= 0.1 + 1e-6
    assert -0.1 - 1e-6 <= shift.min() < -0.095
    assert 1.49 < scale.max() <= 1.5 + 1e-5
    assert 0.5 - 1e-5 <= scale.min() < 0.51


@pytest.mark.parametrize(("mean", "std"), [([0.1, 0.5, 0.9], [0.2, 0.3, 0.4]), ([0.5], [0.25])])
def test_the_pipeline_normalises_uint8_and_float_alike(mean: list[float], std: list[float]) -> None:
    images, pipeline = pictures(5, 3), Pipeline([], mean, std, 0, CPU)
    expected = (images.double() / 255 - torch.tensor(mean).view(-1, 1, 1).double()) / torch.tensor(std).view(-1, 1, 1)
    for given_images in (images, images.float() / 255):
        before = given_images.clone()
        out = pipeline(given_images, torch.arange(5), 0)
        assert out.dtype == torch.float32
        assert torch.allclose(out.double(), expected, atol=1e-6)
        assert torch.equal(given_images, before), "the data set's own pixels were overwritten"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_an_image_comes_out_the_same_in_a_large_batch_and_alone(dtype: torch.dtype) -> None:
    images = torch.randint(0, 256, (6, 3, 400, 401)).to(dtype)
    assert 4 * images.numel() > augment._LARGE_BYTES
    pipeline = Pipeline([], [0.4, 0.5, 0.6], [0.2, 0.3, 0.7], 0, CPU)
    together, before = pipeline(images, torch.arange(6), 1), images.clone()
    assert together.is_contiguous()
    assert torch.equal(together, torch.cat([pipeline(image[None], torch.arange(1), 1) for image in images]))
    assert torch.equal(images, before)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_channels_last_changes_the_layout_and_no_value(dtype: torch.dtype) -> None:
    images = pictures(4).to(dtype)
    plain = Pipeline([RandomFlip(0.5)], [0.5], [0.5], 0, CPU)(images, torch.arange(4), 1)
    last = Pipeline([RandomFlip(0.5)], [0.5], [0.5], 0, CPU, channels_last=True)(images, torch.arange(4), 1)
    assert plain.is_contiguous()
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(plain, last)


def test_statistics_for_other_channels_are_reported() -> None:
    with pytest.raises(UserError, match=r"data.normalize: has 3 values, but the images have 1 channels"):
        Pipeline([], [0.1, 0.2, 0.3], [1.0, 1.0, 1.0], 0, CPU)(pictures(2, 1), torch.arange(2), 0)


def test_equal_transforms_at_two_places_draw_apart() -> None:
    seen: list[Tensor] = []

    def spy(images: Tensor, rng: SampleRNG) -> Tensor:
        seen.append(rng.uniform())
        return images

    pipeline = Pipeline([spy, spy], [0.0], [1.0], 5, CPU)
    pipeline(pictures(50), torch.arange(50), 0)
    pipeline(pictures(50), torch.arange(50), 1)
    assert not torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], seen[2])


# Changes of colour mean what they mean in torchvision


def with_greys(count: int = 6, channels: int = 3) -> Tensor:
    images = torch.rand(count, channels, 9, 7, generator=torch.Generator().manual_seed(0))
    images[:, :, 0] = images[:, :1, 0]  # a row of greys, whose hue is not defined
    images[:, :, 1] = 0
    images[:, :, 2] = 1
    return images


@pytest.mark.parametrize("drawn", [0.0, 0.25, 0.5, 0.875])
@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation"])
def test_a_factor_does_what_it_does_in_torchvision(name: str, drawn: float) -> None:
    images = with_greys()
    off = dict.fromkeys(("brightness", "contrast", "saturation", "hue"), 0.0)
    out = ColorJitter(**off | {name: 0.6})(images, Scripted(6, drawn))
    expected = getattr(reference, f"adjust_{name}")(images, 0.4 + 1.2 * drawn)
    assert torch.allclose(out, expected, atol=2e-4)  # torchvision rounds the weights of the channels to 4 digits


@pytest.mark.parametrize("drawn", [0.0, 0.2, 0.5, 0.625, 0.999])
@pytest.mark.parametrize("hue", [0.1, 0.5])
def test_a_hue_is_turned_as_in_torchvision(hue: float, drawn: float) -> None:
    images = with_greys()
    out = ColorJitter(0, 0, 0, hue)(images, Scripted(6, drawn))
    assert torch.allclose(out, reference.adjust_hue(images, (2 * drawn - 1) * hue), atol=1e-5)


def test_the_order_is_brightness_contrast_saturation_hue() -> None:
    images = with_greys()
    out = ColorJitter(0.5, 0.5, 0.5, 0.2)(images, Scripted(6, 0.9, 0.8, 0.7, 0.6))
    expected = reference.adjust_contrast(reference.adjust_brightness(images, 1.4), 1.3)
    expected = reference.adjust_hue(reference.adjust_saturation(expected, 1.2), 0.04)
    assert torch.allclose(out, expected, atol=5e-4)


def test_bytes_are_those_of_floats_rounded() -> None:
    images = (with_greys() * 255).round().to(torch.uint8)
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
    images = with_greys(channels=1)
    out = ColorJitter(0.4, 0.4, 0, 0)(images, Scripted(6, 0.75, 0.25))
    expected = reference.adjust_contrast(reference.adjust_brightness(images, 1.2), 0.8)
    assert torch.allclose(out, expected, atol=1e-4)
    for saturation, hue in ((0.4, 0.0), (0.0, 0.1)):
        with pytest.raises(ValueError, match="saturation and hue must be 0 for images of 1 channels"):
            ColorJitter(0, 0, saturation, hue)(images, SampleRNG(0, 0, torch.arange(6)))


# Resized crops


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


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_growing_images_have_the_size_of_the_epoch(dtype: torch.dtype) -> None:
    images, transform = torch.full((2, 3, 192, 192), 7).to(dtype), GrowingSize(smallest=128, begin=1, end=5)
    seen = [transform(images, SampleRNG(0, epoch, torch.arange(2))) for epoch in range(7)]
    assert [each.shape[-1] for each in seen] == [128, 128, 128, 160, 192, 192, 192]
    assert all(each.shape[-2] == each.shape[-1] and each.dtype == dtype for each in seen)
    assert all(torch.allclose(each.float(), torch.tensor(7.0)) for each in seen)


def test_images_that_are_too_small_to_grow_are_refused(rejected: Any) -> None:
    growing = "{_target_: runner.data.transforms.growing.GrowingSize, smallest: 64, begin: 1, end: 3}"
    words = ("data=synthetic", "data.dataset.image_size=32", "model=small_cnn", f"transform.train=[{growing}]")
    assert "smallest=64 pixels, got 32x32" in rejected("train", *words).err
