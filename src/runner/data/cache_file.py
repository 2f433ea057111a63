"""The file that keeps decoded images: one line of text, then raw bytes, which are never unpickled.

The first 4096 bytes are a mark, a CRC-32 and the JSON object that it is of, padded with spaces; then come the images (uint8,
N x C x H x W), the targets, the numbers of the images that could not be read (int64), in whose places others stand, and a
CRC-32 of each image (uint32). The JSON object has a CRC-32 of all that follows the images. A file is whole or it is not
there: it is written under another name and renamed once it is on the disk.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import json
import math
import os
import secrets
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.config.errors import UserError
from runner.config.reading import open_regular
from runner.data.sources.stored_images import StoredImages

HEADER_BYTES = 4096
NOT_READ = "it could not be read when the cache was made"
_MARK = "runner images 2 "
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.int64, torch.float32, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32)
}

T = TypeVar("T")


class Unusable(Exception):
    """A file is no cache of the images that are wanted; the message says why."""


class Unwritable(Exception):
    """A file cannot be written; the message says why."""


@dataclass(frozen=True)
class Header:
    """What a file says about itself.

    Attributes:
        key: digest of all that its images depend on.
        images: (N, C, H, W).
        targets: (N, ...).
        targets_dtype: name of a dtype that torch has.
        rest_crc32: checksum of all that follows the images.
        unreadable: how many images could not be read.
    """

    key: str
    images: tuple[int, ...]
    targets: tuple[int, ...]
    targets_dtype: str
    rest_crc32: int
    unreadable: int = 0

    @property
    def image_bytes(self) -> int:
        """Bytes of the images."""
        return math.prod(self.images)

    @property
    def target_bytes(self) -> int:
        """Bytes of the targets."""
        return math.prod(self.targets) * _DTYPES[self.targets_dtype].itemsize

    @property
    def file_bytes(self) -> int:
        """Bytes of the whole file."""
        return HEADER_BYTES + self.image_bytes + self.target_bytes + 8 * self.unreadable + 4 * self.images[0]

    def dump(self) -> bytes:
        """The first bytes of the file."""
        text = json.dumps(dataclasses.asdict(self)).encode()
        return f"{_MARK}{zlib.crc32(text):08x} ".encode() + text.ljust(HEADER_BYTES - len(_MARK) - 10) + b"\n"


def parse(block: bytes, size: int) -> Header:
    """Read a header, and check it against the size of its file before anything relies on it.

    Raises:
        Unusable: if it is none, or says something else than the size.
    """
    if len(block) < HEADER_BYTES or not block.startswith(_MARK.encode()):
        raise Unusable("it is not a cache of images of this version")
    checksum, _, text = block.removeprefix(_MARK.encode()).partition(b" ")
    if checksum != f"{zlib.crc32(text.rstrip()):08x}".encode():
        raise Unusable("its header is damaged")
    try:
        fields = json.loads(text)
        images, targets = (tuple(fields[name]) for name in ("images", "targets"))
        facts = fields["targets_dtype"], fields["rest_crc32"], fields["unreadable"]
        header = Header(fields["key"], images, targets, *facts)
    except (ValueError, TypeError, KeyError, RecursionError):
        raise Unusable("its header is damaged") from None
    whole = all(type(number) is int and number > 0 for number in (*images, *targets))
    known = isinstance(header.targets_dtype, str) and header.targets_dtype in _DTYPES
    counted = type(header.unreadable) is int and header.unreadable >= 0
    if not whole or len(images) != 4 or images[:1] != targets[:1] or not known or not counted:
        raise Unusable("its header is damaged")
    if header.file_bytes != size:
        raise Unusable(f"it has {size:,} bytes in place of {header.file_bytes:,}")
    return header


class CachedImages(Dataset[tuple[Tensor, Tensor]]):
    """Images and targets in a file; the system keeps in memory what has room, for all processes.

    Args:
        path: the file.
        key: digest that the file must have; None for any.
        source: what the images were read from, for those that turn out to be damaged.

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
            opened = os.dup(file.fileno())
        try:
            header = parse(os.pread(opened, HEADER_BYTES, 0), os.fstat(opened).st_size)
            if key is not None and header.key != key:
                raise Unusable("it was made from other files, settings or library versions")
            rest = _read_all(opened, HEADER_BYTES + header.image_bytes, header.file_bytes)
            if zlib.crc32(rest) != header.rest_crc32:
                raise Unusable("its targets are damaged")
            ends = header.target_bytes, header.target_bytes + 8 * header.unreadable
            checksums = np.frombuffer(rest, np.uint32, offset=ends[1])
            self.images = StoredImages(path, opened, HEADER_BYTES, header.images, checksums, source)
        except BaseException:
            os.close(opened)
            raise
        self.targets = torch.frombuffer(rest, dtype=torch.uint8)[: ends[0]].clone().view(_DTYPES[header.targets_dtype])
        self.targets = self.targets.view(header.targets)
        self.unreadable = torch.from_numpy(np.frombuffer(rest[ends[0] : ends[1]], np.int64))
        self._missing = frozenset(self.unreadable.tolist())

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """One sample, a copy: a transform may write to it.

        Raises:
            UserError: if it could not be read when the file was made.
        """
        if index in self._missing:
            raise UserError(NOT_READ)
        return self.images[index], self.targets[index]

    def __reduce__(self) -> tuple[Any, ...]:
        return CachedImages, (self.path, self.key)


def _read_all(opened: int, start: int, stop: int) -> bytearray:
    """The bytes of a file from `start` to `stop`; a single call reads 2 GiB at most."""
    data = bytearray(stop - start)
    done = 0
    while done < len(data):
        count = os.preadv(opened, [memoryview(data)[done:]], start + done)
        if count == 0:
            raise Unusable("it is truncated")
        done += count
    return data


def write(
    path: Path,
    key: str,
    samples: int,
    batches: Iterator[tuple[Tensor, Tensor]],
    unreadable: Collection[int] = (),
) -> None:
    """Write a file; a crash at any instant leaves either what was there or all of the new one.

    Args:
        path: the file; its folder exists.
        key: digest of all that the images depend on.
        samples: how many there will be.
        batches: images uint8 (B, C, H, W) of one shape, and targets (B, ...).
        unreadable: images in whose places others stand; looked at after the last batch.

    Raises:
        Unwritable: if it cannot be written; nothing is left behind.
    """
    temporary = path.parent / f"{temporary_prefix(path)}{secrets.token_hex(6)}"
    try:
        with _told(), temporary.open("xb") as file:
            _fill(file, key, samples, batches, unreadable)
        with _told():
            os.replace(temporary, path)
            _flush_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _fill(
    file: IO[bytes],
    key: str,
    samples: int,
    batches: Iterator[tuple[Tensor, Tensor]],
    unreadable: Collection[int],
) -> None:
    kept, shape, checksums = [], torch.Size(), array.array("I")
    file.write(b" " * HEADER_BYTES)
    for images, targets in _apart(batches):
        pixels = images.contiguous().numpy()
        file.write(pixels.data)
        checksums.extend(map(zlib.crc32, pixels))
        kept.append(targets)
        shape = images.shape[1:]
    joined = torch.cat(kept)
    missing = torch.tensor(sorted(unreadable), dtype=torch.int64)
    rest = joined.numpy().tobytes() + missing.numpy().tobytes() + checksums.tobytes()
    file.write(rest)
    dtype = str(joined.dtype).removeprefix("torch.")
    header = Header(key, (samples, *shape), tuple(joined.shape), dtype, zlib.crc32(rest), len(missing))
    assert file.tell() == header.file_bytes, "every sample was written"
    file.seek(0)
    file.write(header.dump())
    file.flush()
    os.fsync(file.fileno())


class _OfTheData(Exception):
    """Carries an `OSError` of what gives the batches past those of writing."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


def _apart(batches: Iterator[T]) -> Iterator[T]:
    try:
        yield from batches
    except OSError as error:
        raise _OfTheData(error) from error


@contextlib.contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except _OfTheData as found:
        raise found.error from None
    except OSError as error:
        raise Unwritable(error.strerror or str(error)) from error


def _flush_folder(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def temporary_prefix(path: Path) -> str:
    """What the names of unfinished files begin with."""
    return f".{path.name}.unfinished-"
