"""Images in a file that are read and checked when they are gathered."""

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
    """Images in a file, which are read and checked when they are gathered.

    They are read and not mapped into memory: where a mapped file is truncated, the system ends the process with SIGBUS. The
    checksum of an image is compared when it is first read, and again after the file was written to. An image that is
    damaged is taken from the data set instead, and the file is removed, so that the next run makes it again.

    Args:
        path: the file.
        opened: its descriptor, which is closed with this object.
        start: where the images begin.
        shape: (N, C, H, W).
        checksums: CRC-32 of each image, uint32 (N,).
        source: what the images were read from; None raises an error for an image that is damaged.
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
        self._told = False
        weakref.finalize(self, os.close, opened)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: int) -> Tensor:
        """One image, a copy."""
        return self.index_select(0, torch.tensor([range(len(self))[index]]))[0]

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        """Images by their numbers, as `torch.index_select` along dimension 0 gives them.

        Raises:
            DataFailed: if one is damaged and cannot be read again.
        """
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
        """All images on a device; never more than a part of them is in memory twice."""
        images = torch.empty(self.shape, dtype=torch.uint8, device=device)
        step = max(1, _COPIED_BYTES // self._each)
        for numbers in torch.arange(len(self)).split(step):  # type: ignore[no-untyped-call]
            images[numbers[0] : numbers[-1] + 1] = self.index_select(0, numbers).to(device)
        return images

    def problem(self, number: int) -> str:
        """What is wrong with an image as it is in the file, empty if nothing is."""
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
        self._give_up_file()
        complaint = f"data.cache: image {number} in {self._path} is damaged: {problem}"
        if self._source is None:
            raise DataFailed(f"{complaint}\n    allowed: the same command again, which makes the cache again")
        image = as_tensor(SeededDataset(self._source, 0)[0, number][0])
        if zlib.crc32(image.numpy().data) != self._checksums[number]:
            raise DataFailed(
                f"{complaint}, and the data set has another image there now\n"
                "    allowed: the same command again, which makes the cache again from the data as they are now"
            )
        if not self._told:
            self._told = True
            again = "Damaged images are read from the data set, and the next run makes the cache again."
            print(f"warning: {complaint}. {again}", file=sys.stderr, flush=True)
        return image

    def _give_up_file(self) -> None:
        """Remove the file, unless another process has replaced it; what was opened can be read on."""
        with contextlib.suppress(OSError):
            if os.path.samestat(self._path.stat(), os.fstat(self._opened)):
                self._path.unlink()
