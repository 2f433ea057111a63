"""Decoding of every kind of image, and what is said about files that are none."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from extras import needs
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from runner.base.errors import UserError
from runner.data.sources import image_io
from runner.data.sources.image_io import read_image


def _colour(tmp_path: Path, image: Image.Image, suffix: str = ".png", channels: int = 3, **options) -> list[int]:
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
    red, green, blue = _colour(tmp_path, Image.new("RGB", (16, 16), (200, 60, 30)).convert("CMYK"), ".jpg", quality=95)
    assert abs(red - 200) < 12
    assert abs(green - 60) < 12
    assert abs(blue - 30) < 12


@pytest.mark.parametrize("values", [np.full((2, 3), 0.5, np.float32), np.full((2, 3), 70000, np.int32)])
def test_numbers_without_a_known_range_are_refused(tmp_path, values):
    Image.fromarray(values).save(tmp_path / "raw.tif")
    with pytest.raises(UserError, match=r"raw\.tif: its pixels are 32-bit"):
        read_image(tmp_path / "raw.tif", None)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", [".jpg", ".png"])
def test_every_orientation_is_turned_upright_also_where_the_image_is_cut(tmp_path, orientation, suffix):
    pixels = np.kron(
        np.random.default_rng(0).integers(0, 256, (5, 8, 3), dtype=np.uint8), np.ones((16, 16, 1), np.uint8)
    )
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(
        tmp_path / f"turned{suffix}", exif=exif, **({"quality": 95} if suffix == ".jpg" else {})
    )
    with Image.open(tmp_path / f"turned{suffix}") as opened:
        upright = torch.from_numpy(np.array(ImageOps.exif_transpose(opened))).permute(2, 0, 1)
    assert torch.equal(read_image(tmp_path / f"turned{suffix}", None), upright)

    def corner(height, width):
        assert (height, width) == upright.shape[1:]
        return 3, 5, 32, 32

    part = read_image(tmp_path / f"turned{suffix}", 32, 3, corner)
    assert torch.equal(part, upright[:, 3:35, 5:37])
    halved = read_image(tmp_path / f"turned{suffix}", 16, 3, corner)
    assert (halved.float() - part.float().unfold(1, 2, 2).unfold(2, 2, 2).mean((3, 4))).abs().mean() < 12


def test_grey_comes_from_the_brightness_of_a_jpeg_alone(tmp_path):
    pixels = np.kron(np.random.default_rng(1).integers(0, 256, (4, 4, 3), dtype=np.uint8), np.ones((8, 8, 1), np.uint8))
    Image.fromarray(pixels).save(tmp_path / "colour.jpg", quality=95, subsampling=0)
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


def _bad_files() -> dict[str, bytes]:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    files = {}
    for kind in ("JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP"):
        buffer = io.BytesIO()
        Image.fromarray(noise).save(buffer, kind)
        files[f"half a {kind}"] = buffer.getvalue()[: len(buffer.getvalue()) // 2]
        files[f"head of a {kind}"] = buffer.getvalue()[:20]
    return files | {"empty": b"", "text": b"not an image"}


@pytest.mark.parametrize("case", _bad_files())
@pytest.mark.filterwarnings("ignore:Truncated File Read")
def test_a_truncated_or_foreign_file_is_named(tmp_path, case):
    path = tmp_path / "broken.jpg"
    path.write_bytes(_bad_files()[case])
    with pytest.raises(UserError, match=r"cannot read the image .*broken\.jpg: [^.]"):
        read_image(path, 8)
    with pytest.raises(UserError, match=r"gone\.png: no such file"):
        read_image(tmp_path / "gone.png", 8)


@pytest.mark.parametrize(
    ("suffix", "options"), [(".gif", {}), (".png", {}), (".tif", {}), (".webp", {"lossless": True})]
)
def test_of_an_animation_it_is_the_first_frame(tmp_path, suffix, options):
    first, second = Image.new("RGB", (5, 4), (250, 0, 0)), Image.new("RGB", (5, 4), (0, 0, 250))
    path = tmp_path / f"moving{suffix}"
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
    with pytest.raises(
        UserError, match=r"large\.png: it has 3,000 x 3,000 = 9,000,000 pixels, and data\.max_pixels=8999999"
    ):
        read_image(path, 8, max_pixels=8_999_999)
    assert read_image(path, 8, max_pixels=9_000_000).shape == (3, 8, 8)
