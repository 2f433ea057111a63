"""Small tar files of images with class numbers, as `data=shards` reads them."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import torch
from PIL import Image

Members = Iterable[tuple[str, bytes]]
SMALL = (
    "data=shards", "data.image_size=8", "data.batch_size=4", "model=mlp", "epochs=2", "scheduler=constant", "logger=none",
    "evaluate.test=false", "name=x",
)  # fmt: skip
"""Words of a quick training on shards."""


def picture(pixels: Any, kind: str = "PNG", **options: Any) -> bytes:
    """The file of an image."""
    Image.fromarray(np.asarray(pixels)).save(file := io.BytesIO(), kind, **options)
    return file.getvalue()


def encoded(number: int, size: int = 16) -> bytes:
    """An image that no other number has, as PNG."""
    draw = torch.Generator().manual_seed(number)
    return picture(torch.randint(256, (size, size, 3), generator=draw, dtype=torch.uint8))


def pixels(number: int) -> torch.Tensor:
    """The image of a number, without a tar file."""
    return torch.from_numpy(np.array(Image.open(io.BytesIO(encoded(number))))).permute(2, 0, 1)


def write_tar(path: Path, members: Members, format: int = tarfile.PAX_FORMAT) -> Path:
    """A tar file of names with contents."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=format) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def in_memory(folder: Path) -> str:
    """The URL of a copy of a folder in a store."""
    for path in folder.rglob("*.*"):
        fsspec.filesystem("memory").pipe(f"{folder}/{path.relative_to(folder)}", path.read_bytes())
    return f"memory:/{folder}"


def members(*paths: Path) -> list[tuple[str, bytes]]:
    """The names and contents of tar files, one after the other."""
    found = []
    for path in paths:
        with tarfile.open(path) as tar:
            found += [(member.name, tar.extractfile(member).read()) for member in tar]  # type: ignore[union-attr]
    return found


def packed_order(folder: str | Path) -> list[int]:
    """The samples of a packed split, as they were numbered before."""
    found = [int(name[:9]) for name, _ in members(*sorted(Path(folder).glob("*.tar")))]
    assert found[::2] == found[1::2]
    return found[::2]


def samples(numbers: Iterable[int], label: Callable[[int], tuple[str, bytes]]) -> Members:
    """The images of numbers, each with the file that `label` gives."""
    for number in numbers:
        extension, content = label(number)
        yield f"{number:06d}.png", encoded(number)
        yield f"{number:06d}.{extension}", content


def cls(number: int) -> tuple[str, bytes]:
    """A file of a class number, of three classes."""
    return "cls", str(number % 3).encode()
