"""Images on disk, one folder for each class, decoded when they are read."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.base.errors import UserError, nearest
from runner.config.schema.sections import Data
from runner.data.sources import listing
from runner.data.sources.bands import Channels
from runner.data.sources.image_io import Cut, Decoding, encoded_image, middle_square


class ImageList(Dataset[tuple[Tensor, int | Tensor]]):
    """Map-style data set of encoded images; item i is (uint8 tensor (C, H, W), class index or float32 target (...)).

    A data set says with `encoded` where its images are.

    Attributes:
        unsaved: indexes of the files of all splits that a run may keep, for later ones.
        indexed: whether there are such indexes.
        defers: items have an `Encoded` instead of an image that a device may decode.
        targets: int64 (N,), or float32 (N, ...).
        classes: names of the classes; empty for regression.
    """

    unsaved: Sequence[tuple[listing.IndexFile, dict[str, Tensor]]] = ()
    indexed = False
    defers = False

    def __init__(self, targets: Tensor, classes: Sequence[str], decoding: Decoding) -> None:
        self.targets, self.classes, self.decoding = targets, tuple(classes), decoding

    def encoded(self, index: int) -> tuple[Path | str, bytes | None]:
        """The file of item `index`; or a name for messages, and the content."""
        raise NotImplementedError

    def keep_indexes(self, write: bool = True) -> list[str]:
        """Write the indexes that are not kept yet, or forget them; returns a warning if writing is not possible."""
        unsaved, self.unsaved = self.unsaved, ()
        warnings = [file.write(tensors) for file, tensors in unsaved] if write else []
        return [warning for warning in warnings if warning][:1]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int | Tensor]:
        """Decode one image; raises `UserError`, which names the file, if it cannot be decoded."""
        cut = functools.partial(middle_square, share=self.decoding.crop_share)
        return self.read_part(index, cut, self.decoding.image_size)

    def read_part(self, index: int, cut: Cut, size: int | None) -> tuple[Any, int | Tensor]:
        """Decode only the part `cut(height, width)` of an image, resized to a square, see `runner.data.transforms.crops`."""
        (path, content), target, decoding = self.encoded(index), self.targets[index], self.decoding
        image: Any = encoded_image(path, content, decoding, size, cut) if self.defers else None
        if image is None:
            image = decoding.read(path, content, size, cut)
        return image, target if target.is_floating_point() else int(target)


class ImageFolder(ImageList):
    """The images of a list of files; for the other arguments see `ImageList`."""

    groups: list[str]  # of each sample, for `data.split.group`, if the source has them
    warnings: Sequence[str] = ()  # to be shown when a run begins

    def __init__(
        self,
        paths: Sequence[Path] | listing.Files,
        targets: Sequence[int] | Tensor,
        classes: Sequence[str],
        decoding: Decoding = Decoding(),  # noqa: B008  it is immutable
    ) -> None:
        numbers = targets if isinstance(targets, Tensor) else torch.tensor(targets, dtype=torch.int64)
        super().__init__(numbers, classes, decoding)
        self.files = paths if isinstance(paths, listing.Files) else listing.Files.of([*map(os.fsencode, paths)])
        self.indexed = self.files.sizes is not None

    def encoded(self, index: int) -> tuple[Path, bytes | None]:
        """See `ImageList.encoded`; raises `UserError` if the file has another size than in the index."""
        path, sizes = self.path(index), self.files.sizes
        # A file that is gone is reported when it is read
        if sizes is not None and listing.size_of(os.fsencode(path)) not in (-1, int(sizes[index])):
            problem = f"{path} has another size than when the files were listed"
            raise UserError("data.root", problem, f"`touch {path.parent}`, so that the next run lists them again")
        return path, None

    def fingerprint(self) -> str:
        """A digest of all that the images depend on: files with sizes and times, settings, decoder versions."""
        digest, names = hashlib.sha256(repr(self.decoding.state()).encode()), self.file_names()
        common = listing.common_part(names)
        for name in names:
            digest.update(name[common:] + b"\0")
            with contextlib.suppress(OSError):  # said, or skipped, when it is read
                found = os.stat(name)  # noqa: PTH116  a Path for each of a million files would cost more than this call
                digest.update(struct.pack("<qq", found.st_size, found.st_mtime_ns))
        return digest.hexdigest()

    def file_names(self) -> list[bytes]:
        """The file of each item."""
        return self.files.all_names()

    def path(self, index: int) -> Path:
        """The file of item `index`."""
        return Path(os.fsdecode(self.files.name(index)))

    @property
    def paths(self) -> list[Path]:
        """The files of all items, in order."""
        return [self.path(index) for index in range(len(self))]


def image_folder(
    root: str,
    image_size: int | None = None,
    channels: Channels = 3,
    train_folder: str = "train",
    val_folder: str = "val",
    *,
    test_folder: str = "test",
    crop_share: float = 1.0,
    max_pixels: int = Data.max_pixels,
    cache_folder: str | None = None,
) -> dict[str, ImageFolder]:
    """Data sets from `<root>/<split>/<class>/**/image`, or from `<root>/<class>/**/image` without splits.

    Classes and files are sorted by name. Hidden files and folders, and files without an image extension, are skipped.

    Args:
        root: folder of the data set.
        image_size, channels, crop_share, max_pixels: see `runner.data.sources.image_io.Decoding`.
        train_folder, val_folder, test_folder: names of the folders of the splits; the last two are optional.
        cache_folder: where an index of very many files is looked for; None for none.

    Raises `UserError` if a folder is missing or empty, or the splits have different classes.
    """
    decoding, base = Decoding(image_size, channels, crop_share, max_pixels), listing.existing(root)
    named = {"train": train_folder, "val": val_folder, "test": test_folder}
    folders = {split: base / name for split, name in named.items() if (base / name).is_dir()}
    if folders and "train" not in folders:
        found = ", ".join(path.name for path in folders.values())
        problem = f"{base.absolute()} has {found} but no folder '{train_folder}'"
        allowed = "such a folder, or data.dataset.train_folder=<name of the training folder>"
        others = [path.name for path in sorted(base.iterdir()) if path.is_dir() and path not in folders.values()]
        raise UserError("data.root", problem, allowed, nearest(train_folder, others))
    # Without folders of splits, the folders are those of the classes.
    folders = folders or {"train": base}
    names = _class_folders(folders["train"])
    # Class numbers are places in the sorted names, so every split must have the same names.
    for folder in folders.values():
        if more := set(names) ^ set(_class_folders(folder)):
            only = "; ".join(f"{name} only in {folders['train'] if name in names else folder}" for name in sorted(more))
            raise UserError("data.root", f"splits have different class folders: {only}", "the same in every split")
    listed, unsaved = listing.list_splits(folders, names, cache_folder)
    made = {split: ImageFolder(files, numbers, names, decoding) for split, (files, numbers) in listed.items()}
    for split, dataset in made.items():
        dataset.warnings = listing.unread_warnings(folders[split], int(dataset.files.unread or 0))
    made["train"].unsaved = unsaved
    return made


def _class_folders(folder: Path) -> list[str]:
    entries = sorted(folder.iterdir())
    names = [entry.name for entry in entries if entry.is_dir() and not listing.is_hidden(entry.name)]
    if not names:
        loose = any(entry.suffix.lower() in listing.EXTENSIONS for entry in entries)
        found = "there are only images of no class" if loose else "there is none"
        problem = f"{folder.absolute()} must hold one folder of images for each class; {found}"
        raise UserError("data.root", problem, f"data.root={folder.parent}" if loose else "")
    if names == ["images", "masks"]:  # which would train one kind of file against the other
        raise UserError("data", f"{folder.absolute()} has images and masks, and no classes", "experiment=segmentation")
    # A single folder with folders in it is most often one level too many.
    inner = [entry for entry in (folder / names[0]).iterdir() if entry.is_dir()] if len(names) == 1 else []
    if len(inner) > 1:
        problem = f"{folder.absolute()} has one folder, '{names[0]}', with {len(inner)} folders in it"
        raise UserError("data.root", problem, f"data.root={folder / names[0]}, if these are the classes")
    return names
