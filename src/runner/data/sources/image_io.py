"""Image files to tensors: decoded only as large as is needed, cut and resized.

A JPEG that is much larger than what is wanted is decoded at a half, a quarter or an eighth of its size, which its format
allows at a fraction of the cost. Everything here is integer arithmetic on one file: the same file, arguments and library
versions give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image, features
from torch import Tensor
from torch.nn import functional as F

from runner.config.errors import UserError
from runner.config.reading import open_regular
from runner.config.schema.sections import Data

# Raise it when the same file comes out as other pixels than before: caches of decoded images are then made anew.
DECODING = 2

Region = tuple[int, int, int, int]
"""Top, left, height and width of a part of an image, in pixels."""
Cut = Callable[[int, int], Region]
"""Which part of an image of a given height and width is wanted."""

_SIXTEEN_BIT = ("I;16", "I;16L", "I;16B", "I;16N", "I")
_ORIENTATION = 0x0112
# What turns a picture upright, by the number that the camera noted (Exif 2.3, tag Orientation).
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ON_ITS_SIDE = (5, 6, 7, 8)
# Only decoders of pixels: Pillow would go by the content, whatever the name, and hand PostScript to Ghostscript.
# An MPO, which cameras with two lenses write, is opened as a JPEG.
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
_REDUCIBLE = ("JPEG", "MPO")
_REDUCTIONS = (8, 4, 2)


def middle_square(height: int, width: int, share: float = 1.0) -> Region:
    """The square in the middle of an image, its edge the given share of the shorter side."""
    edge = max(1, round(share * min(height, width)))
    return (height - edge) // 2, (width - edge) // 2, edge, edge


def read_image(
    path: Path,
    image_size: int | None,
    channels: Literal[1, 3] = 3,
    cut: Cut = middle_square,
    max_pixels: int = Data.max_pixels,
) -> Tensor:
    """Decode an image file: BMP, GIF, JPEG, PNG, PBM, PGM, PPM, TIFF or WebP, whatever its name ends in.

    The orientation that the camera noted is applied, transparent pixels are laid over white, 16-bit greys are scaled
    to 8 bits, and palettes, CMYK and other colour spaces are converted. Of an animation it is the first frame.

    Args:
        path: the file.
        image_size: edge of the square that the part is resized to (bilinear, antialiased), or None for the whole image
            as it is.
        channels: 3 for RGB, 1 for grey.
        cut: the part that is wanted of the upright image; called once, and without effect if `image_size` is None.
        max_pixels: most pixels that the file may have.

    Returns:
        uint8 (channels, H, W), contiguous.

    Raises:
        UserError: if the file is missing, truncated, no image or too large; it names the file.
    """
    mode: Literal["RGB", "L"] = "RGB" if channels == 3 else "L"
    try:
        with open_regular(path) as file, Image.open(file, formats=_FORMATS) as opened:
            _require_few(path, opened.size, max_pixels)
            if opened.format not in _REDUCIBLE:
                opened.load()
            turn = _orientation(opened)
            width, height = opened.size[::-1] if turn in _ON_ITS_SIDE else opened.size
            region = cut(height, width) if image_size is not None else (0, 0, height, width)
            reduction = _reduce(opened, mode, region, image_size)
            opened.load()
            image = opened.transpose(_TURNS[turn]) if turn in _TURNS else opened
            image = _as_mode(_cropped(image, _scaled(region, reduction, image.height, image.width)), mode)
            pixels = torch.from_numpy(np.array(image))
    except (MemoryError, UserError):
        raise
    except Exception as error:  # Pillow's decoders raise a dozen kinds for damaged files, SyntaxError among them.
        said = (getattr(error, "strerror", None) or "").lower() or str(error)
        reason = " ".join(said.split()) or type(error).__name__
        raise UserError(f"cannot read the image {path}: {reason}. Replace it or delete it.") from error
    planes = pixels.permute(2, 0, 1) if channels == 3 else pixels.unsqueeze(0)
    whole = (0, 0, image.height, image.width)
    return planes.contiguous() if image_size is None else resized(planes, whole, image_size)


def reading_steps(image_size: int | None, channels: Literal[1, 3], share: float) -> list[dict[str, Any]]:
    """What `read_image` does with the middle square of an image, as data for programs that do the same without it.

    The steps are in order. Formulas are Python's, with its `round` (half to even) and `//`.
    """
    mode = "RGB" if channels == 3 else "L"
    steps: list[dict[str, Any]] = [
        {
            "step": "open",
            "library": "Pillow",
            "versions": {"pillow": features.version("pil"), "libjpeg": features.version("jpg")},
            "formats": list(_FORMATS),
            "frame": 0,
        },
        {
            "step": "measure",
            "exif_tag": _ORIENTATION,
            "swap_sides_for": list(_ON_ITS_SIDE),
            "gives": "height and width of the upright image, before it is reduced",
        },
    ]
    if image_size is not None:
        edge = f"max(1, round({share!r} * min(height, width)))"
        steps.append(
            {
                "step": "region",
                "edge": edge,
                "top": "(height - edge) // 2",
                "left": "(width - edge) // 2",
                "gives": "the part of the upright image that is used",
            }
        )
    steps += [
        {
            "step": "draft",
            "formats": list(_REDUCIBLE),
            "mode": mode,
            "reductions": [] if image_size is None else list(_REDUCTIONS),
            "smallest_edge": image_size,
            "rule": (
                "reduction is the first of the reductions with edge >= reduction * smallest_edge, else 1; "
                "Image.draft(mode, (max(1, width // reduction), max(1, height // reduction))) "
                "with the sides as they are stored"
            ),
        },
        {
            "step": "turn",
            "exif_tag": _ORIENTATION,
            "transpose": {str(number): turn.name for number, turn in _TURNS.items()},
        },
    ]
    if image_size is not None:
        steps.append(
            {
                "step": "crop",
                "rule": (
                    "if reduction is above 1: top, left and edge are round(number / reduction), rows = min(edge, height), "
                    "columns = min(edge, width), top = min(top, height - rows) and left = min(left, width - columns), "
                    "with the sides of the reduced image"
                ),
            }
        )
    steps.append(
        {
            "step": "convert",
            "mode": mode,
            "sixteen_bit_grey": {"modes": list(_SIXTEEN_BIT), "value": "(value + 128) // 257"},
            "transparent": "over white: Image.alpha_composite in RGBA",
            "others": "Image.convert(mode), CMYK and palettes among them",
        }
    )
    return steps if image_size is None else [*steps, resize_step(image_size, image_size)]


def resize_step(height: int, width: int) -> dict[str, Any]:
    """How `resized` resizes, see `reading_steps`."""
    return {
        "step": "resize",
        "height": height,
        "width": width,
        "filter": "bilinear",
        "antialias": True,
        "dtype": "uint8",
        "same_as": "Pillow's Image.resize with Image.Resampling.BILINEAR, to one level of 255",
    }


def resized(image: Tensor, region: Region, size: int) -> Tensor:
    """Cut a part out of an image and resize it to a square (bilinear, antialiased).

    Args:
        image: (C, H, W), uint8 or float.
        region: the part, inside the image.
        size: edge of the square in pixels.

    Returns:
        (C, size, size) of the same dtype, contiguous.
    """
    top, left, height, width = region
    part = image[:, top : top + height, left : left + width]
    if (height, width) != (size, size):
        part = F.interpolate(part[None], size=(size, size), mode="bilinear", antialias=True)[0]
    return part.contiguous()


def _require_few(path: Path, size: tuple[int, int], most: int) -> None:
    """Refuse an image before it is decoded: a file of a few hundred kB can take gigabytes of memory."""
    width, height = size
    if width * height > most:
        raise UserError(
            f"cannot read the image {path}: it has {width:,} x {height:,} = {width * height:,} pixels, and "
            f"data.max_pixels={most}\n    allowed: a larger data.max_pixels, a smaller image, or data.on_error=skip"
        )


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # Damaged notes of the camera do not make the picture unusable.
        return 1


def _reduce(opened: Any, mode: Literal["RGB", "L"], region: Region, image_size: int | None) -> int:
    """Tell a JPEG decoder what is needed of the image, and return by how much it will shrink it."""
    if opened.format not in _REDUCIBLE:
        return 1
    reduction = 1
    if image_size is not None:
        reduction = next((number for number in _REDUCTIONS if min(region[2:]) >= number * image_size), 1)
    width, height = opened.size
    # Pillow takes the strongest reduction that leaves at least this size, which is the one we chose.
    opened.draft(mode, (max(1, width // reduction), max(1, height // reduction)))
    return reduction


def _scaled(region: Region, reduction: int, height: int, width: int) -> Region:
    """The same part of an image that was decoded at a fraction of its size."""
    if reduction == 1:
        return region
    top, left, rows, columns = (round(number / reduction) for number in region)
    rows, columns = min(rows, height), min(columns, width)
    return min(top, height - rows), min(left, width - columns), rows, columns


def _cropped(image: Image.Image, region: Region) -> Image.Image:
    top, left, height, width = region
    return image if image.size == (width, height) else image.crop((left, top, left + width, top + height))


def _as_mode(image: Image.Image, mode: Literal["RGB", "L"]) -> Image.Image:
    if image.mode in _SIXTEEN_BIT or image.mode == "F":
        image = Image.fromarray(_eight_bit(np.asarray(image)))
    elif image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == mode else image.convert(mode)


def _eight_bit(values: np.ndarray) -> np.ndarray:
    """Scale 16-bit greys to 8 bits; Pillow's own conversion would cut them off at 255."""
    if values.dtype.kind == "f" or values.min() < 0 or values.max() > 65535:
        raise ValueError("its pixels are 32-bit numbers, whose black and white are unknown; save it with 8 or 16 bits")
    return ((values.astype(np.uint32) + 128) // 257).astype(np.uint8)
