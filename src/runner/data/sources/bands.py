"""Pixels of image files with all their channels and bits: which ones Pillow keeps, and a reader of those that it would reduce."""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from runner.base.errors import UserError, require
from runner.base.reading import open_regular
from runner.data.bad_samples import Place

Channels = int | Literal["auto"]
"""1 and 3 convert images to grey and RGB of 8 bits; "auto" and others keep the channels and bits of a file."""
MOST_CHANNELS = 16
KEPT = ("auto", 2, *range(4, MOST_CHANNELS + 1))
"""The `Channels` that images keep."""
SIXTEEN_BIT = ("I;16", "I;16L", "I;16B", "I;16N", "I")
_WHITE = 65535  # of 16 bits
_BITS = {torch.uint8: " of 8 bits", torch.float32: " of 16 bits", None: ""}
_FIRST_TO = {"LAB": "RGB", "La": "LA"}  # Pillow converts these to nothing else
_TIFF = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_PNG, _GREY = b"\x89PNG\r\n\x1a\n", 0
_ORDERS = {"YX": (0, 1), "YXS": (2, 0, 1), "SYX": (0, 1, 2)}  # of the axes of an array, to have channels first


def own_mode(image: Image.Image) -> str:
    """The mode that keeps the channels and bits of an image: L, LA, RGB, RGBA, or I;16; palettes and others become RGB or RGBA."""
    if image.mode in ("L", "LA", "RGB", "RGBA"):
        return image.mode
    if image.mode in (*SIXTEEN_BIT, "F"):
        return "I;16"
    return "RGBA" if image.has_transparency_data else "L" if image.mode == "1" else "RGB"


def as_mode(image: Image.Image, mode: str) -> Image.Image:
    """The image in a mode; raises `ValueError` if it has 32 bits."""
    image = image.convert(_FIRST_TO[image.mode]) if image.mode in _FIRST_TO else image
    if image.mode in SIXTEEN_BIT or image.mode == "F":
        values = np.asarray(image)
        if values.dtype.kind == "f" or values.min() < 0 or values.max() > _WHITE:
            problem = "its pixels are 32-bit numbers, whose black and white are unknown"
            raise ValueError(f"{problem}; save it with 8 or 16 bits")
        if mode == "I;16":
            return Image.fromarray(values.astype(np.uint16))
        # Pillow's own conversion would clip 16-bit greys at 255
        image = Image.fromarray(((values.astype(np.uint32) + 128) // 257).astype(np.uint8))
    elif image.has_transparency_data and mode in ("RGB", "L"):
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == mode else image.convert(mode)


def in_range(planes: Tensor) -> Tensor:
    """Pixels of 16 bits as float32 from 0 to 1, which torch can compute with; of 8 bits as they are."""
    return planes.float().div_(_WHITE) if planes.dtype == torch.uint16 else planes


def unreduced(path: Path | str, content: bytes | Image.Image | None, max_pixels: int) -> tuple[Tensor, int] | None:
    """The pixels of a TIFF, or of a PNG with 16-bit colours, and the Exif orientation; None for files that Pillow does not reduce.

    Pixels are (C, H, W), uint8 or uint16. Raises `UserError`, which names the file, if it is damaged, too large or of another kind
    of numbers, or tifffile is not installed.
    """
    if isinstance(content, Image.Image):
        return None
    with Place(f"the image {path}"), open_regular(path) if content is None else io.BytesIO(content) as file:
        head = file.read(26)
        file.seek(0)
        if head[:4] in _TIFF:
            return _tiff(path, file, max_pixels)
        if head[:8] != _PNG or len(head) < 26 or head[24] != 16 or head[25] == _GREY:
            return None
        from torchvision.io import ImageReadMode, decode_image  # takes a second, and few files need it

        check_size(path, struct.unpack(">II", head[16:24]), max_pixels)
        whole = file.read()
        for check in ("verify", "load"):  # torchvision ends the process for a damaged file, which Pillow reports
            with Image.open(io.BytesIO(whole), formats=["PNG"]) as opened:
                getattr(opened, check)()
        encoded = torch.frombuffer(bytearray(whole), dtype=torch.uint8)
        return decode_image(encoded, ImageReadMode.UNCHANGED, apply_exif_orientation=True), 1


def _tiff(path: Path | str, file: IO[bytes], max_pixels: int) -> tuple[Tensor, int]:
    """The first page."""
    require("data.dataset.channels", "runner[tiff]", "tifffile", otherwise=", or 3 or 1 for RGB or grey by Pillow")
    from tifffile import TiffFile

    with TiffFile(file, name=str(path)) as opened:  # its own name is a number
        page: Any = opened.pages[0]
        check_size(path, (page.imagewidth, page.imagelength), max_pixels)
        colours, kind, bits = getattr(page.photometric, "name", page.photometric), str(page.dtype), page.bitspersample
        # Numbers of 4 or 12 bits are in wider ones
        if kind != f"uint{bits}" or bits not in (8, 16) or colours not in ("MINISBLACK", "RGB"):
            problem = f"its pixels are {colours} of {kind} with {bits} bits"
            raise ValueError(f"{problem}; save it as grey or RGB of 8 or 16 bits")
        if page.axes not in _ORDERS or page.samplesperpixel > MOST_CHANNELS:
            problem = f"its axes are {page.axes} of {page.shape}"
            raise ValueError(f"{problem}, and an image has 1 to {MOST_CHANNELS} channels")
        pixels, turn = page.asarray(maxworkers=1), page.tags.get("Orientation")
    planes = torch.from_numpy(pixels.astype(kind, copy=False).transpose(_ORDERS[page.axes]).copy())
    return planes.view(-1, *planes.shape[-2:]), 1 if turn is None else int(turn.value)


def check_size(path: Path | str, size: tuple[int, ...], max_pixels: int) -> None:
    """Raise `UserError` for too many pixels, before decoding: a file of a few hundred kB can take gigabytes of memory."""
    width, height = size
    if width * height > max_pixels:
        pixels = f"{width:,} x {height:,} = {width * height:,} pixels, and data.max_pixels={max_pixels}"
        allowed = "a larger data.max_pixels, a smaller image, or data.on_error=skip"
        raise UserError("", f"cannot read the image {path}: it has {pixels}", allowed)


def check_kind(path: Path | str, image: Tensor, count: Channels, dtype: torch.dtype | None) -> None:
    """Raise `UserError` if an image (C, H, W) has other channels or bits than the others; "auto" and None are any."""
    if count not in ("auto", len(image)) or dtype not in (None, image.dtype):
        kinds = (len(image), image.dtype), (len(image) if count == "auto" else count, dtype)
        own, others = (f"{many} channels{_BITS[kind]}" for many, kind in kinds)
        problem = f"it has {own}, and the first image, or data.dataset.channels, says {others}"
        raise UserError("", f"cannot read the image {path}: {problem}")
