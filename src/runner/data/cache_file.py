"""The file that keeps decoded images: one line of text, then raw bytes, which are never unpickled.

The first 4096 bytes are a mark, a CRC-32 and a JSON object, padded with spaces; then come the images (uint8, N x C x H x W),
the targets, the numbers of the images that could not be read (int64), whose places hold other images, and a CRC-32 of each
image (uint32). The JSON object has a CRC-32 of all that follows the images.

This is one file instead of .npy files beside a JSON: one rename makes it appear whole or not at all.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import errno
import itertools
import json
import math
import os
import secrets
import sys
import weakref
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import ConfigDict, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from torch import Tensor
from torch.utils.data import Dataset

from runner.config.errors import DataFailed, DiskFull, UserError
from runner.config.reading import open_regular
from runner.data.bad_samples import NOT_READ
from runner.data.samples import SeededDataset, as_tensor

HEADER_BYTES = 4096
_MARK = "runner images 2 "
_COPIED_BYTES = 2**26


class Unusable(Exception):
    """A file is not a cache of the images that are wanted; the message says why."""


@dataclass(frozen=True, config=ConfigDict(strict=True))
class Header:
    """The description of a file; `images` and `targets` are shapes."""

    key: str  # digest of all that its images depend on
    images: tuple[PositiveInt, PositiveInt, PositiveInt, PositiveInt]
    targets: tuple[PositiveInt, ...]
    targets_dtype: Literal["int64", "float32", "bool", "uint8", "int8", "int16", "int32"]
    rest_crc32: int  # of all that follows the images
    unreadable: NonNegativeInt = 0  # how many images could not be read

    @property
    def ends(self) -> list[int]:
        """Where the header, the images, the targets, the numbers of unreadable images, and the checksums end in the file."""
        targets = math.prod(self.targets) * self.dtype.itemsize
        sizes = (HEADER_BYTES, math.prod(self.images), targets, 8 * self.unreadable, 4 * self.images[0])
        return list(itertools.accumulate(sizes))

    @property
    def dtype(self) -> torch.dtype:
        """Of the targets."""
        dtype: torch.dtype = getattr(torch, self.targets_dtype)
        return dtype

    def dump(self) -> bytes:
        """The first bytes of the file."""
        text = json.dumps(dataclasses.asdict(self)).encode()
        return f"{_MARK}{zlib.crc32(text):08x} ".encode() + text.ljust(HEADER_BYTES - len(_MARK) - 10) + b"\n"


def parse(block: bytes, size: int) -> Header:
    """Read a header, and check it against the size of its file before anything relies on it; raises `Unusable`."""
    if len(block) < HEADER_BYTES or not block.startswith(_MARK.encode()):
        raise Unusable("it is not a cache of images of this version")
    checksum, _, text = block.removeprefix(_MARK.encode()).partition(b" ")
    try:
        header = TypeAdapter(Header).validate_json(text)
    except ValidationError as error:
        raise Unusable("its header is damaged") from error
    if checksum != f"{zlib.crc32(text.rstrip()):08x}".encode() or header.images[:1] != header.targets[:1]:
        raise Unusable("its header is damaged")
    if header.ends[-1] != size:
        raise Unusable(f"it has {size:,} bytes instead of {header.ends[-1]:,}")
    return header


class StoredImages:
    """Images (N, C, H, W) in a file, read and checked when they are gathered.

    They are read with pread instead of mapped: if a mapped file is truncated, the system kills the process with SIGBUS. The
    CRC-32 of an image is compared when it is first read, and again after the file was changed. A damaged image is read from
    `source` instead (None makes it an error), and the file is removed, so that the next run rebuilds it. The descriptor
    `opened` is closed with this object.
    """

    device = torch.device("cpu")

    def __init__(
        self, path: Path, opened: int, shape: tuple[int, ...], checksums: np.ndarray, source: Dataset[Any] | None
    ) -> None:
        self.shape, self.nbytes = torch.Size(shape), math.prod(shape)
        self._path, self._opened, self._checksums, self._source = path, opened, checksums, source
        self._each = math.prod(shape[1:])
        self._state: tuple[int, int] | None = None
        self._checked = bytearray(len(checksums))
        self._reported = False
        weakref.finalize(self, os.close, opened)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: int) -> Tensor:
        """One image, a copy."""
        return self.index_select(0, torch.tensor([range(len(self))[index]]))[0]

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        """Images by their numbers, as `torch.index_select`; raises `DataFailed` if one is damaged and cannot be replaced."""
        assert dim == 0, "images are gathered"
        images = torch.empty((len(index), *self.shape[1:]), dtype=torch.uint8)
        pieces = images.view(-1).numpy().data
        found = os.fstat(self._opened)
        if (state := (found.st_size, found.st_mtime_ns)) != self._state:
            self._state, self._checked = state, bytearray(len(self))
        for place, number in enumerate(index.tolist()):
            piece = pieces[place * self._each : (place + 1) * self._each]
            if problem := self._read(number, piece):
                images[place] = self._read_again(number, problem)
        return images

    def copied(self, device: torch.device) -> Tensor:
        """All images on a device, copied in parts so that little is in memory twice."""
        images = torch.empty(self.shape, dtype=torch.uint8, device=device)
        for numbers in torch.split(torch.arange(len(self)), max(1, _COPIED_BYTES // self._each)):
            images[numbers[0] : numbers[-1] + 1] = self.index_select(0, numbers).to(device)
        return images

    def problem(self, number: int) -> str:
        """What is wrong with an image in the file; empty if nothing is."""
        return self._read(number, memoryview(bytearray(self._each)))

    def _read(self, number: int, piece: memoryview) -> str:
        try:
            count = os.preadv(self._opened, [piece], HEADER_BYTES + number * self._each)
        except OSError as error:
            return error.strerror or str(error)
        if count < self._each:
            return "the file is truncated"
        if not self._checked[number]:
            if zlib.crc32(piece) != self._checksums[number]:
                return "its checksum is wrong"
            self._checked[number] = True
        return ""

    def _read_again(self, number: int, problem: str) -> Tensor:
        with contextlib.suppress(OSError):  # another process may have replaced the file; the open one can still be read
            if os.path.samestat(self._path.stat(), os.fstat(self._opened)):
                self._path.unlink()
        complaint = f"image {number} in {self._path} is damaged: {problem}"
        allowed = "the same command again, which rebuilds the cache"
        if self._source is None:
            raise DataFailed("data.cache", complaint, allowed)
        image = as_tensor(SeededDataset(self._source, 0)[0, number][0])
        if zlib.crc32(image.numpy().data) != self._checksums[number]:
            raise DataFailed("data.cache", f"{complaint}, and the data set has another image there now", allowed)
        if not self._reported:
            self._reported = True
            consequence = "Damaged images are read from the data set, and the next run rebuilds the cache."
            print(f"warning: data.cache: {complaint}. {consequence}", file=sys.stderr, flush=True)
        return image


class CachedImages(Dataset[tuple[Tensor, Tensor]]):
    """Images and targets in a file, which the page cache of the system shares between processes.

    `key` is the digest that the file must have (None for any); `source` replaces images that turn out to be damaged.

    Attributes:
        images: uint8 (N, C, H, W); read from the file when they are gathered.
        targets: (N, ...), in memory.
        unreadable: images that could not be read when the file was made, int64 (U,), ascending.

    Raises:
        Unusable: if the file is damaged or of other data.
        FileNotFoundError: if there is none.
    """

    def __init__(self, path: Path, key: str | None = None, source: Dataset[Any] | None = None) -> None:
        self.path, self.key = path, key
        with open_regular(path) as file:
            header = parse(file.read(HEADER_BYTES), os.fstat(file.fileno()).st_size)
            if key is not None and header.key != key:
                raise Unusable("it was made from other files, settings or library versions")
            file.seek(header.ends[1])
            rest = file.read()
            if zlib.crc32(rest) != header.rest_crc32:
                raise Unusable("its targets are damaged")
            opened = os.dup(file.fileno())
        bounds = itertools.pairwise(end - header.ends[1] for end in header.ends[1:])
        targets, unreadable, checksums = (bytearray(rest[start:stop]) for start, stop in bounds)
        self.images = StoredImages(path, opened, header.images, np.frombuffer(checksums, np.uint32), source)
        self.targets = torch.frombuffer(targets, dtype=header.dtype).view(header.targets)
        self.unreadable = torch.from_numpy(np.frombuffer(unreadable, np.int64))
        self._missing = frozenset(self.unreadable.tolist())

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """One sample, a copy; raises `UserError` if it could not be read when the file was made."""
        if index in self._missing:
            raise UserError(NOT_READ)
        return self.images[index], self.targets[index]

    def __reduce__(self) -> tuple[Any, ...]:
        return CachedImages, (self.path, self.key)


def write(
    path: Path,
    key: str,
    samples: int,
    batches: Iterator[tuple[Tensor, Tensor]],
    unreadable: Collection[int] = (),
) -> None:
    """Write a file; a crash at any instant leaves either the old file or the whole new one.

    `batches` are images uint8 (B, C, H, W) of one shape, and targets (B, ...); what it raises is passed on. `unreadable`, the
    images whose places hold others, is used after the last batch. Raises `UserError` and leaves nothing behind if the file
    cannot be written.
    """
    temporary = path.parent / f"{temporary_prefix(path)}{secrets.token_hex(6)}"
    kept, shape, checksums = [], torch.Size(), array.array("I")
    try:
        with writing(path), temporary.open("xb") as file:
            file.write(b" " * HEADER_BYTES)
            for images, targets in batches:
                pixels = images.contiguous().numpy()
                file.write(pixels.data)
                checksums.extend(map(zlib.crc32, pixels))
                kept.append(targets)
                shape = images.shape[1:]
            joined = torch.cat(kept)
            missing = np.array(sorted(unreadable), dtype=np.int64)
            rest = joined.numpy().tobytes() + missing.tobytes() + checksums.tobytes()
            dtype: Any = str(joined.dtype).removeprefix("torch.")
            header = Header(key, (samples, *shape), tuple(joined.shape), dtype, zlib.crc32(rest), len(missing))
            file.write(rest)
            assert file.tell() == header.ends[-1], "every sample was written"
            file.seek(0)
            file.write(header.dump())
            file.flush()
            os.fsync(file.fileno())
            os.replace(temporary, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Report that a cache cannot be written."""
    try:
        yield
    except OSError as error:
        problem = f"cannot write {path}: {error.strerror or error}"
        kind = DiskFull if error.errno == errno.ENOSPC else UserError
        raise kind("data.cache_dir", problem, "a writable folder, or data.cache=null") from error


def temporary_prefix(path: Path) -> str:
    """The beginning of the names of unfinished files."""
    return f".{path.name}.unfinished-"
