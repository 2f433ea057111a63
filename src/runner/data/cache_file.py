"""The file that keeps decoded images: one line of text, then raw bytes, mapped into memory and never unpickled.

The first 4096 bytes are a mark and a JSON object, padded with spaces; then come the images (uint8, N x C x H x W), then the
targets, then the numbers of the images that could not be read (int64), in whose places others stand. A file is whole or it
is not there: it is written under another name and renamed once it is on the disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import mmap
import os
import platform
import secrets
import sys
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.config.errors import UserError
from runner.config.reading import open_regular

HEADER_BYTES = 4096
NOT_READ = "it could not be read when the cache was made"
_MARK = "runner images 1 "
# Whatever writes to mapped tensors changes its own copy of a page and never the file. No memory is set aside for that, as
# the system would refuse to for a file that is larger than its memory. Python before 3.13 has no name for the flag.
_NORESERVE = 0x4000 if sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64") else 0
_PRIVATE = mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", _NORESERVE)
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
        targets_crc32: checksum of the targets' bytes and what follows.
        unreadable: how many images could not be read.
    """

    key: str
    images: tuple[int, ...]
    targets: tuple[int, ...]
    targets_dtype: str
    targets_crc32: int
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
        return HEADER_BYTES + self.image_bytes + self.target_bytes + 8 * self.unreadable

    def dump(self) -> bytes:
        """The first bytes of the file."""
        return (_MARK + json.dumps(dataclasses.asdict(self))).encode().ljust(HEADER_BYTES - 1) + b"\n"


def parse(block: bytes, size: int) -> Header:
    """Read a header, and check it against the size of its file before anything relies on it.

    Raises:
        Unusable: if it is none, or says something else than the size.
    """
    text = block.decode("utf-8", "replace")
    if len(block) < HEADER_BYTES or not text.startswith(_MARK):
        raise Unusable("it is not a cache of images")
    try:
        fields = json.loads(text.removeprefix(_MARK))
        images, targets = (tuple(fields[name]) for name in ("images", "targets"))
        facts = fields["targets_dtype"], fields["targets_crc32"], fields.get("unreadable", 0)
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


class MappedImages(Dataset[tuple[Tensor, Tensor]]):
    """Images and targets in a file that is mapped into memory: all processes share the pages that the system holds.

    Args:
        path: the file.
        key: digest that the file must have; None for any.

    Attributes:
        images: uint8 (N, C, H, W); the system reads pages of it when they are touched.
        targets: (N, ...), in memory.
        unreadable: images that could not be read when the file was made, int64 (U,), ascending.

    Raises:
        Unusable: if the file is damaged or of other data.
        FileNotFoundError: if there is none.
    """

    def __init__(self, path: Path, key: str | None = None) -> None:
        self.path, self.key = path, key
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            header = parse(file.read(HEADER_BYTES), size)
            if key is not None and header.key != key:
                raise Unusable("it was made from other files, settings or library versions")
            pages = mmap.mmap(file.fileno(), size, _PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        mapped = torch.frombuffer(pages, dtype=torch.uint8)
        end = HEADER_BYTES + header.image_bytes
        self.images = mapped[HEADER_BYTES:end].view(header.images)
        split = end + header.target_bytes
        self.targets = mapped[end:split].clone().view(_DTYPES[header.targets_dtype]).view(header.targets)
        # From an empty piece torch would not make another dtype.
        left = mapped[split:].clone()
        self.unreadable = left.view(torch.int64) if header.unreadable else torch.zeros(0, dtype=torch.int64)
        if _crc32(self.targets, self.unreadable) != header.targets_crc32:
            raise Unusable("its targets are damaged")
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
        return self.images[index].clone(), self.targets[index]

    def __reduce__(self) -> tuple[Any, ...]:
        return MappedImages, (self.path, self.key)


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
    kept, shape = [], torch.Size()
    file.write(b" " * HEADER_BYTES)
    for images, targets in _apart(batches):
        file.write(images.contiguous().numpy().data)
        kept.append(targets)
        shape = images.shape[1:]
    joined = torch.cat(kept)
    missing = torch.tensor(sorted(unreadable), dtype=torch.int64)
    file.write(joined.numpy().tobytes() + missing.numpy().tobytes())
    dtype = str(joined.dtype).removeprefix("torch.")
    header = Header(key, (samples, *shape), tuple(joined.shape), dtype, _crc32(joined, missing), len(missing))
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


def _crc32(*tensors: Tensor) -> int:
    return functools.reduce(lambda sum_, tensor: zlib.crc32(tensor.contiguous().numpy().tobytes(), sum_), tensors, 0)
