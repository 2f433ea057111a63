"""Images in tar files, named as WebDataset does: each is read where it lies in its file, and verified."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL import features
from torch import Tensor

from runner.base.errors import UserError
from runner.base.reading import open_regular
from runner.config.schema.sections import Data
from runner.data.sources.folders import ImageList
from runner.data.sources.image_io import DECODING, Decoding
from runner.data.sources.index_file import IndexFile
from runner.data.sources.listing import is_image

_RULES = 1  # to be raised when other images are found, or in another order
_NAMES = ("offsets", "lengths", "checksums", "labels")
_SPLITS = ("train", "val", "test")

Index = dict[str, Tensor]
"""Of the images of a shard, int64 (N,) each: where they lie, their lengths in bytes, CRC-32, and class numbers."""


class Shards(ImageList):
    """The images of some shards; for the other arguments see `ImageList`.

    Args:
        paths: of the shards.
        indexes: of each of them.
    """

    indexed = True

    def __init__(
        self, paths: Sequence[Path], indexes: Sequence[Index], classes: Sequence[str], decoding: Decoding
    ) -> None:
        joined = {name: torch.cat([index[name] for index in indexes]) for name in _NAMES}
        super().__init__(joined["labels"], classes, decoding)
        self._paths = tuple(map(str, paths))
        self._offsets, self._lengths, self._checksums = (joined[name] for name in _NAMES[:3])
        self._ends = torch.tensor([len(index["labels"]) for index in indexes]).cumsum(0)

    def encoded(self, index: int) -> tuple[Path, bytes | None]:
        """See `ImageList.encoded`; raises `UserError` if the bytes are not those that were indexed."""
        index = range(len(self))[index]
        shard = int(torch.searchsorted(self._ends, index, right=True))
        path, offset, length = self._paths[shard], int(self._offsets[index]), int(self._lengths[index])
        try:
            with open_regular(path) as file:
                content = os.pread(file.fileno(), length, offset)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror or error}") from error
        if len(content) != length or zlib.crc32(content) != int(self._checksums[index]):
            problem = (
                f"{path} was changed or damaged after it was indexed: the image at byte {offset:,} has another CRC-32"
            )
            raise UserError("data.root", problem, f"the file as it was, or `touch {path}` to index it again")
        return Path(path, f"byte {offset}"), content

    @property
    def digests(self) -> np.ndarray:
        """The checksum of each image, int64 (N,)."""
        return self._checksums.numpy()

    def fingerprint(self) -> str:
        """A digest of all that the images depend on: their bytes, settings, decoder versions."""
        settings = (
            DECODING,
            *dataclasses.astuple(self.decoding),
            torch.__version__,
            *map(features.version, ("pil", "jpg")),
        )
        digest = hashlib.sha256(repr(settings).encode())
        digest.update(self._lengths.numpy().tobytes() + self._checksums.numpy().tobytes())
        return digest.hexdigest()


def shards(
    root: str,
    image_size: int | None = None,
    channels: Literal[1, 3] = 3,
    *,
    label: str = "label",
    crop_share: float = 1.0,
    max_pixels: int = Data.max_pixels,
    cache_folder: str | None = None,
) -> dict[str, Shards]:
    """Data sets from `<root>/<split>/*.tar`, or from `<root>/*.tar` without splits, in the order of names and of each file.

    The files of a sample follow each other and have the same name up to the first dot: an image, and its class number as text in
    `NAME.cls`, or in `NAME.json` as the value of `label`. `<root>/classes.txt` has a class name in each line; without it, numbers
    are names. Each shard is read once, for an index of its images, which a run keeps.

    Args:
        root: folder of the data set.
        label: key in JSON files.
        image_size, channels, crop_share, max_pixels: see `runner.data.sources.image_io.Decoding`.
        cache_folder: where indexes are looked for; None for none.

    Raises:
        UserError: if there are no shards, or one cannot be read, is empty, or has an image without a class number.
    """
    base = Path(root).expanduser()
    decoding = Decoding(image_size, channels, crop_share, max_pixels)
    paths = {split: sorted((base / split).glob("*.tar")) for split in _SPLITS}
    paths = {split: found for split, found in paths.items() if found} or {"train": sorted(base.glob("*.tar"))}
    if not paths.get("train"):
        where = base.absolute() / "train" if len(paths) > 1 or "train" not in paths else base.absolute()
        raise UserError(
            "data.root", f"{where} has no files *.tar", "a folder with shards, or with train/ and val/ of them"
        )
    every = [path for found in paths.values() for path in found]
    # Reading and checksums release the lock of the interpreter
    with ThreadPoolExecutor() as pool:
        made = list(pool.map(_indexed, every, [label] * len(every), [cache_folder] * len(every)))
    indexes = {path: index for path, (index, _) in zip(every, made, strict=True)}
    classes = _classes(base / "classes.txt", max(int(index["labels"].max()) for index in indexes.values()))
    result = {
        split: Shards(found, [indexes[path] for path in found], classes, decoding) for split, found in paths.items()
    }
    result["train"].unsaved = [(file, index) for index, file in made if file is not None]
    return result


def _classes(path: Path, largest: int) -> list[str]:
    if not path.exists():
        return [str(number) for number in range(largest + 1)]
    names = path.read_text(encoding="utf-8").splitlines()
    if largest >= len(names):
        raise UserError("data.root", f"a sample is of class {largest}, and {path} has only {len(names)} lines")
    return names


def _indexed(shard: Path, label: str, cache_folder: str | None) -> tuple[Index, IndexFile | None]:
    """The index of a shard, and the file to keep it in if it is new."""
    try:
        found = shard.stat()
        key = json.dumps([_RULES, label, found.st_size, found.st_mtime_ns])
        file = None if cache_folder is None else IndexFile.of(cache_folder, str(shard.absolute()), key)
        if file is not None and (known := file.read()) is not None:
            return known, None
        return index_of(shard, label), file
    except (OSError, tarfile.TarError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(
            f"cannot read the shard {shard}: {reason}. Restore it, or remove it from the folder."
        ) from error


def index_of(shard: Path, label: str) -> Index:
    """Read a shard once, and note where its images are.

    Raises:
        UserError: if it has no image, or one without a class number.
        OSError, tarfile.TarError: if it cannot be read.
    """
    rows = []
    with open_regular(shard) as file, tarfile.open(fileobj=file, mode="r:") as tar:
        members = tar.getmembers()
        # tarfile takes a file that was cut between two members for a whole one
        end = max(member.offset_data + -(-member.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE for member in members)
        if os.pread(file.fileno(), tarfile.BLOCKSIZE, end) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError("it is truncated")
        files = (member for member in members if member.isfile())
        for key, group in groupby(files, key=lambda member: _key(member.name)):
            parts = {member.name[len(key) + 1 :].lower(): member for member in group}
            images = [part for extension, part in parts.items() if is_image(f".{extension}") and "." not in extension]
            if not images:
                continue
            found = {name: _content(tar, part) for name, part in parts.items() if name in ("cls", "json")}
            number, image = _class_number(shard, key, found, label), images[0]
            content = os.pread(file.fileno(), image.size, image.offset_data)
            rows.append((image.offset_data, image.size, zlib.crc32(content), number))
    if not rows:
        raise UserError("data.root", f"the shard {shard} has no images")
    return {name: tensor.contiguous() for name, tensor in zip(_NAMES, torch.tensor(rows).T, strict=True)}


def _key(name: str) -> str:
    folder, _, base = name.rpartition("/")
    return f"{folder}/{base.partition('.')[0]}" if folder else base.partition(".")[0]


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    assert file is not None, "it is a file"
    return file.read()


def _class_number(shard: Path, name: str, found: Mapping[str, bytes], label: str) -> int:
    number: Any = None
    with contextlib.suppress(ValueError):
        number = int(found["cls"]) if "cls" in found else json.loads(found.get("json", b"{}")).get(label)
    if type(number) is not int or number < 0:
        problem = f"sample {name} of {shard} has no class number"
        raise UserError("data.root", problem, f"a number from 0 in {name}.cls, or in {name}.json as '{label}'")
    return number
