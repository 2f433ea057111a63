"""The small benchmark sets that torchvision knows how to fetch, as tensors in memory."""

from __future__ import annotations

import contextlib
import gzip
import math
import os
import struct
import tarfile
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.config.errors import UserError
from runner.data.sources.arrays import ImageArrays

# Repeated from torchvision, so that files which are there are read without spending a second on importing it.
_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_CLASSES = {
    "MNIST": tuple(f"{digit} - {word}" for digit, word in enumerate(_DIGITS)),
    "KMNIST": ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo"),
    "FashionMNIST": (
        *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
        *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    ),
}
_PREFIXES = {"train": "train", "test": "t10k"}
_GZIP_MAGIC = b"\x1f\x8b"
_ALWAYS_READ = 2**26  # bytes of data; the images of MNIST have 47 million
_MOST_UNZIPPED = 16  # times the size of the file; images of digits have five
_BLOCK = 2**20
# What torchvision raises when a download, its checksum or its unpacking fails; URLError is an OSError.
_FETCH_FAILURES = (OSError, RuntimeError, HTTPException, tarfile.TarError, zlib.error, EOFError)


def mnist(root: str, download: bool) -> dict[str, ImageArrays]:
    """MNIST, 60,000 and 10,000 images uint8 (1, 28, 28) of handwritten digits.

    Read from `<root>/MNIST/raw`, idx files unpacked or as .gz; nothing is written unless they have to be fetched.

    Args:
        root: folder that holds the folder MNIST.
        download: whether files that are missing or damaged may be fetched by torchvision.

    Returns:
        'train' and 'test'.

    Raises:
        UserError: if files are missing or damaged, or the download fails.
    """
    return _idx_set("MNIST", root, download)


def fashion_mnist(root: str, download: bool) -> dict[str, ImageArrays]:
    """Fashion-MNIST, 60,000 and 10,000 images uint8 (1, 28, 28) of clothes; files and errors as for `mnist`."""
    return _idx_set("FashionMNIST", root, download)


def kmnist(root: str, download: bool) -> dict[str, ImageArrays]:
    """Kuzushiji-MNIST, 60,000 and 10,000 images uint8 (1, 28, 28) of Japanese letters; otherwise as `mnist`."""
    return _idx_set("KMNIST", root, download)


def cifar10(root: str, download: bool) -> dict[str, ImageArrays]:
    """CIFAR-10, 50,000 and 10,000 images uint8 (3, 32, 32) in 10 classes.

    Read by torchvision from `<root>/cifar-10-batches-py`. The files are pickles; torchvision opens only those whose
    MD5 is the published one.

    Args:
        root: folder that holds the unpacked archive.
        download: whether torchvision may fetch and unpack the archive if files are missing or damaged.

    Returns:
        'train' and 'test'.

    Raises:
        UserError: if files are missing or damaged, or the download fails.
    """
    return _cifar("CIFAR10", root, download)


def cifar100(root: str, download: bool) -> dict[str, ImageArrays]:
    """CIFAR-100, 50,000 and 10,000 images uint8 (3, 32, 32) in 100 classes; otherwise as `cifar10`."""
    return _cifar("CIFAR100", root, download)


def svhn(root: str, download: bool) -> dict[str, ImageArrays]:
    """SVHN cropped digits, 73,257 and 26,032 images uint8 (3, 32, 32); the 'extra' images are left out.

    Read by torchvision from `<root>/train_32x32.mat` and `test_32x32.mat`.

    Args:
        root: folder that holds the two files.
        download: whether torchvision may fetch them if they are missing or damaged.

    Returns:
        'train' and 'test'.

    Raises:
        UserError: if files are missing or damaged, or the download fails.
    """
    from torchvision.datasets import SVHN

    folder = Path(root).expanduser()
    sources = {split: SVHN.split_list[split] for split in ("train", "test")}
    train, test = _by_torchvision(
        "SVHN",
        folder,
        {filename: md5 for _, filename, md5 in sources.values()},
        "from " + " and ".join(url for url, _, _ in sources.values()),
        download,
        lambda split, fetch: SVHN(folder, split=split, download=fetch),
    )
    classes = tuple(str(digit) for digit in range(10))
    return {
        split: ImageArrays(_tensor(data.data), _tensor(data.labels), classes)
        for split, data in (("train", train), ("test", test))
    }


def read_idx(path: Path, dims: int) -> Tensor:
    """Read an idx file of bytes, the format of MNIST (http://yann.lecun.com/exdb/mnist/), gzipped or not.

    Args:
        path: the file; whether it is gzipped is told from its first bytes.
        dims: number of dimensions that it must have: 3 for images, 1 for labels.

    Returns:
        uint8 tensor with `dims` dimensions.

    Raises:
        UserError: if the file cannot be read, is truncated or damaged, or is of another kind; it names the file.
    """
    header = 4 + 4 * dims
    try:
        with path.open("rb") as file:
            zipped = file.read(2) == _GZIP_MAGIC
            size = file.seek(0, os.SEEK_END)
            file.seek(0)
            with gzip.GzipFile(fileobj=file) if zipped else contextlib.nullcontext(file) as source:
                head = source.read(header)
                promised = _promised(path, head, dims)
                # A megabyte of gzip stands for a gigabyte of zeros.
                if promised > max(_ALWAYS_READ, _MOST_UNZIPPED * size if zipped else size):
                    raise _damaged(path, f"promises {promised:,} bytes of data, and is a file of {size:,} bytes")
                content, found = bytearray(promised), 0
                while read := source.readinto(memoryview(content)[found : found + _BLOCK]):
                    found += read
                more = len(source.read(1))
    except (OSError, EOFError, zlib.error) as error:
        raise _damaged(path, f"cannot be read ({_reason(error)})") from error
    if more or promised != found or promised == 0:
        amount = f"over {found}" if more else str(found)
        raise _damaged(path, f"has {amount} bytes of data where its header promises {promised}")
    sizes = struct.unpack(f">{dims}I", head[4:])
    return torch.frombuffer(content, dtype=torch.uint8).reshape(sizes)


def _promised(path: Path, head: bytes, dims: int) -> int:
    """Bytes of data that follow the header of an idx file."""
    # Two zero bytes, 8 for unsigned bytes, the number of dimensions; then each size, big-endian.
    if head[:4] != bytes((0, 0, 8, dims)):
        raise _damaged(path, f"is not an idx file of bytes with {dims} dimensions: it begins with {head[:4].hex()}")
    if len(head) < 4 + 4 * dims:
        raise _damaged(path, "ends within its header")
    return math.prod(struct.unpack(f">{dims}I", head[4:]))


def _idx_set(name: str, root: str, download: bool) -> dict[str, ImageArrays]:
    folder = Path(root).expanduser() / name / "raw"
    try:
        return _read_idx_set(name, folder)
    except UserError:
        if not download:
            raise
    from torchvision import datasets

    source = getattr(datasets, name)
    try:
        source(Path(root).expanduser(), train=True, download=True)
    except Exception as error:
        # Torchvision reads the files as well. If all are there, one is damaged, and reading them below says which.
        if not all((folder / filename).is_file() for filename in _idx_files()):
            raise _fetch_failed(name, folder, _idx_files(), f"from {source.mirrors[0]} (.gz)", error) from error
    return _read_idx_set(name, folder)


def _read_idx_set(name: str, folder: Path) -> dict[str, ImageArrays]:
    paths = {filename: _plain_or_gzipped(folder / filename) for filename in _idx_files()}
    missing = [filename for filename, path in paths.items() if path is None]
    if missing:
        raise _missing(name, folder, missing, "unpacked or as .gz")
    classes, result = _CLASSES[name], {}
    for split, prefix in _PREFIXES.items():
        images_path, labels_path = paths[f"{prefix}-images-idx3-ubyte"], paths[f"{prefix}-labels-idx1-ubyte"]
        assert images_path is not None
        assert labels_path is not None
        images, labels = read_idx(images_path, 3).unsqueeze(1), read_idx(labels_path, 1).long()
        if len(images) != len(labels):
            raise _damaged(labels_path, f"has {len(labels)} labels, but {images_path} has {len(images)} images")
        if int(labels.max()) >= len(classes):
            raise _damaged(labels_path, f"has the label {int(labels.max())}; {name} has the classes 0 to 9")
        result[split] = ImageArrays(images, labels, classes)
    return result


def _idx_files() -> list[str]:
    return [f"{prefix}-{kind}-ubyte" for prefix in _PREFIXES.values() for kind in ("images-idx3", "labels-idx1")]


def _plain_or_gzipped(path: Path) -> Path | None:
    candidates = (path, path.with_name(path.name + ".gz"))
    return next((candidate for candidate in candidates if candidate.is_file()), None)


def _cifar(name: str, root: str, download: bool) -> dict[str, ImageArrays]:
    from torchvision import datasets

    source = getattr(datasets, name)
    parent = Path(root).expanduser()
    sums = dict(source.train_list + source.test_list) | {source.meta["filename"]: source.meta["md5"]}
    train, test = _by_torchvision(
        name,
        parent / source.base_folder,
        sums,
        f"by unpacking {source.url} in {parent}",
        download,
        lambda split, fetch: source(parent, train=split == "train", download=fetch),
    )
    return {
        split: ImageArrays(_tensor(data.data.transpose(0, 3, 1, 2)), torch.tensor(data.targets), tuple(data.classes))
        for split, data in (("train", train), ("test", test))
    }


def _by_torchvision(
    name: str,
    folder: Path,
    sums: Mapping[str, str],
    by_hand: str,
    download: bool,
    build: Callable[[str, bool], Any],
) -> tuple[Any, Any]:
    """Torchvision's train and test data sets, with its failures told apart: missing, damaged, not fetched.

    Args:
        name: the data set's name for messages.
        folder: where its files belong.
        sums: MD5 of each file in it.
        by_hand: where a user gets them without a download by this program, a clause.
        download: whether the files may be fetched.
        build: makes the data set of a split, fetching the files if told so.
    """
    missing = [filename for filename in sums if not (folder / filename).is_file()]
    if missing and not download:
        raise _missing(name, folder, missing, by_hand)
    try:
        with warnings.catch_warnings():
            # NumPy 2.4 finds fault with how NumPy 1 wrote the flags of a dtype into the pickles of CIFAR.
            warnings.simplefilter("ignore", np.exceptions.VisibleDeprecationWarning)
            # All splits are fetched with the first or were there.
            return build("train", download), build("test", download and name == "SVHN")
    except _FETCH_FAILURES as error:
        if download:
            raise _fetch_failed(name, folder, list(sums), by_hand, error) from error
        damaged = [folder / filename for filename, md5 in sums.items() if not _has_md5(folder / filename, md5)]
        if damaged:
            others = f" (and {len(damaged) - 1} more files)" if len(damaged) > 1 else ""
            raise _damaged(damaged[0], f"has another MD5 than the published one{others}") from error
        raise _damaged(folder, f"cannot be read ({_reason(error)})") from error


def _has_md5(path: Path, md5: str) -> bool:
    from torchvision.datasets.utils import check_integrity

    return bool(check_integrity(path, md5))


def _tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _missing(name: str, folder: Path, files: Sequence[str], note: str) -> UserError:
    return UserError(
        f"data.root: {name} is not complete in {folder.absolute()}: {', '.join(files)} not found there ({note}). "
        f"Set data.download=true to fetch them, or data.root to the folder that holds them."
    )


def _fetch_failed(name: str, folder: Path, files: Sequence[str], source: str, error: BaseException) -> UserError:
    return UserError(
        f"data.download=true: fetching {name} failed: {_reason(error)}. "
        f"To do it by hand, put {', '.join(files)} into {folder.absolute()}, {source}."
    )


def _damaged(path: Path, what: str) -> UserError:
    return UserError(
        f"data.root: {path.absolute()} {what}. Delete it and set data.download=true, or copy it there anew."
    )
