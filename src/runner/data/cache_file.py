"""The file that keeps decoded images: their bytes, then what is known of them in the format of safetensors.

First come the images (uint8, N x C x H x W), so that they are written as they are decoded; then tensors: the shape of the
images, a CRC-32 of each, the targets, the numbers of the images that could not be read, whose places hold other images, and the
key, a digest of all that the images depend on; then a mark, the length of these tensors, their CRC-32 and that of this ending.

This is one file instead of .npy files beside a JSON: one rename makes it appear whole or not at all.
"""

from __future__ import annotations

import array
import contextlib
import math
import os
import struct
import weakref
import zlib
from collections.abc import Collection, Iterable
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.base.errors import DataFailed, UserError
from runner.base.files import whole
from runner.base.reading import open_regular
from runner.data.bad_samples import NOT_READ
from runner.data.preparation import reported_writing

_MARK = b"runner images 3 "
_END = struct.Struct("<16sQII")  # mark, length of the tensors, CRC-32 of them, and of these 28 bytes
_COPIED_BYTES = 2**26


def _ending(length: int, checksum: int) -> bytes:
    known = _END.pack(_MARK, length, checksum, 0)[:-4]
    return known + struct.pack("<I", zlib.crc32(known))


class Unusable(Exception):
    """A file is not a cache of the images that are wanted; the message says why."""


class StoredImages:
    """Images (N, C, H, W) in a file, read and checked when they are gathered.

    The CRC-32 of an image is compared when it is first read, and again after the file was changed. If it is wrong, the file is
    removed, so that the next run rebuilds it. The descriptor `opened` is closed with this object.
    """

    device = torch.device("cpu")

    def __init__(self, path: Path, opened: int, shape: tuple[int, ...], checksums: np.ndarray) -> None:
        self.shape, self.nbytes = torch.Size(shape), math.prod(shape)
        self._path, self._opened, self._checksums = path, opened, checksums
        self._each = math.prod(shape[1:])
        self._state: tuple[int, int] | None = None
        self._checked = bytearray(len(checksums))
        weakref.finalize(self, os.close, opened)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: int) -> Tensor:
        """One image, a copy."""
        return self.index_select(0, torch.tensor([range(len(self))[index]]))[0]

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        """Images by their numbers, as `torch.index_select`; raises `DataFailed` if one is damaged."""
        assert dim == 0, "images are gathered"
        images = torch.empty((len(index), *self.shape[1:]), dtype=torch.uint8)
        pieces = images.view(-1).numpy().data
        found = os.fstat(self._opened)
        if (state := (found.st_size, found.st_mtime_ns)) != self._state:
            self._state, self._checked = state, bytearray(len(self))
        for place, number in enumerate(index.tolist()):
            if problem := self._read(number, pieces[place * self._each : (place + 1) * self._each]):
                with contextlib.suppress(OSError):  # another process may have replaced the file
                    if os.path.samestat(self._path.stat(), found):
                        self._path.unlink()
                complaint = f"image {number} in {self._path} is damaged: {problem}"
                raise DataFailed("data.cache", complaint, "the same command again, which rebuilds the cache")
        return images

    def copied(self, device: torch.device) -> Tensor:
        """All images on a device, copied in parts so that little is in memory twice."""
        images = torch.empty(self.shape, dtype=torch.uint8, device=device)
        for numbers in torch.split(torch.arange(len(self)), max(1, _COPIED_BYTES // self._each)):
            images[numbers[0] : numbers[-1] + 1] = self.index_select(0, numbers).to(device)
        return images

    def problem(self, number: int) -> str:
        """The damage of an image in the file; empty if there is none."""
        return self._read(number, memoryview(bytearray(self._each)))

    def _read(self, number: int, piece: memoryview) -> str:
        try:
            # Not mapped into memory: if a mapped file is truncated, the system kills the process with SIGBUS.
            count = os.preadv(self._opened, [piece], number * self._each)
        except OSError as error:
            return error.strerror or str(error)
        if count < self._each:
            return "the file is truncated"
        if not self._checked[number]:
            if zlib.crc32(piece) != self._checksums[number]:
                return "its checksum is wrong"
            self._checked[number] = True
        return ""


class CachedImages(Dataset[tuple[Tensor, Tensor]]):
    """Images and targets in a file, which the page cache of the system shares between processes.

    `key` is the one that the file must have (None for any).

    Attributes:
        images: uint8 (N, C, H, W); read from the file when they are gathered.
        targets: (N, ...), in memory.
        unreadable: images that could not be read when the file was made, int64 (U,), ascending.

    Raises:
        Unusable: if the file is damaged or of other data.
        FileNotFoundError: if there is none.
    """

    def __init__(self, path: Path, key: str | None = None) -> None:
        self.path, self.key = path, key
        with open_regular(path) as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _END.size))
            ending = file.read(_END.size)
            known = ending.startswith(_MARK) and len(ending) == _END.size
            _, length, checksum, of_ending = _END.unpack(ending) if known else (b"", 0, 0, 0)
            if not known or zlib.crc32(ending[:-4]) != of_ending or length > size - _END.size:
                raise Unusable("it is not a whole cache of images of this version")
            file.seek(size - _END.size - length)
            # Targets and checksums are small, so they are verified at once; images when they are read
            try:
                rest = file.read(length)
                found = safetensors.torch.load(rest)
                shape, checksums = found["shape"].long().tolist(), found["checksums"].numpy()
                samples = {shape[0], len(checksums), len(found["targets"])}
                whole = zlib.crc32(rest) == checksum and len(samples) == 1 and min(shape) > 0
                whole = whole and math.prod(shape) == size - _END.size - length and found["unreadable"].ndim == 1
                made_from = bytes(found["key"].tolist()).decode()
            except Exception as error:  # a file may hold anything, and a checksum is easily made for it
                raise Unusable("its targets are damaged") from error
            if not whole:
                raise Unusable("its targets are damaged, or do not belong to its images")
            if key not in (None, made_from):
                raise Unusable("it was made from other files, settings or library versions")
            opened = os.dup(file.fileno())
        self.images = StoredImages(path, opened, tuple(shape), checksums)
        self.targets, self.unreadable = found["targets"], found["unreadable"]
        self._missing = frozenset(self.unreadable.tolist())

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """One sample, a copy; raises `UserError` if it could not be read when the file was made."""
        if index in self._missing:
            raise UserError(NOT_READ)
        return self.images[index], self.targets[index]

    def __reduce__(self) -> tuple[type, tuple[Path, str | None]]:
        return CachedImages, (self.path, self.key)


def write(
    path: Path, key: str, samples: int, batches: Iterable[tuple[Tensor, Tensor]], unreadable: Collection[int] = ()
) -> None:
    """Write a file; a crash at any instant leaves either the old file or the whole new one.

    `batches` are images uint8 (B, C, H, W) of one shape, and targets (B, ...); what it raises is passed on. `unreadable`, the
    images whose places hold others, is used after the last batch. Raises `UserError` and leaves nothing behind if the file
    cannot be written.
    """
    targets_so_far, shape, checksums = [], torch.Size(), array.array("I")
    with reported_writing(path, "data.cache_dir", "a writable folder, or data.cache=null"), whole(path) as file:
        for images, targets in batches:
            pixels = images.contiguous().numpy()
            file.write(pixels.data)
            checksums.extend(map(zlib.crc32, pixels))
            targets_so_far.append(targets)
            shape = images.shape[1:]
        known = {"targets": torch.cat(targets_so_far), "unreadable": torch.tensor(sorted(unreadable)).long()}
        known |= {
            "shape": torch.tensor((samples, *shape)),
            "key": torch.tensor(list(key.encode()), dtype=torch.uint8),
        }
        known["checksums"] = torch.from_numpy(np.frombuffer(checksums, np.uint32).astype(np.int64))
        rest = safetensors.torch.save(known)
        file.write(rest + _ending(len(rest), zlib.crc32(rest)))
