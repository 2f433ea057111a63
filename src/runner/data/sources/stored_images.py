"""Images in a cache file, read and checked when they are gathered."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import weakref
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.config.errors import DataFailed
from runner.data.samples import SeededDataset, as_tensor

_COPIED_BYTES = 2**26


class StoredImages:
    """Images (N, C, H, W) in a file, read and checked when they are gathered.

    They are read with pread instead of mapped: if a mapped file is truncated, the system kills the process with SIGBUS. The
    CRC-32 of an image is compared when it is first read, and again after the file was changed. A damaged image is read from
    `source` instead (None makes it an error), and the file is removed, so that the next run rebuilds it. The images begin at
    offset `start`; the descriptor `opened` is closed with this object.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        path: Path,
        opened: int,
        start: int,
        shape: tuple[int, ...],
        checksums: np.ndarray,
        source: Dataset[Any] | None,
    ) -> None:
        self.shape = torch.Size(shape)
        self.nbytes = math.prod(shape)
        self._path, self._opened, self._start = path, opened, start
        self._checksums, self._source = checksums, source
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
        self._notice_changes()
        for place, number in enumerate(index.tolist()):
            piece = pieces[place * self._each : (place + 1) * self._each]
            if problem := self._read(number, piece):
                images[place] = self._read_again(number, problem)
        return images

    def copied(self, device: torch.device) -> Tensor:
        """All images on a device, copied in parts so that little is in memory twice."""
        images = torch.empty(self.shape, dtype=torch.uint8, device=device)
        step = max(1, _COPIED_BYTES // self._each)
        for numbers in torch.arange(len(self)).split(step):  # type: ignore[no-untyped-call]
            images[numbers[0] : numbers[-1] + 1] = self.index_select(0, numbers).to(device)
        return images

    def problem(self, number: int) -> str:
        """What is wrong with an image in the file; empty if nothing is."""
        return self._read(number, memoryview(bytearray(self._each)))

    def _notice_changes(self) -> None:
        found = os.fstat(self._opened)
        state = found.st_size, found.st_mtime_ns
        if state != self._state:
            self._state, self._checked = state, bytearray(len(self))

    def _read(self, number: int, piece: memoryview) -> str:
        try:
            count = os.preadv(self._opened, [piece], self._start + number * self._each)
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
            changed = f"{complaint}, and the data set has another image there now"
            raise DataFailed("data.cache", changed, f"{allowed} from the current data")
        if not self._reported:
            self._reported = True
            consequence = "Damaged images are read from the data set, and the next run rebuilds the cache."
            print(f"warning: data.cache: {complaint}. {consequence}", file=sys.stderr, flush=True)
        return image
