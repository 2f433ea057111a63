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
import json
import math
import os
import secrets
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


class Unusable(Exception):
    """A file is no cache of the images that are wanted; the message says why."""


class Unwritable(Exception):
    """A file cannot be written; the message says why."""


@dataclass(frozen=True)
class Header:
    """The description of a file.

    Attributes:
        key: digest of all that its images depend on.
        images, targets: their shapes, (N, C, H, W) and (N, ...).
        targets_dtype: name of a torch dtype.
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
    """Read a header, and check it against the size of its file before anything relies on it; raises `Unusable`."""
    if len(block) < HEADER_BYTES or not block.startswith(_MARK.encode()):
        raise Unusable("it is not a cache of images of this version")
    checksum, _, text = block.removeprefix(_MARK.encode()).partition(b" ")
    damaged = checksum != f"{zlib.crc32(text.rstrip()):08x}".encode()
    try:
        fields = {} if damaged else json.loads(text)
        images, targets = fields["images"], fields["targets"]
        header = Header(**fields | {"images": tuple(images), "targets": tuple(targets)})
        numbers = (*images, *targets, header.unreadable + 1)
        damaged = not all(type(number) is int and number > 0 for number in numbers)
        damaged |= len(images) != 4 or images[:1] != targets[:1] or header.targets_dtype not in _DTYPES
    except (ValueError, TypeError, KeyError, RecursionError):
        damaged = True
    if damaged:
        raise Unusable("its header is damaged")
    if header.file_bytes != size:
        raise Unusable(f"it has {size:,} bytes instead of {header.file_bytes:,}")
    return header


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
        """One sample, a copy; raises `UserError` if it could not be read when the file was made."""
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
    """Write a file; a crash at any instant leaves either the old file or the whole new one.

    `batches` are images uint8 (B, C, H, W) of one shape, and targets (B, ...); what it raises is passed on. `unreadable`, the
    images whose places hold others, is used after the last batch. Raises `Unwritable` and leaves nothing behind if the file
    cannot be written.
    """
    temporary = path.parent / f"{temporary_prefix(path)}{secrets.token_hex(6)}"
    kept, shape, checksums = [], torch.Size(), array.array("I")
    try:
        with _writing():
            file = temporary.open("xb")
        with file:
            with _writing():
                file.write(b" " * HEADER_BYTES)
            for images, targets in batches:  # an OSError of the data is none of writing
                pixels = images.contiguous().numpy()
                with _writing():
                    file.write(pixels.data)
                checksums.extend(map(zlib.crc32, pixels))
                kept.append(targets)
                shape = images.shape[1:]
            joined = torch.cat(kept)
            missing = torch.tensor(sorted(unreadable), dtype=torch.int64)
            rest = joined.numpy().tobytes() + missing.numpy().tobytes() + checksums.tobytes()
            dtype = str(joined.dtype).removeprefix("torch.")
            header = Header(key, (samples, *shape), tuple(joined.shape), dtype, zlib.crc32(rest), len(missing))
            with _writing():
                file.write(rest)
                assert file.tell() == header.file_bytes, "every sample was written"
                file.seek(0)
                file.write(header.dump())
                file.flush()
                os.fsync(file.fileno())
        with _writing():
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
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unwritable(error.strerror or str(error)) from error


def temporary_prefix(path: Path) -> str:
    """The beginning of the names of unfinished files."""
    return f".{path.name}.unfinished-"
