"""Images in tar files, named as WebDataset does: each is read where it lies in its file, and verified."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Union

import torch
from torch import Tensor

from runner.base.errors import UserError
from runner.base.reading import LARGEST_DATA, LARGEST_TEXT, MOST_NAMES, is_url, open_regular, read_regular
from runner.config.schema.sections import Data
from runner.data.bad_samples import Place
from runner.data.sources.bands import Channels
from runner.data.sources.detection import with_objects
from runner.data.sources.folders import ImageList
from runner.data.sources.image_io import Decoding, read_mask
from runner.data.sources.listing import IndexFile, check_names, times_of
from runner.data.sources.masks import refuse_ignored, shown, with_mask
from runner.data.sources.remote import RemoteShard, chosen, content_of, listed
from runner.data.sources.tar_samples import COLUMNS, Index, Kind, index_of_file, objects_of, read_files, usable

_RULES = 2  # to be raised when other images are found, or in another order; what `pack` writes is found by all
MANIFEST = "pack.json"  # what `pack` writes beside the splits
_SPLITS = ("train", "val", "test")

Shard = Union["LocalShard", RemoteShard]


@dataclass(frozen=True)
class LocalShard:
    """A tar file on disk, as `RemoteShard` is one in a store; `version` is `times_of` it."""

    url: str
    size: int
    version: tuple[int, ...]

    @classmethod
    def of(cls, path: str | Path) -> LocalShard:
        """The file of a path; raises `UserError` if there is none."""
        with Place(f"the shard {path}"):
            return cls(str(Path(path).absolute()), Path(path).stat().st_size, tuple(times_of(path)))

    def read(self, start: int, length: int, checksum: int) -> bytes:
        """Bytes with that CRC-32; raises `UserError` if they have another one."""
        with Place(self.url), self.opened() as file:
            content = os.pread(file.fileno(), length, start)
        if len(content) != length or zlib.crc32(content) != checksum:
            problem = f"{self.url} was changed or damaged after it was indexed: the image at byte {start:,}"
            allowed = f"the file as it was, or `touch {self.url}` to index it again"
            raise UserError("data.root", f"{problem} has another CRC-32", allowed)
        return content

    def index(self) -> bytes | None:
        """The content of the index beside it; None if the shard was changed afterwards, as class numbers may be others."""
        path = Path(f"{self.url}.index")
        with contextlib.suppress(OSError):
            return read_regular(path, LARGEST_DATA) if path.stat().st_mtime_ns >= self.version[1] else None
        return None

    def opened(self) -> BinaryIO:
        """The file for reading."""
        return open_regular(self.url)

    def check(self) -> None:
        """Nothing: a file that changed while it was indexed has another version at the next start."""


class Shards(ImageList):
    """The images of some shards; for the other arguments see `ImageList`.

    Attributes:
        block_ends: the number of images up to the end of each shard, int64 (S,).
        checksums: the CRC-32 of each image, int64 (N,).
    """

    indexed = True

    def __init__(
        self, shards: Sequence[Shard], indexes: Sequence[Index], classes: Sequence[str], decoding: Decoding
    ) -> None:
        joined = {name: torch.cat([index[name] for index in indexes]) for name in COLUMNS}
        super().__init__(joined["labels"], classes, decoding)
        self._shards = tuple(shards)
        self._offsets, self._lengths, self.checksums = (joined[name] for name in COLUMNS[:3])
        self.block_ends = torch.tensor([len(index["labels"]) for index in indexes]).cumsum(0)

    def encoded(self, index: int) -> tuple[str, bytes]:
        """See `ImageList.encoded`; raises `UserError` if the bytes are not those that were indexed, or the store fails."""
        index = range(len(self))[index]
        shard, offset = self._shards[int(torch.searchsorted(self.block_ends, index, right=True))], self._offsets[index]
        content = shard.read(int(offset), int(self._lengths[index]), int(self.checksums[index]))
        return f"{shard.url} byte {int(offset)}", content

    def fingerprint(self) -> str:
        """A digest of all that the images depend on: their bytes, settings, decoder versions."""
        settings, libraries = self.decoding.state()
        digest = hashlib.sha256(repr((*settings, *libraries)).encode())
        for numbers in (self._lengths, self.checksums, self.targets):
            digest.update(numbers.numpy().tobytes())
        return digest.hexdigest()


class TargetShards(Shards):
    """Shards whose images have masks or boxes; items are those of `MaskFolder` or `DetectionImages`."""

    def __init__(self, *arguments: Any, target: Kind) -> None:
        super().__init__(*arguments)
        # These change with the samples, and are not class numbers
        self._target, self.targets = target, self.checksums.double()

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        """Read one sample; raises `UserError` as `encoded`, and if the image or mask cannot be used."""
        name, content = self.encoded(index)
        files, pixels = read_files(content, self._target), self.decoding.max_pixels
        image = self.decoding.read(name, files[0])
        if self._target == "mask":
            return with_mask(image, read_mask(name, max_pixels=pixels, content=files[1]), name, name)
        return with_objects(image, *objects_of(files[1], name, index))

    def classes_of(self, index: int) -> list[int]:
        """The numbers of the classes that item `index` shows, the first class 0; reads the sample, but not its pixels."""
        name, content = self.encoded(index)
        target = read_files(content, self._target)[1]
        if self._target == "mask":
            return shown(read_mask(name, max_pixels=self.decoding.max_pixels, content=target))
        return [label - 1 for label in {*objects_of(target, name)[0].labels}]


def shards(
    root: str,
    image_size: int | None = None,
    channels: Channels = 3,
    *,
    target: Kind = "class",
    label: str = "label",
    train: str | list[str] | None = None,
    val: str | list[str] | None = None,
    test: str | list[str] | None = None,
    crop_share: float = 1.0,
    max_pixels: int = Data.max_pixels,
    cache_folder: str | None = None,
) -> dict[str, Shards]:
    """Data sets from `<root>/<split>/*.tar`, or from `<root>/*.tar` without splits, in the order of names and of each file.

    The files of a sample follow each other and have the same name up to the first dot: an image, and its class number as text in
    `NAME.cls`, or in `NAME.json` as the value of `label`. `<root>/classes.txt` has a class name in each line; without it, numbers
    are names. Each shard is read once, for an index of its images, which a run keeps. An index beside the shard,
    `NAME.tar.index`, which `pack` writes, is used instead.

    Args:
        root: folder of the data set, or its URL in a store that fsspec reads.
        target: "mask" and "boxes" take `NAME.mask.png`, or objects in `NAME.json`, instead of class numbers.
        label: key of class numbers in JSON files.
        train, val, test: the shards of each split, relative to `root`, such as "train-{0000..0146}.tar", or a list of them;
            the folders are listed if all three are None.
        image_size, channels, crop_share, max_pixels: see `runner.data.sources.image_io.Decoding`.
        cache_folder: where indexes are looked for; None for none.

    Raises `UserError` if there are no shards, or one cannot be read, is empty, or has an image without a class number;
    `DataFailed` if a store fails.
    """
    base = root.rstrip("/") if is_url(root) else str(Path(root).expanduser().absolute())
    if is_url(root) and re.search(r"//[^/]*:[^/]*@|\?", root):
        allowed = "credentials where the client of the store looks for them, such as its environment variables"
        raise UserError("data.root", "is a URL with a password or a query, which would be stored with the run", allowed)
    decoding = Decoding(image_size if target == "class" else None, channels, crop_share, max_pixels)
    named = {"train": train, "val": val, "test": test}
    shards, manifest = _found(base, named), _manifest(base)
    if manifest.get("samples", ...) is None:
        raise UserError("data.root", f"the pack in {base} is not finished", "the same `pack` command again")
    every = [shard for found in shards.values() for shard in found]
    # Reading and checksums release the lock of the interpreter
    with ThreadPoolExecutor() as pool:
        made = list(pool.map(functools.partial(_indexed, label=label, target=target, cache_folder=cache_folder), every))
    indexes = {shard: index for shard, (index, _) in zip(every, made, strict=True) if len(index["labels"])}
    classes = _classes(f"{base}/classes.txt", max(int(index["labels"].max()) for index in indexes.values()), target)
    kind: Any = Shards if target == "class" else functools.partial(TargetShards, target=target)
    # `pack` skipped all images of others
    kept = {split: [shard for shard in found if shard in indexes] for split, found in shards.items()}
    result = {split: kind(some, [*map(indexes.get, some)], classes, decoding) for split, some in kept.items() if some}
    for split, count in (manifest.get("samples") or {}).items() if not any(named.values()) else ():
        if (found := len(result.get(split, ()))) != count:
            problem = f"{base} has {found:,} of the {count:,} images of '{split}' that were packed"
            raise UserError("data.root", problem, "all tar files, or no pack.json beside them")
    if target == "mask":
        allowed = "class numbers, as `pack data=segmentation_folder data.dataset.values=[0,255]` writes them"
        refuse_ignored(len(result["train"]), lambda index: result["train"][index][1], "root", allowed)
    result["train"].unsaved = [(file, index) for index, file in made if file is not None]
    return result


def _found(base: str, names: Mapping[str, str | list[str] | None]) -> dict[str, list[Shard]]:
    """The shards of each split: those that are named, or all in the folders of the splits, or in `base`."""
    if any(names.values()):
        if not names["train"]:
            raise UserError("data.dataset.train", "names no shards, and another split does", "the training shards")
        expanded = {split: itertools.islice(_expanded(some), MOST_NAMES + 1) for split, some in names.items() if some}
        places = {split: [f"{base}/{name}" for name in some] for split, some in expanded.items()}
        every = [place for some in places.values() for place in some]
        if len(every) > MOST_NAMES:
            raise UserError("data.dataset", f"names more than {MOST_NAMES:,} shards", "fewer, larger ones")
        # The same file may have several spellings, and links
        if len(set(map(os.path.normpath if is_url(base) else os.path.realpath, every))) < len(every):
            raise UserError("data.dataset", "names a shard twice, or for two splits", "each shard once")
        open_one: Any = chosen if is_url(base) else LocalShard.of
        with ThreadPoolExecutor() as pool:
            return {split: list(pool.map(open_one, some)) for split, some in places.items()}
    paths = {split: _tars(f"{base}/{split}") for split in _SPLITS}
    paths = {split: found for split, found in paths.items() if found} or {"train": _tars(base)}
    if not paths.get("train"):
        where = base if "train" in paths else f"{base}/train"
        raise UserError("data.root", f"{where} has no files *.tar", "shards, or folders train/ and val/ of them")
    return paths


def _manifest(base: str) -> dict[str, Any]:
    found: Any = None
    with contextlib.suppress(OSError, ValueError, RecursionError):
        place = f"{base}/{MANIFEST}"
        found = json.loads((content_of(place) if is_url(base) else read_regular(Path(place))) or b"{}")
    # Another program may have written a file of this name
    return found if isinstance(found, dict) and "rules" in found else {}


def _expanded(names: str | list[str]) -> Iterator[str]:
    """Names for patterns with a range of numbers: `{08..10}` is 08, 09 and 10."""
    for name in [names] if isinstance(names, str) else names:
        if (found := re.search(r"\{(\d+)\.\.(\d+)\}", name)) is None:
            yield name
            continue
        first, last = found.groups()
        if int(first) > int(last):
            raise UserError("data.dataset", f"the pattern {name} has no numbers", "the lower number first: {000..146}")
        for number in range(int(first), int(last) + 1):
            yield from _expanded(f"{name[: found.start()]}{number:0{len(first)}}{name[found.end() :]}")


def _tars(folder: str) -> list[Shard]:
    if is_url(folder):
        return [*listed(folder)]
    return [LocalShard.of(path) for path in sorted(Path(folder).glob("*.tar")) if not path.name.startswith(".")]


def _classes(path: str, largest: int, target: Kind) -> list[str]:
    with Place(path, "data.root"):
        content: bytes | None = None
        with contextlib.suppress(FileNotFoundError):
            content = content_of(path) if is_url(path) else read_regular(Path(path), LARGEST_TEXT)
        if content is None:
            if target == "class":
                return []
            numbers = "0, 1, 2, ..." if target == "mask" else "1, 2, 3, ..."
            raise UserError("data.root", f"there is no {path}", f"the name of a class in each line, for {numbers}")
        names = re.split("\r?\n", content.decode("utf-8-sig").rstrip("\r\n"))
    if largest - (target == "boxes") >= len(names):  # labels begin with 1
        raise UserError("data.root", f"a sample is of class {largest}, and {path} has only {len(names)} lines")
    if "" in names:
        raise UserError("data.root", f"{path} has an empty line")
    check_names("data.root", path, names)
    return names


def _indexed(shard: Shard, label: str, target: Kind, cache_folder: str | None) -> tuple[Index, IndexFile | None]:
    """The index of a shard, and the file to keep it in if it is new."""
    key, file = json.dumps([_RULES, label, shard.size, shard.version] + [target] * (target != "class")), None
    if cache_folder is not None and shard.version:  # without one, another object could have the same index
        file = IndexFile.of(cache_folder, shard.url, key)
        # An index that is kept spares a request, so it is looked at first
        if (known := usable(file.read(), shard.size)) is not None:
            return known, None
    if (content := shard.index()) is not None:
        packed = packed_index(Path(shard.url), shard.size, target)
        if (known := usable(IndexFile.parse(content, packed.key), shard.size)) is not None:
            return known, None
    return index_of(shard, label, target), file


def packed_index(shard: Path, size: int, target: Kind = "class") -> IndexFile:
    """The file beside a shard of `size` bytes that `pack` writes its index to; times would not survive a copy of both."""
    key = json.dumps(["packed", 1, size] + [target] * (target != "class"))
    return IndexFile(shard.with_name(f"{shard.name}.index"), key)


def index_of(shard: Shard, label: str, target: Kind = "class") -> Index:
    """Read a shard once, and note where its images are.

    Raises `UserError` if it cannot be read, has no image, or its samples are not as `shards` says.
    """
    with Place(f"the shard {shard.url}", "data.root"), shard.opened() as file:
        index = index_of_file(file, label, target)
        shard.check()
        return index
