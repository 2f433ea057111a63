"""Images on disk with a mask for each: semantic segmentation."""

from __future__ import annotations

import contextlib
import itertools
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.base.errors import UserError
from runner.base.reading import read_text
from runner.config.schema.sections import Data
from runner.data.bad_samples import Place
from runner.data.sources.bands import Channels
from runner.data.sources.folders import ImageFolder
from runner.data.sources.image_io import Decoding, read_mask
from runner.data.sources.listing import check_names, existing, images_below

Values = Sequence[int | Sequence[int]]
"""What masks have for each class: a number, or several."""

_IGNORED = 255
_LOOKED_AT = 8  # masks


class MaskFolder(Dataset[tuple[Any, Any]]):
    """Item i is a `tv_tensors.Image` uint8 (C, H, W), and a `tv_tensors.Mask` (H, W) of integers."""

    def __init__(
        self, pairs: Sequence[tuple[Path, Path]], classes: Sequence[str], decoding: Decoding, values: Values | None
    ) -> None:
        self.classes, self._values, self.decoding = tuple(classes), values, decoding
        files, zeros = zip(*pairs, strict=True), [0] * len(pairs)
        self.images, self._masks = (ImageFolder(paths, zeros, (), decoding) for paths in files)

    def path(self, index: int) -> Path:
        """The image file of item `index`."""
        return self.images.path(index)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return with_mask(self.images[index][0], self.mask(index), self.path(index), self._masks.path(index))

    def mask(self, index: int) -> Tensor:
        """The class numbers of item `index`, (H, W)."""
        return renumbered(read_mask(self._masks.path(index), max_pixels=self.decoding.max_pixels), self._values)

    def classes_of(self, index: int) -> list[int]:
        """The numbers of the classes that item `index` shows."""
        return shown(self.mask(index))

    def class_counts(self, indices: Iterable[int]) -> Tensor:
        """The number of pixels of each class in these items, int64 (C,); masks that cannot be read do not count."""
        counts = torch.zeros(len(self.classes), dtype=torch.int64)
        for index in indices:
            with contextlib.suppress(UserError):  # said, or skipped, when it is used
                numbers = self.mask(index).flatten().long().clamp(-1, _IGNORED) + 1  # others are 0 or 256
                counts += numbers.bincount(minlength=_IGNORED + 2)[1 : len(counts) + 1]
        return counts

    def fingerprint(self) -> str:
        """A digest of all that the samples depend on, see `ImageFolder.fingerprint`."""
        return f"{self.images.fingerprint()} {self._masks.fingerprint()} {self._values}"


def shown(mask: Tensor) -> list[int]:
    """The numbers of the classes in a mask."""
    return [value for value in np.unique(mask).tolist() if value != _IGNORED]


def with_mask(image: Tensor, mask: Tensor, path: Path | str, mask_path: Path | str) -> tuple[Any, Any]:
    """A sample of an image (C, H, W) and a mask (H, W); raises `UserError` if their sizes differ."""
    from torchvision.tv_tensors import Image, Mask  # takes a second, and only such data sets need it

    if image.shape[1:] != mask.shape:
        sizes = [" x ".join(map(str, each.shape[-2:])) for each in (mask, image)]
        raise UserError(f"the mask {mask_path} has {sizes[0]} pixels, and its image {path} {sizes[1]}")
    return Image(image), Mask(mask)


def renumbered(mask: Tensor, values: Values | None) -> Tensor:
    """A mask with class i instead of each of `values[i]`, and 255 instead of others; as it is if `values` is None."""
    if values is None:
        return mask
    table = torch.full((2**16 + 1,), _IGNORED, dtype=torch.uint8)  # the last one is of numbers that do not fit
    for number, value in enumerate(values):
        table[value] = number
    return table[mask.long().clamp(-1, 2**16)]


def check_values(values: Values | None, classes: Sequence[str]) -> None:
    """Raise `UserError` if `values` are not different values of masks for each class."""
    if values is None:
        return
    each = [[value] if isinstance(value, int) else [*value] for value in values]
    flat = [*itertools.chain(*each)]
    if not all(each) or len({*flat} & {*range(2**16)}) != len(flat) or not len(each) == len(classes) <= _IGNORED:
        allowed = (
            f"a different number from 0 to 65535, or a list of such, for each of {len(classes)} classes, in their order"
        )
        raise UserError("data.dataset.values", f"cannot be {list(values)}", allowed)


def segmentation_folder(
    root: str,
    classes: list[str] | None = None,
    channels: Channels = 3,
    values: list[int | list[int]] | None = None,
    *,
    max_pixels: int = Data.max_pixels,
) -> dict[str, MaskFolder]:
    """Data sets from `<root>/<split>/images` and `<root>/<split>/masks`, or without splits from `<root>/images` and `<root>/masks`.

    A mask has the path of its image, with any extension; its numbers are grey values or places in its palette.

    Args:
        root: folder of the data set.
        classes: names of the classes; None reads them from `<root>/classes.txt`, one a line.
        channels, max_pixels: see `runner.data.sources.image_io.Decoding`.
        values: what masks have for each class, such as [0, 255], or [0, [1, 3]] for a class with two values; others become
            255. None for class numbers.

    Raises `UserError` if a folder, a mask or the names of the classes are missing, `values` do not fit the classes, or masks
    have no values that count.
    """
    base = existing(root)
    folders = {name: base / name for name in ("train", "val", "test") if (base / name / "images").is_dir()}
    folders = folders if "train" in folders else {"train": base, **folders}
    listed = base / "classes.txt"
    if classes is None and not listed.exists():
        allowed = "a list of names, or such a file with one name a line"
        raise UserError("data.dataset.classes", f"is null, and there is no {listed.absolute()}", allowed)
    with Place(listed.absolute(), "data.dataset.classes"):
        names = classes if classes is not None else read_text(listed).split("\n")
    names = [name.strip() for name in names if name.strip()]
    check_names("data.dataset.classes" if classes else "data.root", "the list" if classes else listed, names)
    check_values(values, names)
    decoding = Decoding(None, channels, max_pixels=max_pixels)
    pairs = {split: _pairs(folder / "images", folder / "masks") for split, folder in folders.items()}
    made = {split: MaskFolder(files, names, decoding, values) for split, (files, _) in pairs.items()}
    for split, (_, warnings) in pairs.items():
        made[split].images.warnings = warnings
    allowed = "[0, 255] if white is class 1, or [0, 1] if it does stand for no class"
    refuse_ignored(len(made["train"]), made["train"].mask, "dataset.values", allowed, mapped=values is not None)
    return made


def _pairs(images: Path, masks: Path) -> tuple[list[tuple[Path, Path]], list[str]]:
    """The files of the samples, and a warning of masks without an image, if there are any."""
    listed = {folder: images_below(folder) if folder.is_dir() else ([], []) for folder in (images, masks)}
    for folder, (found, _) in listed.items():
        if not found:
            allowed = "a folder with images/ and masks/, or with train/ and perhaps val/ and test/ that have both"
            raise UserError("data.root", f"there are no image files in {folder.absolute()}", allowed)
    by_name = dict[str, Path]()
    for path in map(Path, listed[masks][0]):
        if (other := by_name.setdefault(_stem(path, masks), path)) is not path:
            raise UserError("data.root", f"{other} and {path} are two masks of one image")
    files = {path: _stem(path, images) for path in map(Path, listed[images][0])}
    named = {*files.values()}
    if unread := listed[images][1]:
        raise UserError("data.root", f"{len(unread):,} images are of a type that is not read, such as {unread[0]}")
    unused = [path for name, path in by_name.items() if name not in named]
    have = "mask has" if len(unused) == 1 else "masks have"
    more = f"{len(unused):,} {have} no image, such as {unused[0]}" if unused else ""
    if missing := [name for name in files.values() if name not in by_name]:
        problem = f"{len(missing):,} of {len(files):,} images in {images.absolute()} have no mask, such as {missing[0]}"
        problem += more and f", and {more}"
        raise UserError("data.root", problem, f"a mask for each, such as {masks.absolute() / missing[0]}.png")
    return [(path, by_name[name]) for path, name in files.items()], [f"data.root: {more}"] if more else []


def _stem(path: Path, folder: Path) -> str:
    """What an image and its mask have in common, in whatever Unicode form the system writes it."""
    return unicodedata.normalize("NFC", str(path.relative_to(folder).with_suffix("")))


def refuse_ignored(count: int, mask: Callable[[int], Tensor], key: str, allowed: str, mapped: bool = False) -> None:
    """Refuse masks of 255 alone, which does not count, and of 0 and 255, unless their values were `mapped` to classes."""
    found, step = set[int](), max(1, count // _LOOKED_AT)
    # All of them are read only if some are of 255 alone
    for index in itertools.chain(range(0, count, step), range(count if step > 1 else 0)):
        if index == 0 and found - {_IGNORED}:
            break
        with contextlib.suppress(UserError):  # said, or skipped, when it is used
            found |= {*mask(index).flatten().tolist()}
    if found == {_IGNORED} or (found == {0, _IGNORED} and not mapped):
        shown = f"{' and '.join(map(str, sorted(found)))}, and {_IGNORED} stands for no class"
        raise UserError(f"data.{key}", f"masks of training have only the values {shown}", allowed)
