"""Images on disk, one folder for each class, decoded when they are asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import Dataset

from runner.config.errors import UserError

EXTENSIONS = frozenset(
    (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm", ".pbm", ".pnm")
)
_SIXTEEN_BIT = ("I;16", "I;16L", "I;16B", "I;16N", "I")


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Map-style data set of image files; item i is (uint8 tensor (C, H, W), class index).

    Attributes:
        targets: int64 (N,) class indices.
        classes: names of the classes.
        image_size: edge of the square that every image is resized and cropped to, or None to leave them as they are.
        channels: 3 for RGB, 1 for grey.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        targets: Sequence[int],
        classes: Sequence[str],
        image_size: int | None = None,
        channels: Literal[1, 3] = 3,
    ) -> None:
        if image_size is not None and image_size < 1:
            raise ValueError(f"image_size must be at least 1, got {image_size}")
        if channels not in (1, 3):
            raise ValueError(f"channels must be 1 or 3, got {channels}")
        if len(paths) != len(targets):
            raise ValueError(f"there are {len(targets)} targets for {len(paths)} paths")
        # One bytes object and not a list: reading a million strings in a forked worker copies their pages, by and by
        # all of them, since it counts references in them.
        encoded = [os.fsencode(path) for path in paths]
        self._names = b"".join(encoded)
        self._ends = torch.tensor([0, *map(len, encoded)]).cumsum(0)
        self.targets = torch.tensor(targets, dtype=torch.int64)
        self.classes = tuple(classes)
        self.image_size = image_size
        self.channels = channels

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Decode one image.

        Raises:
            UserError: if the file cannot be decoded; it names the file.
        """
        return read_image(self.path(index), self.image_size, self.channels), int(self.targets[index])

    def path(self, index: int) -> Path:
        """The file of item `index`."""
        index = range(len(self))[index]
        begin, end = self._ends[index : index + 2].tolist()
        return Path(os.fsdecode(self._names[begin:end]))

    @property
    def paths(self) -> list[Path]:
        """The files of all items, in order."""
        return [self.path(index) for index in range(len(self))]


def image_folder(
    root: str,
    image_size: int | None = None,
    channels: Literal[1, 3] = 3,
    train_folder: str = "train",
    val_folder: str = "val",
    test_folder: str = "test",
) -> dict[str, ImageFolder]:
    """Data sets from `<root>/<split>/<class>/**/image`, or from `<root>/<class>/**/image` for one without splits.

    Classes and files are taken in the order of their names. Hidden files and folders and files without the ending of
    an image are passed over.

    Args:
        root: folder of the data set.
        image_size: every image is resized (antialiased) until its shorter side has this many pixels and its middle
            is cut out as a square; None leaves the sizes as they are.
        channels: 3 for RGB, 1 for grey.
        train_folder: name of the folder with the training images.
        val_folder: name of the folder with the validation images; it may be absent.
        test_folder: name of the folder with the test images; it may be absent.

    Returns:
        'train', and 'val' and 'test' where they exist.

    Raises:
        UserError: if a folder is missing or empty, or the splits have different classes.
        ValueError: if `image_size` or `channels` is out of range.
    """
    base = Path(root).expanduser()
    if not base.is_dir():
        what = "is not a folder" if base.exists() else "does not exist"
        raise UserError(f"data.root: {base.absolute()} {what}; set data.root to the folder that holds the images.")
    named = {"train": train_folder, "val": val_folder, "test": test_folder}
    folders = {split: base / name for split, name in named.items() if (base / name).is_dir()}
    if "train" not in folders:
        if folders:
            raise UserError(
                f"data.root: {base.absolute()} has {', '.join(path.name for path in folders.values())} but no folder "
                f"'{train_folder}'; add it, or set data.dataset.train_folder to the name of the training folder."
            )
        folders = {"train": base}
    classes = {split: _classes_in(folder) for split, folder in folders.items()}
    for split, names in classes.items():
        _require_same(classes["train"], names, folders["train"], folders[split])
    return {split: _listed(folder, classes["train"], image_size, channels) for split, folder in folders.items()}


def read_image(path: Path, image_size: int | None, channels: Literal[1, 3] = 3) -> Tensor:
    """Decode an image file of any kind that Pillow reads.

    The orientation that the camera noted is applied, transparent pixels are laid over white, 16-bit greys are scaled
    to 8 bits, and palettes, CMYK and other colour spaces are converted. Of an animation it is the first frame.

    Args:
        path: the file.
        image_size: edge of the square to resize and crop to as in `image_folder`, or None.
        channels: 3 for RGB, 1 for grey.

    Returns:
        uint8 (channels, H, W).

    Raises:
        UserError: if the file is missing, truncated or no image; it names the file.
    """
    try:
        with Image.open(path) as opened:
            opened.load()
            image = _as_mode(_upright(opened), "RGB" if channels == 3 else "L")
    except MemoryError:
        raise
    except Exception as error:  # Pillow's decoders raise a dozen kinds for damaged files, SyntaxError among them.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"cannot read the image {path}: {reason}. Replace it or delete it.") from error
    if image_size is not None and image.size != (image_size, image_size):
        image = ImageOps.fit(image, (image_size, image_size), Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.array(image))
    return pixels.permute(2, 0, 1).contiguous() if channels == 3 else pixels.unsqueeze(0)


def _upright(image: Image.Image) -> Image.Image:
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # Damaged notes of the camera do not make the picture unusable.
        return image.copy()


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


def _classes_in(folder: Path) -> list[str]:
    entries = sorted(folder.iterdir())
    names = [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    if not names:
        loose = sum(entry.suffix.lower() in EXTENSIONS for entry in entries)
        found = f"only {loose} images that belong to no class" if loose else "none"
        raise UserError(
            f"data.root: {folder.absolute()} must hold one folder of images for each class; there is {found}."
        )
    return names


def _require_same(expected: Sequence[str], found: Sequence[str], train: Path, other: Path) -> None:
    problems = [
        f"{', '.join(sorted(set(more) - set(less)))} only in {where.absolute()}"
        for more, less, where in ((expected, found, train), (found, expected, other))
        if set(more) - set(less)
    ]
    if problems:
        raise UserError(
            f"data.root: every split must have the same class folders, but there is {' and '.join(problems)}."
        )


def _listed(folder: Path, classes: Sequence[str], image_size: int | None, channels: Literal[1, 3]) -> ImageFolder:
    paths: list[Path] = []
    targets: list[int] = []
    for target, name in enumerate(classes):
        found = sorted(_images_below(folder / name))
        if not found:
            raise UserError(
                f"data.root: the class folder {(folder / name).absolute()} has no images "
                f"({' '.join(sorted(EXTENSIONS))}); add some or remove the folder."
            )
        paths += found
        targets += [target] * len(found)
    return ImageFolder(paths, targets, classes, image_size, channels)


def _images_below(folder: Path) -> Iterator[Path]:
    """All images under a folder, through links to folders too, but never back up and nowhere twice."""
    seen = {folder.resolve(), *folder.resolve().parents}
    pending = [folder]
    while pending:
        below = []
        with os.scandir(pending.pop()) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                if entry.name.startswith("."):
                    continue
                path = Path(entry.path)
                if entry.is_dir(follow_symlinks=False) or (entry.is_symlink() and path.is_dir()):
                    if path.resolve() not in seen:
                        seen.add(path.resolve())
                        below.append(path)
                elif path.suffix.lower() in EXTENSIONS:
                    yield path
        pending += reversed(below)
