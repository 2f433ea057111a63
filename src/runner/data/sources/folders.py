"""Images on disk, one folder for each class, decoded when they are read."""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch
from PIL import features
from torch import Tensor
from torch.utils.data import Dataset

from runner.config.errors import UserError, nearest
from runner.config.schema.sections import Data
from runner.data.sources.image_io import DECODING, Cut, middle_square, read_image

EXTENSIONS = frozenset(
    (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".pgm", ".ppm", ".pbm", ".pnm")
)


class ImageFolder(Dataset[tuple[Tensor, int | Tensor]]):
    """Map-style data set of image files; item i is (uint8 tensor (C, H, W), class index or float32 target (...)).

    The arguments are those of `image_folder`; `targets` are class indices, or float32 (N, ...), and `paths` is computed as an
    attribute.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        targets: Sequence[int] | Tensor,
        classes: Sequence[str],
        image_size: int | None = None,
        channels: Literal[1, 3] = 3,
        crop_share: float = 1.0,
        max_pixels: int = Data.max_pixels,
    ) -> None:
        if image_size is not None and image_size < 1:
            raise ValueError(f"image_size must be at least 1, got {image_size}")
        if channels not in (1, 3):
            raise ValueError(f"channels must be 1 or 3, got {channels}")
        if not 0 < crop_share <= 1:
            raise ValueError(f"crop_share must be above 0 and at most 1, got {crop_share}")
        if len(paths) != len(targets):
            raise ValueError(f"there are {len(targets)} targets for {len(paths)} paths")
        # One bytes object instead of a list: reading strings in a forked worker writes their reference counts, which
        # copies their pages one after the other.
        encoded = [os.fsencode(path) for path in paths]
        self._names = b"".join(encoded)
        self._ends = torch.tensor([0, *map(len, encoded)]).cumsum(0)
        self.targets = targets if isinstance(targets, Tensor) else torch.tensor(targets, dtype=torch.int64)
        self.classes, self.image_size, self.channels = tuple(classes), image_size, channels
        self.crop_share, self.max_pixels = crop_share, max_pixels

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int | Tensor]:
        """Decode one image; raises `UserError`, which names the file, if it cannot be decoded."""
        return self.read_part(index, functools.partial(middle_square, share=self.crop_share), self.image_size)

    def read_part(self, index: int, cut: Cut, size: int | None) -> tuple[Tensor, int | Tensor]:
        """Decode only the part `cut(height, width)` of an image, resized to a square, see `runner.data.transforms.crops`."""
        target = self.targets[index]
        image = read_image(self.path(index), size, self.channels, cut, self.max_pixels)
        return image, target if target.is_floating_point() else int(target)

    def fingerprint(self) -> str:
        """A digest of all that the images depend on: files with sizes and times, settings, decoder versions."""
        settings = (DECODING, self.image_size, self.channels, self.crop_share, self.max_pixels)
        libraries = (torch.__version__, features.version("pil"), features.version("jpg"))
        digest, names = hashlib.sha256(repr((settings, libraries)).encode()), self.file_names()
        # Without the common prefix, so that the folder that the program starts in does not matter.
        common = len(os.path.commonpath((min(names), max(names)))) if names else 0
        for name in names:
            try:
                found = os.stat(name)  # noqa: PTH116  a Path for each of a million files would cost more than this call
            except OSError as error:
                raise UserError(f"cannot read the image {os.fsdecode(name)}: {error.strerror}") from error
            digest.update(name[common:] + struct.pack("<cqq", b"\0", found.st_size, found.st_mtime_ns))
        return digest.hexdigest()

    def file_names(self) -> list[bytes]:
        """The file of each item, as bytes: a Path for each of a million files would cost much more."""
        return [self._names[begin:end] for begin, end in itertools.pairwise(self._ends.tolist())]

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
    crop_share: float = 1.0,
    max_pixels: int = Data.max_pixels,
) -> dict[str, ImageFolder]:
    """Data sets from `<root>/<split>/<class>/**/image`, or from `<root>/<class>/**/image` without splits.

    Classes and files are sorted by name. Hidden files and folders, and files without an image extension, are skipped.

    Args:
        root: folder of the data set.
        image_size: every image is cropped to its central square and resized (bilinear, antialiased) to this many
            pixels a side; None keeps the sizes.
        channels: 3 for RGB, 1 for grey.
        train_folder, val_folder, test_folder: names of the folders of the splits; the last two are optional.
        crop_share: edge of that square as a share of the shorter side; 0.875 is the usual 224 pixels of 256.
        max_pixels: most pixels that a file may have.

    Raises `UserError` if a folder is missing or empty, or the splits have different classes, and `ValueError` if `image_size`,
    `channels` or `crop_share` is out of range.
    """
    base = Path(root).expanduser()
    if not base.is_dir():
        what = "is not a folder" if base.exists() else "does not exist"
        raise UserError("data.root", f"{base.absolute()} {what}", "the folder that holds the images")
    named = {"train": train_folder, "val": val_folder, "test": test_folder}
    folders = {split: base / name for split, name in named.items() if (base / name).is_dir()}
    if folders and "train" not in folders:
        found = ", ".join(path.name for path in folders.values())
        others = [path.name for path in sorted(base.iterdir()) if path.is_dir() and path not in folders.values()]
        raise UserError(
            "data.root",
            f"{base.absolute()} has {found} but no folder '{train_folder}'",
            "such a folder, or data.dataset.train_folder=<name of the training folder>",
            nearest(train_folder, others),
        )
    folders = folders or {"train": base}
    names = _class_folders(folders["train"])
    for folder in folders.values():
        others = _class_folders(folder)
        only = [(set(names) - set(others), folders["train"]), (set(others) - set(names), folder)]
        if found := " and ".join(
            f"{', '.join(sorted(more))} only in {where.absolute()}" for more, where in only if more
        ):
            raise UserError("data.root", f"splits have different class folders: {found}", "the same in every split")
    return {
        split: ImageFolder(*_list_images(folder, names), names, image_size, channels, crop_share, max_pixels)
        for split, folder in folders.items()
    }


def _class_folders(folder: Path) -> list[str]:
    entries = sorted(folder.iterdir())
    names = [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    if not names:
        loose = sum(entry.suffix.lower() in EXTENSIONS for entry in entries)
        found = f"there are only images of no class ({loose})" if loose else "there is none"
        problem = f"{folder.absolute()} must hold one folder of images for each class; {found}"
        raise UserError(
            "data.root", problem, f"data.root={folder.parent}" if loose else "folders named like the classes"
        )
    inner = [entry for entry in (folder / names[0]).iterdir() if entry.is_dir()] if len(names) == 1 else []
    if len(inner) > 1:
        problem = f"{folder.absolute()} has one folder, '{names[0]}', with {len(inner)} folders in it"
        raise UserError("data.root", problem, f"data.root={folder / names[0]}, if these are the classes")
    return names


def _list_images(folder: Path, classes: Sequence[str]) -> tuple[list[Path], list[int]]:
    paths: list[Path] = []
    targets: list[int] = []
    for target, name in enumerate(classes):
        found = sorted(images_below(folder / name))
        if not found:
            raise UserError(
                "data.root",
                f"the class folder {(folder / name).absolute()} has no images ({' '.join(sorted(EXTENSIONS))})",
                "add some, or remove the folder",
            )
        paths += found
        targets += [target] * len(found)
    return paths, targets


def images_below(folder: Path) -> Iterator[Path]:
    """All images under a folder, see `folders_below`."""
    for _, files in folders_below(folder):
        yield from (path for path in files if path.suffix.lower() in EXTENSIONS)


def folders_below(folder: Path) -> Iterator[tuple[Path, list[Path]]]:
    """A folder and those under it, each with its files sorted by name; hidden ones are skipped.

    Links to folders are followed, but not to a parent, and no folder is visited twice.

    Raises:
        UserError: if a folder cannot be read; it names the folder.
    """
    seen = {folder.resolve(), *folder.resolve().parents}
    pending = [folder]
    while pending:
        here = pending.pop()
        below, files = [], []
        try:
            with os.scandir(here) as entries:
                for entry in sorted(entries, key=lambda entry: entry.name):
                    if entry.name.startswith("."):
                        continue
                    path = Path(entry.path)
                    if not (entry.is_dir(follow_symlinks=False) or (entry.is_symlink() and path.is_dir())):
                        files.append(path)
                    elif path.resolve() not in seen:
                        seen.add(path.resolve())
                        below.append(path)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise UserError(f"cannot read the folder {here}: {reason}. Make it readable or remove it.") from error
        yield here, files
        pending += reversed(below)
