"""Files that keep what was found out about many files of data, so that later runs need not look again."""

from __future__ import annotations

import contextlib
import hashlib
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from runner.base.errors import UserError
from runner.base.files import write_atomically
from runner.base.reading import LARGEST_DATA, read_regular

_KEY = "key"


@dataclass(frozen=True)
class IndexFile:
    """A file of tensors that counts only for a key, which is text."""

    path: Path
    key: str

    @classmethod
    def of(cls, folder: str, source: str, key: str) -> IndexFile:
        """The file for a source of data, such as a path, in a folder for all of them."""
        name = hashlib.sha256(os.fsencode(source)).hexdigest()[:16]
        return cls(Path(folder, f"{name}.index"), f"{source}\n{key}")

    def read(self) -> dict[str, Tensor] | None:
        """The tensors; None if there is no such file, or it is damaged or has another key."""
        with contextlib.suppress(OSError):
            # Not mapped into memory: the file may be replaced while a run uses it
            return self.parse(read_regular(self.path, LARGEST_DATA), self.key)
        return None

    @staticmethod
    def parse(content: bytes, key: str) -> dict[str, Tensor] | None:
        """The tensors of a file with that content; None if it is damaged or has another key."""
        with contextlib.suppress(SafetensorError):
            tensors = safetensors.torch.load(content)
            found = tensors.pop(_KEY, torch.empty(0))
            if found.tolist() == _stamp(key, tensors).tolist():
                return tensors
        return None

    def write(self, tensors: dict[str, Tensor]) -> str:
        """Write the file; returns a warning if that is not possible, or ""."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, self.content(tensors))
        except (OSError, UserError) as error:
            problem = f"cannot keep what is known of the files of data in {self.path.parent}: {error}"
            return f"{problem}; each run looks again, unless data.cache_dir is a writable folder"
        return ""

    def content(self, tensors: dict[str, Tensor]) -> bytes:
        """What the file holds."""
        return safetensors.torch.save(tensors | {_KEY: _stamp(self.key, tensors)})


def _stamp(key: str, tensors: dict[str, Tensor]) -> Tensor:
    """What a file holds besides its tensors, uint8 (N,): the key, and checksums of the tensors."""
    checksums = [(name, zlib.crc32(tensor.numpy().data)) for name, tensor in sorted(tensors.items())]
    return torch.tensor(list(f"{key}\n{checksums}".encode(errors="surrogateescape")), dtype=torch.uint8)
