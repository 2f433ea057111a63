"""Image files: decoding of every kind, what is said about files that are none, and files without targets as a model takes them."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from extras import needs
from hypothesis import given, settings
from hypothesis import strategies as st
from image_reader import read_image
from PIL import Image, ImageOps
from plain_data import noise_image
from read_splits import data_config
from small_loaders import CPU

from runner.base.errors import UserError
from runner.config.schema.sections import Data
from runner.data.sources import image_files, image_io
from runner.data.sources.folders import ImageFolder
from runner.data.sources.image_files import files_loader
from runner.data.sources.image_io import Decoding
from runner.data.transforms.crops import RandomResizedCrop

FOLDER = {"_target_": "runner.data.sources.folders.image_folder"}


def _colour(tmp_path: Path, image: Image.Image, suffix: str, channels: int = 3, **options) -> list[int]:
    path = tmp_path / f"image{suffix}"
    image.save(path, **options)
    tensor = read_image(path, None, channels)
    assert tensor.dtype == torch.uint8
    assert tensor.shape == (channels, image.height, image.width)
    assert tensor.is_contiguous()
    return tensor[:, 0, 0].tolist()


def _palette(*values: int) -> Image.Image:
    image = Image.new("P", (3, 2), 5)
    image.putpalette(values)
    return image


STEPS = [value for index in range(256) for value in (index, 2 * index % 256, 9)]
COLOURED = [
    *(("RGB", (9, 90, 200), suffix, [9, 90, 200]) for suffix in (".png", ".bmp", ".webp")),
    ("RGB", (100, 100, 100), ".png", [100]),
    ("L", 77, ".png", [77, 77, 77]),
    ("L", 77, ".png", [77]),
    ("1", 1, ".png", [255, 255, 255]),
    ("1", 0, ".png", [0]),
    # As JPEG: Pillow before 13 writes TIFF files of YCbCr pixels that it cannot read itself.
    ("YCbCr", (100, 128, 128), ".jpg", [100, 100, 100]),
    ("RGBA", (9, 9, 9, 0), ".png", [255, 255, 255]),
    ("RGBA", (9, 90, 200, 255), ".png", [9, 90, 200]),
    ("RGBA", (0, 0, 0, 128), ".png", [127]),
    ("LA", (9, 0), ".png", [255]),
]
DEEP = {0: 0, 257: 1, 32896: 128, 65535: 255, 385: 1, 386: 2}  # scaled to 8 bits and not cut off


@pytest.mark.parametrize(
    ("image", "suffix", "options", "expected"),
    [
        *((Image.new(mode, (16, 16), colour), suffix, {}, found) for mode, colour, suffix, found in COLOURED),
        (Image.new("RGB", (3, 2), (1, 2, 3)), ".png", {"transparency": (1, 2, 3)}, [255, 255, 255]),
        (_palette(*STEPS), ".png", {}, [5, 10, 9]),
        (_palette(*STEPS), ".gif", {}, [5, 10, 9]),
        (_palette(*[7] * 768), ".png", {"transparency": 5}, [255, 255, 255]),
        (_palette(*[7] * 768), ".png", {"transparency": bytes([255] * 5 + [0])}, [255, 255, 255]),
        *(
            (Image.fromarray(np.full((2, 3), value, dtype=np.uint16)), suffix, {}, [expected] * channels)
            for value, expected in DEEP.items()
            for suffix in (".png", ".tif")
            for channels in (1, 3)
        ),
    ],
)
def test_every_mode_becomes_rgb_or_grey_with_white_behind_what_is_transparent(
    tmp_path, image, suffix, options, expected
):
    options = options | ({"lossless": True} if suffix == ".webp" else {})
    assert _colour(tmp_path, image, suffix, len(expected), **options) == expected


@needs("torchcodec")
@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(({}, {"progressive": True}, {"subsampling": 0}, {"keep_rgb": True}, {"quality": 30})),
    st.sampled_from((None, 24)),
    st.none() | st.tuples(st.floats(0, 1), st.integers(0, 255), st.booleans()),
)
def test_torchcodec_gives_the_pixels_and_the_errors_of_pillow(options, size, damage):
    pixels = np.random.default_rng(0).integers(0, 256, (9, 12, 3), dtype=np.uint8)
    image = Image.fromarray(pixels).resize((50, 37), Image.Resampling.BICUBIC)
    image.save(file := io.BytesIO(), "JPEG", **options)
    content = bytearray(file.getvalue())
    if damage is not None:
        place, value, cut_off = int(damage[0] * (len(content) - 1)), *damage[1:]
        content[place] = value
        content = content[:place] if cut_off else content

    def outcome():
        try:
            return read_image("a.jpg", size, content=bytes(content)).tolist()
        except UserError as error:
            return str(error)

    decoder = image_io._torchcodec()
    assert decoder is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image_io, "_torchcodec", lambda: None)
        expected = outcome()
        used = []
        patch.setattr(image_io, "_torchcodec", lambda: lambda *args, **more: used.append(1) or decoder(*args, **more))
        assert outcome() == expected
    assert used or damage is not None


def test_cmyk_jpeg_keeps_its_colour(tmp_path):
    image = Image.new("RGB", (16, 16), (200, 60, 30)).convert("CMYK")
    assert _colour(tmp_path, image, ".jpg", quality=95) == pytest.approx([200, 60, 30], abs=11)


@pytest.mark.parametrize("values", [np.full((2, 3), 0.5, np.float32), np.full((2, 3), 70000, np.int32)])
def test_numbers_without_a_known_range_are_refused(tmp_path, values):
    Image.fromarray(values).save(tmp_path / "raw.tif")
    with pytest.raises(UserError, match=r"raw\.tif: its pixels are 32-bit"):
        read_image(tmp_path / "raw.tif", None)


def _blocks(rows: int, columns: int, edge: int) -> np.ndarray:
    colours = np.random.default_rng(0).integers(0, 256, (rows, columns, 3), dtype=np.uint8)
    return np.kron(colours, np.ones((edge, edge, 1), np.uint8))


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", [".jpg", ".png"])
def test_every_orientation_is_turned_upright_also_where_the_image_is_cut(tmp_path, orientation, suffix):
    exif, path = Image.Exif(), tmp_path / f"turned{suffix}"
    exif[0x0112] = orientation
    Image.fromarray(_blocks(5, 8, 16)).save(path, exif=exif, **({"quality": 95} if suffix == ".jpg" else {}))
    with Image.open(path) as opened:
        upright = torch.from_numpy(np.array(ImageOps.exif_transpose(opened))).permute(2, 0, 1)
    assert torch.equal(read_image(path, None), upright)

    def corner(height, width):
        assert (height, width) == upright.shape[1:]
        return 3, 5, 32, 32

    part = read_image(path, 32, 3, corner)
    assert torch.equal(part, upright[:, 3:35, 5:37])
    halved = read_image(path, 16, 3, corner)
    assert (halved.float() - part.float().unfold(1, 2, 2).unfold(2, 2, 2).mean((3, 4))).abs().mean() < 12


def test_grey_comes_from_the_brightness_of_a_jpeg_alone(tmp_path):
    Image.fromarray(_blocks(4, 4, 8)).save(tmp_path / "colour.jpg", quality=95, subsampling=0)
    with Image.open(tmp_path / "colour.jpg") as opened:
        grey = torch.from_numpy(np.array(opened.convert("L"))).float()
    assert (read_image(tmp_path / "colour.jpg", None, 1)[0].float() - grey).abs().mean() < 1


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 24), st.sampled_from([1, 3]))
def test_any_size_becomes_the_square_asked_for(tmp_path_factory, width, height, size, channels):
    path = tmp_path_factory.mktemp("size") / "a.png"
    Image.new("RGB", (width, height), (10, 10, 10)).save(path)
    tensor = read_image(path, size, channels)
    assert tensor.shape == (channels, size, size)
    assert tensor.unique().tolist() == [10]


def test_resizing_takes_the_middle_and_averages(tmp_path):
    pixels = np.zeros((8, 24), dtype=np.uint8)
    pixels[:, 8:16] = np.indices((8, 8)).sum(0) % 2 * 255
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    tensor = read_image(tmp_path / "wide.png", 2, 1)
    assert ((tensor > 100) & (tensor < 155)).all(), "a checkerboard shrinks to grey when antialiased"
    assert torch.equal(read_image(tmp_path / "wide.png", 8, 1)[0], torch.from_numpy(pixels[:, 8:16]))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP"])
@pytest.mark.filterwarnings("ignore:Truncated File Read")
def test_a_truncated_or_foreign_file_is_named(tmp_path, kind):
    path = tmp_path / "broken.jpg"
    Image.fromarray(_blocks(64, 64, 1)).save(path, kind)
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], whole[:20], b"", b"not an image"):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"cannot read the image .*broken\.jpg: [^.]"):
            read_image(path, 8)
    with pytest.raises(UserError, match=r"gone\.png: no such file"):
        read_image(tmp_path / "gone.png", 8)


@pytest.mark.parametrize("suffix", [".gif", ".png", ".tif", ".webp"])
def test_of_an_animation_it_is_the_first_frame(tmp_path, suffix):
    first, second = Image.new("RGB", (5, 4), (250, 0, 0)), Image.new("RGB", (5, 4), (0, 0, 250))
    path, options = tmp_path / f"moving{suffix}", {"lossless": True} if suffix == ".webp" else {}
    first.save(path, save_all=True, append_images=[second], **options)
    with Image.open(path) as opened:
        assert opened.n_frames == 2
    assert read_image(path, None)[:, 0, 0].tolist() == [250, 0, 0]
    assert read_image(path, 2)[:, 0, 0].tolist() == [250, 0, 0]


@pytest.mark.parametrize("suffix", [".jpg", ".gif", ".bmp"])
def test_what_a_file_is_follows_from_its_content(tmp_path, suffix):
    Image.new("RGB", (5, 4), (250, 9, 1)).save(tmp_path / "image.png")
    renamed = (tmp_path / "image.png").rename(tmp_path / f"image{suffix}")
    assert read_image(renamed, None)[:, 0, 0].tolist() == [250, 9, 1]


def test_the_memory_of_an_image_is_bounded_by_its_pixels(tmp_path):
    path = tmp_path / "large.png"
    Image.new("RGBA", (3000, 3000)).save(path)
    assert path.stat().st_size < 100_000
    with pytest.raises(UserError, match=r"large\.png: it has 3,000 x 3,000 = 9,000,000 pixels, and data\.max_pixels=8"):
        read_image(path, 8, max_pixels=8_999_999)
    assert read_image(path, 8, max_pixels=9_000_000).shape == (3, 8, 8)


def saved(folder: Path, *sizes: tuple[int, int]) -> list[Path]:
    return [noise_image(folder / f"{number}.png", *size, number) for number, size in enumerate(sizes)]


def read(
    paths: Sequence[Path], shape: tuple[int, int, int], dataset: dict[str, Any], transforms: Sequence[Any] = ()
) -> tuple[torch.Tensor, dict[int, str]]:
    how: Any = {"num_workers": 0, "on_error": "skip", "max_skipped": 1.0}
    config = data_config(Data(dataset=dataset, image_size=dataset.get("image_size"), **how), batch_size=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image_files, "callables", lambda *_: transforms)
        loader, unreadable = files_loader(config, CPU, paths, shape)
    batches = list(loader.batches(0, 0, len(paths)))
    return torch.cat([batch.images for batch in batches]) * 255, unreadable.reasons("input")


def test_a_folders_own_reading_is_that_of_its_files(tmp_path: Path) -> None:
    paths = saved(tmp_path, (30, 20), (9, 40), (8, 8))
    settings = FOLDER | {"image_size": 8, "crop_share": 0.6, "channels": 1}
    images, _ = read(paths, (1, 8, 8), settings)
    own = ImageFolder(paths, [0] * 3, (), Decoding(8, 1, 0.6))
    torch.testing.assert_close(images, torch.stack([own[index][0] for index in range(3)]).float())


@pytest.mark.parametrize("transforms", [[], [lambda image: image / 255]], ids=["integers", "floats"])
def test_another_file_replaces_what_cannot_be_read_and_the_file_is_reported(tmp_path: Path, transforms: Any) -> None:
    paths = saved(tmp_path, (8, 8), (8, 8), (8, 8))
    paths[1].write_bytes(b"not an image")
    images, unreadable = read(paths, (3, 8, 8), {"_target_": "my.own"}, transforms)
    assert list(unreadable) == [1]
    assert str(paths[1]) in unreadable[1]
    assert any(torch.equal(images[1], images[other]) for other in (0, 2))
    assert len(images[0].unique()) > 2 < len(images[2].unique())
    for path in paths:
        path.write_bytes(b"")
    with pytest.raises(UserError, match=r"input: none of the 3 images can be read: .*0\.png"):
        read(paths, (3, 8, 8), {"_target_": "my.own"}, transforms)


def test_the_only_readable_file_of_many_is_found_and_each_of_the_others_is_opened_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, opened = saved(tmp_path, *[(8, 8)] * 40), Counter[Path]()
    for path in paths:
        if path != paths[30]:
            path.write_bytes(b"")
    read_file = Decoding.read
    monkeypatch.setattr(
        Decoding, "read", lambda self, path, *more: (opened.update([path]), read_file(self, path, *more))[1]
    )
    images, unreadable = read(paths, (3, 8, 8), {"_target_": "my.own"})
    assert [*unreadable] == [index for index in range(40) if index != 30]
    assert (images == images[30]).all()
    assert sum(opened.values()) < 3 * len(paths)


def test_sample_transforms_get_the_whole_image_and_have_to_give_what_the_model_takes(tmp_path: Path) -> None:
    paths = saved(tmp_path, (12, 10), (30, 30))
    images, unreadable = read(paths, (3, 6, 8), {"_target_": "my.own"}, [lambda image: image[:, :6, :8]])
    assert not unreadable
    assert images.shape == (2, 3, 6, 8)
    with pytest.raises(UserError, match=r"sample_eval: .*1.png.* shape \(3, 30, 30\), and .* \(3, 12, 10\)"):
        read(paths, (3, 12, 10), {"_target_": "my.own"}, [lambda image: image.transpose(1, 2)])


def test_a_transform_that_fails_on_any_image_and_other_channels_are_the_fault_of_the_config(tmp_path: Path) -> None:
    def broken(image: Any) -> Any:
        raise RuntimeError("no such thing")

    with pytest.raises(UserError, match=r"transform\.sample_eval: cannot take .*0\.png.* no such thing"):
        read(saved(tmp_path, (8, 8)), (3, 8, 8), {"_target_": "my.own"}, [broken])
    with pytest.raises(UserError, match="4 channels, and files have 1 or 3"):
        read(saved(tmp_path, (8, 8)), (4, 8, 8), {"_target_": "my.own"})


def test_a_transform_that_cuts_while_reading_is_given_the_file(tmp_path: Path) -> None:
    paths = saved(tmp_path, (64, 48))
    crop = RandomResizedCrop(8, scale=(1.0, 1.0), ratio=(4 / 3, 4 / 3))
    images, unreadable = read(paths, (3, 8, 8), FOLDER | {"image_size": 8}, [crop])
    assert not unreadable
    assert images.shape == (1, 3, 8, 8)
