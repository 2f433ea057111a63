"""Image files to tensors: decoded only as large as needed, cropped and resized.

A JPEG that is much larger than the result is decoded at a half, a quarter or an eighth of its size, at a fraction of the
cost. Everything is integer arithmetic: the same file, arguments and library versions give the same bits. Where torchcodec is
installed, it decodes whole JPEGs, to the same pixels as Pillow in less time. `encoded_image` and `decoded` leave the decoding,
cropping and resizing of JPEGs to a device.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError, features
from torch import Tensor
from torch.nn import functional as F

from runner.base.errors import UserError
from runner.base.reading import LARGEST_DATA, open_regular, read_regular
from runner.config.schema.sections import Data
from runner.data.bad_samples import Place
from runner.data.sources import bands
from runner.data.sources.bands import KEPT, SIXTEEN_BIT, Channels

# Raise it when the same file gives other pixels than before: caches of decoded images are then rebuilt.
DECODING = 2

Region = tuple[int, int, int, int]
"""Top, left, height and width of a part of an image, in pixels."""
Cut = Callable[[int, int], Region]
"""Gives the part to read of an image of a given height and width."""
Decode = Literal["auto", "pillow", "torchcodec", "device"]
"""What decodes JPEGs, see `data.decode`."""

_STRETCHED = {"L;2": 85, "L;4": 17}  # by which Pillow multiplies grey values of 2 and 4 bits
_ORIENTATION = 0x0112
# What turns an image upright, by the value of the Exif tag Orientation.
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
_FLIPPED = {2: (2,), 3: (1, 2), 4: (1,), 6: (2,), 7: (1, 2), 8: (1,)}  # axes, once one on its side is transposed
# Only decoders of pixels: Pillow goes by the content, whatever the name, and would hand PostScript to Ghostscript.
# It opens an MPO, which cameras with two lenses write, as a JPEG.
_AVIF = ("AVIF",) if "avif" in features.modules and features.check("avif") else ()
_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP", *_AVIF)
_REDUCIBLE = ("JPEG", "MPO")
_REDUCTIONS = (8, 4, 2)
_EXTENSIONS = {"JPEG": "jpg", "MPO": "jpg", "TIFF": "tif"}  # others are their own


def middle_square(height: int, width: int, share: float = 1.0) -> Region:
    """The square in the middle of an image, its edge the given share of the shorter side."""
    edge = max(1, round(share * min(height, width)))
    return (height - edge) // 2, (width - edge) // 2, edge, edge


@dataclass(frozen=True)
class Decoding:
    """The form of decoded images.

    Attributes:
        image_size: every image is cropped to its central square and resized (bilinear, antialiased) to this many pixels a side;
            None keeps the sizes.
        channels: 3 for RGB, 1 for grey; others keep those of the file, whatever their number, and its bits.
        crop_share: edge of that square as a share of the shorter side; 0.875 is the usual 224 pixels of 256.
        max_pixels: most pixels that a file may have.
        decode: pillow decodes all files with Pillow; torchcodec decodes whole JPEGs, those with torchcodec that need not be
            turned; auto and device let torchcodec decode those of which it gives the same pixels in less time, if installed.
        found: channels that every file must have if they are kept, and the dtype; None for any. Unlike the others, it does not
            change pixels.

    Raises `ValueError` if one is out of range, `UserError` if there is no torchcodec that `decode` asks for.
    """

    image_size: int | None = None
    channels: Channels = 3
    crop_share: float = 1.0
    max_pixels: int = Data.max_pixels
    decode: Decode = "auto"
    found: tuple[int, torch.dtype | None] | None = None

    def __post_init__(self) -> None:
        if self.image_size is not None and self.image_size < 1:
            raise ValueError(f"image_size must be at least 1, got {self.image_size}")
        if self.channels not in (1, 3, *KEPT):
            raise ValueError(f"channels must be auto or 1 to {bands.MOST_CHANNELS}, got {self.channels}")
        if not 0 < self.crop_share <= 1:
            raise ValueError(f"crop_share must be above 0 and at most 1, got {self.crop_share}")
        if self.decode == "torchcodec" and _torchcodec() is None:
            problem = "is torchcodec, which is not installed, is older than 0.16 or was built for another torch"
            raise UserError("data.decode", problem, "pip install 'runner[torchcodec]', or auto")

    def read(
        self,
        path: Path | str,
        content: bytes | Image.Image | None = None,
        size: int | None = None,
        cut: Cut = middle_square,
    ) -> Tensor:
        """Decode an image file: AVIF if Pillow has it, BMP, GIF, JPEG, PNG, PBM, PGM, PPM, TIFF or WebP, whatever its extension.

        The Exif orientation is applied, transparent pixels are composited over white, 16-bit greys are scaled to 8 bits, and
        palettes, CMYK and other colour spaces are converted. Of an animation, the first frame is read. If the channels are kept,
        transparency is one of them, and 16 bits are kept in PNGs and TIFFs, and grey PGMs.

        Args:
            path: the file.
            content: bytes of a file that is not on disk, or a Pillow image, which is not changed; `path` is its name in messages.
            size: edge of the square that the part is resized to (bilinear, antialiased); None for the whole image.
            cut: the part of the upright image to read; called once, ignored if `size` is None.

        Returns uint8 (channels, H, W), or float32 from 0 to 1 of 16 bits, contiguous. Raises `UserError`, which names the file, if
        it is missing, truncated, no image or too large, or has others than the `found` channels.
        """
        keeps = self.channels in KEPT
        if keeps and (kept := bands.unreduced(path, content, self.max_pixels)) is not None:
            planes = _turned(*kept)
            top, left, rows, columns = cut(*planes.shape[1:]) if size is not None else (0, 0, *planes.shape[1:])
            planes = bands.in_range(planes[:, top : top + rows, left : left + columns])
            image = resized(planes, (0, 0, rows, columns), size or (rows, columns))
        else:
            image = self._reduced(path, content, size, cut)
        if keeps:
            bands.check_kind(path, image, *(self.found or (self.channels, None)))
        return image

    def _reduced(self, path: Path | str, content: bytes | Image.Image | None, size: int | None, cut: Cut) -> Tensor:
        """The image as Pillow has it, by torchcodec where that gives the same."""
        with _opened(path, content, self.max_pixels) as opened:
            mode = bands.own_mode(opened) if self.channels in KEPT else "RGB" if self.channels == 3 else "L"
            if opened.format not in _REDUCIBLE:
                opened.load()
            turn, height, width = _upright(opened)
            region = cut(height, width) if size is not None else (0, 0, height, width)
            forced = self.decode == "torchcodec" and opened.format in _REDUCIBLE
            reduction = _reduce(opened, mode, region, None if forced else size)
            plain = reduction == 1 and turn not in _TURNS and opened.format == "JPEG" and opened.mode == mode == "RGB"
            # torchcodec turns an image by its own reading of the Exif orientation
            usable = turn == 1 if forced else plain and self.decode != "pillow"
            if usable and (whole := _by_torchcodec(opened.fp, "RGB" if mode == "RGB" else "GRAY")) is not None:
                return resized(whole, region, size or region[2:])
            opened.load()
            image = opened.transpose(_TURNS[turn]) if turn in _TURNS else opened
            top, left, rows, columns = _scaled(region, reduction, image.height, image.width)
            if image.size != (columns, rows):
                image = image.crop((left, top, left + columns, top + rows))
            pixels = torch.from_numpy(np.array(bands.as_mode(image, mode)))
        planes = bands.in_range(pixels.permute(2, 0, 1) if pixels.ndim == 3 else pixels.unsqueeze(0))
        return resized(planes, (0, 0, rows, columns), size or (rows, columns))

    def state(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """All that the pixels depend on besides the bytes of a file: settings, and versions of libraries."""
        libraries = torch.__version__, features.version("pil"), features.version("jpg")
        # All others give the same pixels on the host, and share caches
        forced = ("torchcodec", importlib.metadata.version("torchcodec")) if self.decode == "torchcodec" else ()
        return (DECODING, self.image_size, self.channels, self.crop_share, self.max_pixels, *forced), libraries


@dataclass(frozen=True)
class Encoded:
    """A JPEG of three colours that is not decoded yet, and the part of it that becomes the image, see `decoded`.

    Attributes:
        content: the file.
        turn: its Exif orientation.
        region: the part of the upright image.
        shape, dtype: of what it is resized to, (3, H, W).
    """

    content: bytes
    turn: int
    region: Region
    shape: tuple[int, int, int]
    dtype = torch.uint8


def encoded_image(
    path: Path | str, content: bytes | None, decoding: Decoding, image_size: int | None, cut: Cut
) -> Encoded | None:
    """A JPEG as `Decoding.read` would decode it; None for files that a device need not decode to the same image, or not at all.

    Raises `UserError` as `Decoding.read`; `cut` is not called for None.
    """
    with _opened(path, content, decoding.max_pixels) as opened:
        colours = (opened.format, opened.mode, decoding.channels) == ("JPEG", "RGB", 3)
        if not colours or opened.info.get("adobe_transform") == 0:  # a device would take this RGB for YCbCr
            return None
        opened.fp.seek(0)
        whole = opened.fp.read()
        if not whole.endswith(b"\xff\xd9"):  # a device need not notice that the end of a file is missing
            return None
        turn, height, width = _upright(opened)
        region = cut(height, width) if image_size is not None else (0, 0, height, width)
        size = region[2:] if image_size is None else (image_size, image_size)
        return Encoded(whole, turn, region, (3, *size))


def decoded(images: Sequence[Encoded], device: torch.device) -> list[Tensor | None]:
    """The images, uint8 (3, height, width) on the device, by nvJPEG on CUDA; None for those that it cannot decode.

    The pixels of an image do not depend on the others.
    """
    from torchvision.io import decode_jpeg  # takes a second, and few runs need it

    contents = [torch.frombuffer(bytearray(image.content), dtype=torch.uint8) for image in images]
    try:
        every = decode_jpeg(contents, mode="RGB", device=device)
        return [_part(image, whole) for image, whole in zip(images, every, strict=True)]
    except torch.cuda.OutOfMemoryError:
        raise
    except RuntimeError:  # of one of them, whichever; CUDA also refuses to make an image very much smaller
        return [None] if len(images) == 1 else [each for image in images for each in decoded([image], device)]


def _part(image: Encoded, whole: Tensor) -> Tensor:
    upright = _turned(whole, image.turn)
    top, left, rows, columns = image.region
    part = upright[:, top : top + rows, left : left + columns].float()  # CUDA resizes no bytes
    return resized(part, (0, 0, rows, columns), image.shape[1:]).round_().to(torch.uint8)


def _turned(whole: Tensor, turn: int) -> Tensor:
    upright = whole.transpose(1, 2) if turn in _ON_ITS_SIDE else whole
    return upright.flip(_FLIPPED[turn]) if turn in _FLIPPED else upright


def read_mask(path: Path | str, *, max_pixels: int = Data.max_pixels, content: bytes | None = None) -> Tensor:
    """Decode a file with a number for each pixel: the grey value, or the place in the palette; see `Decoding.read`.

    Returns (H, W), uint8, or int32 if the file has 16 bits. Raises `UserError` as `Decoding.read` does, for colours without a
    palette, and for PPM files.
    """
    with _opened(path, content, max_pixels, "mask") as opened:
        if opened.mode not in ("1", "L", "P", *SIXTEEN_BIT):
            kind = f"its pixels are colours ({opened.mode}) without a palette"
            raise ValueError(f"{kind}, and a grey image or one with a palette, of class numbers, is expected")
        if opened.format in ("PPM", *_REDUCIBLE):  # Pillow stretches grey values to 255, and JPEG changes them
            problem = f"the mask {path} is a {opened.format} file, which does not keep class numbers"
            allowed = "PNG, BMP, GIF or TIFF; export the masks again, as a converted JPEG has wrong numbers"
            raise UserError("data.root", problem, allowed)
        layout = opened.tile[0][3] if opened.tile else None
        stretch = _STRETCHED.get(layout if isinstance(layout, str) else "", 1)
        values = np.array(opened)
        kept = np.int32 if opened.mode in SIXTEEN_BIT else np.uint8
        return torch.from_numpy((values // stretch if stretch > 1 else values).astype(kept))


def smaller_file(
    path: Path | str, content: bytes | None, max_side: int | None, quality: int, *, max_pixels: int = Data.max_pixels
) -> tuple[str, bytes]:
    """The extension and the bytes of an image file: its own, unless it is too large.

    Args:
        path, content, max_pixels: see `Decoding`.
        max_side: most pixels of the longer side. Larger images are resized (Lanczos), with their aspect ratio, and encoded as
            JPEG, upright and without metadata; transparent pixels become white. None keeps every file.
        quality: of the JPEG, 1 to 95.

    Raises `UserError`, which names the file, if it is missing, no image or too large; truncated ones are only found if they
    are resized.
    """
    with _opened(path, content, max_pixels) as opened:
        kind = str(opened.format)
        if max_side is None or max(opened.size) <= max_side:
            extension = _EXTENSIONS.get(kind, kind.lower())
            return extension, read_regular(Path(path), LARGEST_DATA) if content is None else content
        if kind not in _REDUCIBLE:  # Pillow turns a TIFF when it loads it, and says so only then
            opened.load()
        turn, grey = _orientation(opened), opened.mode in ("1", "L", "F", *SIXTEEN_BIT)
        image = bands.as_mode(opened, "L" if grey else "RGB")
        image.thumbnail((max_side, max_side), Image.Resampling.LANCZOS)  # large JPEGs are reduced while decoding
        image = image.transpose(_TURNS[turn]) if turn in _TURNS else image
        image.info.clear()
        image.save(encoded := io.BytesIO(), "JPEG", quality=quality)
        return "jpg", encoded.getvalue()


@contextlib.contextmanager
def _opened(
    path: Path | str, content: bytes | Image.Image | None, max_pixels: int, kind: str = "image"
) -> Iterator[Any]:
    """An image that is not decoded yet, or a copy of one in memory, as decoding at a fraction of the size changes it.

    Errors in the block, such as of decoding, become a `UserError`, which names the file.
    """
    with Place(f"the {kind} {path}"), contextlib.ExitStack() as files:
        if isinstance(content, Image.Image):
            opened: Any = content.copy()
        else:
            file: Any = files.enter_context(open_regular(path) if content is None else io.BytesIO(content))
            try:
                opened = files.enter_context(Image.open(file, formats=_FORMATS))
            except UnidentifiedImageError as error:
                if kind != "image" or not str(path).lower().endswith((".tif", ".tiff")):
                    raise
                raise ValueError("Pillow reads no such TIFF; data.dataset.channels=auto keeps its bands") from error
        bands.check_size(path, opened.size, max_pixels)
        yield opened


def upright_size(path: Path | str, max_pixels: int = Data.max_pixels) -> tuple[int, int]:
    """Height and width of the image of a file, as `Decoding.read` gives it, with its errors; only the head of the file is read."""
    with _opened(path, None, max_pixels) as opened:
        return _upright(opened)[1:]


def resized(image: Tensor, region: Region, size: int | tuple[int, int]) -> Tensor:
    """Crop a part of an image (C, H, W), uint8 or float, and resize it (bilinear, antialiased).

    Returns (C, height, width) of the same dtype, contiguous; a `size` of one number is a square.
    """
    size = (size, size) if isinstance(size, int) else size
    top, left, height, width = region
    part = image[:, top : top + height, left : left + width]
    if (height, width) != size:
        part = F.interpolate(part[None], size=size, mode="bilinear", antialias=True)[0]
    return part.contiguous()


def _orientation(image: Image.Image) -> int:
    """The number in the metadata, 1 without one; 0 if it cannot be read."""
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # damaged metadata do not make the image unusable
        return 0


def _upright(opened: Any) -> tuple[int, int, int]:
    """The orientation, and the height and width of the upright image."""
    turn, (width, height) = _orientation(opened), opened.size
    return (turn, width, height) if turn in _ON_ITS_SIDE else (turn, height, width)


def _reduce(opened: Any, mode: str, region: Region, image_size: int | None) -> int:
    """Ask a JPEG decoder for a smaller image, and return the factor."""
    if opened.format not in _REDUCIBLE:
        return 1
    edge, (width, height) = min(region[2:]), opened.size
    reduction = 1 if image_size is None else next((each for each in _REDUCTIONS if edge >= each * image_size), 1)
    # Pillow takes the strongest reduction that leaves at least this size, which is the chosen one.
    opened.draft(mode, (max(1, width // reduction), max(1, height // reduction)))
    return reduction


def _by_torchcodec(file: Any, mode: Literal["RGB", "GRAY"]) -> Tensor | None:
    """The pixels of a JPEG (C, H, W), or None without torchcodec and if it fails: then Pillow fails too, and says why."""
    if (decode := _torchcodec()) is None:
        return None
    file.seek(0)
    try:
        pixels: Tensor = decode(file.read(), mode=mode)
    except RuntimeError:
        return None
    return pixels


@functools.cache
def _torchcodec() -> Any:
    """torchcodec's decoder of JPEGs; None where it is absent, too old to have one, or made for another torch."""
    try:
        from torchcodec.decoders import decode_jpeg
    except (ImportError, OSError, RuntimeError):
        return None
    return decode_jpeg


def _scaled(region: Region, reduction: int, height: int, width: int) -> Region:
    """The same part of an image that was decoded at a fraction of its size."""
    if reduction == 1:
        return region
    top, left, rows, columns = (round(number / reduction) for number in region)
    rows, columns = min(rows, height), min(columns, width)
    return min(top, height - rows), min(left, width - columns), rows, columns
