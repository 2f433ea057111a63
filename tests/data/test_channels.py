"""Image files of any number of channels, of 8 and 16 bits, from the file to a prediction."""

from __future__ import annotations

import importlib.util
import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from extras import needs, optional
from image_reader import read_image
from PIL import Image
from read_splits import read_words

import runner
from runner.base.errors import UserError
from runner.data.sources.digits import digits

pytestmark = pytest.mark.filterwarnings("ignore:The image decoding:DeprecationWarning")
tifffile = optional("tifffile")
WORDS = (
    "data=image_folder", "data.root=photos", "data.dataset.channels=auto", "data.normalize.mean=null", "data.normalize.std=null",
    "data.image_size=8", "data.num_workers=0", "data.batch_size=4", "model=small_cnn", "model.width=4", "transform=none",
    "device=cpu", "threads=1", "log.curves=false", "epochs=2",
)  # fmt: skip


def picture(number: int, channels: int, kind: type = np.uint8) -> np.ndarray:
    """A digit (8, 8, channels) of other brightness in each channel, over noise of all bits."""
    noise = np.random.default_rng(number).integers(0, 16, (8, 8, channels)) / 16
    shades = digits()["train"].images[number, 0].numpy()[..., None] / 255 * np.linspace(0.3, 0.9, channels)
    return (np.iinfo(kind).max * (shades * 0.9 + noise * 0.1)).astype(kind)


def png16(path: Path, pixels: np.ndarray) -> None:
    """A PNG of 16 bits, which Pillow writes of grey images alone."""

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    height, width, channels = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 16, {2: 4, 3: 2, 4: 6}[channels], 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    content = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + content)


def tiff(path: Path, pixels: np.ndarray, **options: Any) -> None:
    tifffile.imwrite(path, pixels, photometric="minisblack", **{"planarconfig": "contig"} | options)


def pillow(path: Path, pixels: np.ndarray) -> None:
    Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).save(path)


KINDS: dict[str, tuple[int, type, str, Callable[[Path, np.ndarray], None]]] = {
    "rgba": (4, np.uint8, "png", pillow),
    "grey16": (1, np.uint16, "png", pillow),
    "bands8": (7, np.uint8, "tif", tiff),
    "bands16": (7, np.uint16, "tif", tiff),
}
EXTENDED = pytest.mark.extended
EVERY = [
    pytest.param("rgba", marks=EXTENDED),
    "grey16",
    pytest.param("bands8", marks=[needs("tiff"), EXTENDED]),
    pytest.param("bands16", marks=needs("tiff")),
]


def folder(kind: str, count: int = 16) -> None:
    """Files of a kind, of two classes."""
    channels, dtype, ending, write = KINDS[kind]
    for number in range(count):
        path = Path("photos", "train" if number < count * 3 // 4 else "val", "ab"[number % 2], f"{number}.{ending}")
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, picture(number, channels, dtype))


@pytest.mark.parametrize("kind", EVERY)
def test_a_resumed_run_and_predictions_of_files_agree_with_those_of_a_whole_run(
    workdir: Path, accepted: Any, stopped: Any, kind: str
) -> None:
    folder(kind)
    whole = accepted("train", *WORDS, "data.cache=disk")
    state = whole.last["model"]
    assert next(value for value in state.values() if value.ndim == 4).shape[1] == KINDS[kind][0]
    half = stopped(4, *WORDS).directory
    resumed = accepted("train", f"ckpt_path={half}", "callbacks=none", "data.num_workers=2").last["model"]
    assert all(torch.equal(state[name], value) for name, value in resumed.items())
    call = ("predict", f"ckpt_path={whole.directory}", "data.num_workers=0", "top_k=2", "probabilities=true")
    said = []
    for source in ("val", "photos/val"):
        accepted(*call, f"input={source}", "output=said.csv")
        said.append([line.split(",")[-2:] for line in Path("said.csv").read_text().splitlines()])
    assert said[0] == said[1]


@needs("export")
@pytest.mark.parametrize("kind", [pytest.param("rgba", marks=EXTENDED), "grey16"])
def test_an_exported_model_gives_what_the_model_gives(workdir: Path, train: Any, json_of: Any, kind: str) -> None:
    folder(kind)
    directory = train(*WORDS, "max_steps=1").directory
    record = json_of("export", f"ckpt_path={directory}", "format=onnx")
    assert record["input"]["shape"] == ["batch", KINDS[kind][0], 8, 8]
    assert all(row["max_rel"] <= 1e-5 for row in record["comparison"])


def test_the_channels_and_bits_of_a_file_are_kept(tmp_path: Path) -> None:
    for kind, (channels, dtype, ending, write) in KINDS.items():
        if write is tiff and tifffile is None:
            continue
        path, pixels = tmp_path / f"{kind}.{ending}", picture(3, channels, dtype)
        write(path, pixels)
        wanted = torch.from_numpy(pixels.transpose(2, 0, 1).astype(np.float32) / np.float32(65535))
        image = read_image(path, None, "auto")
        assert torch.equal(image, wanted if dtype is np.uint16 else torch.from_numpy(pixels.transpose(2, 0, 1)))
        assert read_image(path, 4, "auto").shape == (channels, 4, 4)
    for channels in (2, 3, 4):
        png16(tmp_path / "colours.png", picture(3, channels, np.uint16))
        pixels = read_image(tmp_path / "colours.png", None, "auto").mul(65535).round().numpy()
        assert np.array_equal(pixels.transpose(1, 2, 0), picture(3, channels, np.uint16))


@needs("tiff")
@pytest.mark.parametrize("planes", ["contig", "separate"])
def test_tiffs_interleaved_or_in_planes_are_turned_upright_and_cut(tmp_path: Path, planes: str) -> None:
    pixels = np.arange(7 * 5 * 9, dtype=np.uint16).reshape(5, 9, 7) * 199
    given = pixels if planes == "contig" else pixels.transpose(2, 0, 1)
    tiff(tmp_path / "bands.tif", given, planarconfig=planes, compression="zlib", extratags=[(274, "H", 1, 6, True)])
    image = read_image(tmp_path / "bands.tif", None, "auto")
    upright = np.rot90(pixels, -1).transpose(2, 0, 1)
    assert np.array_equal(image.mul(65535).round().numpy(), upright)
    part = read_image(tmp_path / "bands.tif", 2, 7, lambda height, width: (1, 2, 2, 2))
    assert torch.equal(part, image[:, 1:3, 2:4])


@needs("tiff")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"data": np.zeros((4, 4), np.float32)}, "MINISBLACK of float32"),
        ({"data": np.zeros((4, 4), bool)}, "of bool with 1 bits"),
        (
            {"data": np.zeros((4, 4, 17), np.uint8), "planarconfig": "contig", "photometric": "minisblack"},
            "1 to 16 channels",
        ),
        (
            {"data": np.zeros((4, 4), np.uint8), "photometric": "palette", "colormap": np.zeros((3, 256), np.uint16)},
            "PALETTE",
        ),
        ({"data": np.zeros((90, 90), np.uint8)}, "90 x 90 = 8,100 pixels, and data.max_pixels=8000"),
    ],
)
def test_other_tiffs_are_refused_with_their_name(tmp_path: Path, options: dict[str, Any], reason: str) -> None:
    tifffile.imwrite(tmp_path / "other.tif", **options)
    with pytest.raises(UserError, match=f"other.tif: .*{reason}"):
        read_image(tmp_path / "other.tif", None, "auto", max_pixels=8000)


def test_a_damaged_png_of_16_bit_colours_is_refused_and_does_not_end_the_process(tmp_path: Path) -> None:
    path = tmp_path / "damaged.png"
    png16(path, picture(3, 3, np.uint16))
    whole = path.read_bytes()
    middle, adler = len(whole) // 2, len(whole) - 17  # which precedes a checksum and the last chunk
    for at in (middle, adler):
        broken = whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :]
        path.write_bytes(broken)
        with pytest.raises(UserError, match=r"damaged.png"):
            read_image(path, None, "auto")
        start = 33 + 8  # of the content of the chunk of pixels, after the header
        path.write_bytes(broken[:-16] + struct.pack(">I", zlib.crc32(broken[start - 4 : -16])) + broken[-12:])
        with pytest.raises(UserError, match=r"damaged.png"):
            read_image(path, None, "auto")
    for end in (40, middle, len(whole) - 13):
        path.write_bytes(whole[:end])
        with pytest.raises(UserError, match=r"damaged.png"):
            read_image(path, None, "auto")


@needs("tiff")
def test_the_key_that_keeps_bands_is_named_for_a_tiff_that_pillow_cannot_read(tmp_path: Path) -> None:
    tiff(tmp_path / "bands.tif", picture(0, 7, np.uint16))
    with pytest.raises(UserError, match=r"bands.tif: .*data.dataset.channels=auto"):
        read_image(tmp_path / "bands.tif", None, 3)


@needs("tiff")
def test_a_tiff_without_a_known_kind_of_pixels_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.tif").write_bytes(b"II*\0\x08" + bytes(9))
    with pytest.raises(UserError, match=r"empty.tif: its pixels are 0 of None"):
        read_image(tmp_path / "empty.tif", None, "auto")


def test_palettes_and_modes_of_pillow_become_channels_of_8_bits(tmp_path: Path) -> None:
    image = Image.fromarray(picture(0, 3))
    for name, channels in (("P", 3), ("CMYK", 3), ("1", 1), ("LA", 2)):
        assert read_image("in memory", None, "auto", content=image.convert(name)).shape == (channels, 8, 8)
    with pytest.raises(UserError, match="32-bit numbers"):
        read_image("in memory", None, "auto", content=Image.fromarray(np.full((4, 4), 1e6, np.float32)))


@pytest.mark.parametrize(
    ("odd", "own"), [(picture(5, 3), "3 channels of 8 bits"), (picture(5, 1, np.uint16), "1 channels of 16 bits")]
)
def test_an_image_of_another_kind_than_the_first_is_an_error_of_its_sample(
    workdir: Path, rejected: Any, compose: Any, odd: np.ndarray, own: str
) -> None:
    folder("rgba")
    pillow(Path("photos/train/b/5.png"), odd)
    error = rejected("train", *WORDS).err
    assert all(each in error for each in ("b/5.png", own, "4 channels of 8 bits", "data.on_error=skip"))
    splits = read_words(compose, *WORDS, "data.on_error=skip")
    assert {batch.images.shape[1] for batch in splits.train.loader.batches(0, 0, 3)} == {4}
    assert [*splits.bad_samples.reasons("train")] == [9]


def test_a_number_of_channels_is_that_of_the_files(workdir: Path, rejected: Any, compose: Any) -> None:
    folder("rgba")
    error = rejected("train", *WORDS, "data.dataset.channels=5").err
    assert all(each in error for each in ("0.png", "4 channels", "5 channels", "data.dataset.channels"))
    assert read_words(compose, *WORDS, "data.dataset.channels=4").channels == 4


def test_predictions_need_images_of_one_kind(workdir: Path, train: Any, accepted: Any) -> None:
    folder("grey16", 8)
    directory = train(*WORDS, "max_steps=1").directory
    first, odd = Path("photos/val/a/6.png"), Path("photos/val/b/7.png")
    pillow(odd, picture(7, 1))
    loaded = runner.load(directory)
    (row,) = loaded.predict([first])
    with pytest.raises(UserError, match=r"b/7.png.* of 8 bits.* of 16 bits"):
        loaded.predict([first, odd])
    words = "input=photos/val", "output=said.csv", "data.num_workers=0"
    assert "b/7.png" in accepted("predict", f"ckpt_path={directory}", *words).out
    lines = Path("said.csv").read_text().splitlines()
    assert [line.split(",")[:2] for line in lines[1:]] == [[str(row["path"]), row["prediction"]]]


def test_tifffile_is_named_where_it_is_not_installed(
    workdir: Path, rejected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder("rgba")
    for path in Path("photos").rglob("*.png"):
        Image.open(path).save(path.with_suffix(".tif"))
        path.unlink()
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, *rest: None if name == "tifffile" else find(name, *rest)
    )
    error = rejected("train", *WORDS).err
    assert "data.dataset.channels" in error
    assert "runner[tiff]" in error


@pytest.mark.parametrize("key", ["train", "sample_train"])
def test_colours_cannot_be_changed_where_there_are_not_three(workdir: Path, rejected: Any, key: str) -> None:
    folder("rgba")
    target = {"train": "runner.data.transforms.color_jitter", "sample_train": "torchvision.transforms.v2"}[key]
    error = rejected("train", *WORDS, f"transform.{key}=[{{_target_: {target}.ColorJitter, saturation: 0.4}}]").err
    assert f"transform.{key}" in error
    assert "4" in error


def test_16_bits_are_more_than_256_values_where_8_bits_were_before(workdir: Path, compose: Any) -> None:
    Path("photos/train/a").mkdir(parents=True)
    ramp = np.arange(64 * 64, dtype=np.uint16).reshape(64, 64, 1) * 16
    for number in range(8):
        pillow(Path(f"photos/train/a/{number}.png"), ramp)
    values = []
    for channels in ("auto", "1"):
        words = ("data.image_size=64", "data.split.val=0.25", f"data.dataset.channels={channels}")
        splits = read_words(compose, *WORDS, *words)
        batch = next(iter(splits.train.loader.batches(0, 0, 1)))
        values.append(len(batch.images[0].unique()))
        assert splits.mean == pytest.approx([0.5], abs=0.01)
    assert values == [4096, 256]


@pytest.mark.parametrize(
    "words",
    [
        ["model=torchvision", "model.name=resnet18"],
        pytest.param(["model=vit_tiny", "model.patch_size=4"], marks=EXTENDED),
        pytest.param(["model=resnet18_cifar", "model.width=4"], marks=EXTENDED),
        pytest.param(["model=timm", "model.name=resnet10t"], marks=[needs("timm"), EXTENDED]),
    ],
    ids=lambda words: words[0],
)
def test_models_take_the_channels_of_the_data(workdir: Path, train: Any, words: list[str]) -> None:
    folder("rgba", 8)
    base = [word for word in WORDS if not word.startswith("model")]
    state = train(*base, *words, "max_steps=1", "data.image_size=32").last["model"]
    assert next(value for value in state.values() if value.ndim == 4).shape[1] == 4


@needs("tiff")
def test_a_model_of_masks_takes_the_channels_of_the_files(workdir: Path, train: Any, accepted: Any) -> None:
    for number in range(8):
        for name in ("images", "masks"):
            Path("photos", name).mkdir(parents=True, exist_ok=True)
        tiff(Path(f"photos/images/{number}.tif"), picture(number, 7, np.uint16))
        pillow(Path(f"photos/masks/{number}.png"), (picture(number, 1) > 99).astype(np.uint8))
    words = (
        "experiment=segmentation", "data=segmentation_folder", "data.root=photos", "data.dataset.classes=[ink,paper]",
        "data.dataset.channels=auto", "data.num_workers=0", "data.batch_size=2", "data.normalize.mean=[0.5]",
        "data.normalize.std=[0.5]", "device=cpu", "max_steps=1", "data.split.val=0.25", "transform=none",
        "model=torchvision_segmentation", "model.name=lraspp_mobilenet_v3_large", "model.in_channels=null",
    )  # fmt: skip
    run = train(*words)
    assert run.last["model"]["backbone.0.0.weight"].shape[1] == 7
    tiff(Path("photos/images/7.tif"), picture(7, 7))
    accepted("predict", f"ckpt_path={run.directory}", "input=photos/images", "output=rows.jsonl", "data.num_workers=0")
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    assert [row["path"] for row in rows] == [f"photos/images/{number}.tif" for number in range(7)]


@needs("tiff")
def test_shards_keep_the_files(workdir: Path, train: Any, accepted: Any, rejected: Any) -> None:
    folder("bands16", 8)
    pack = ("pack", *WORDS[:3], "workers=1")
    accepted(*pack, "output=packed")
    contents = train("data=shards", "data.root=packed", *WORDS[2:], "max_steps=1").last
    assert contents["metrics"]["images"] == [7, 8, 8]
    assert "max_side" in rejected(*pack, "output=small", "max_side=4").err
