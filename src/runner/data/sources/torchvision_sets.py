"""The small benchmark sets of torchvision, as tensors in memory.

Every function takes `root`, the folder of the files, and `download`, whether torchvision may download files that are missing or
damaged. It returns 'train' and 'test', and raises `UserError` if files are missing or damaged, or the download fails.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import math
import socket
import struct
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.base.errors import PREEMPTED, UserError
from runner.data.bad_samples import one_line
from runner.data.preparation import exclusive, noticing_signals, reported_writing
from runner.data.sources.arrays import ImageArrays

_SILENCE_S = 30.0  # how long a server may send nothing
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
# Repeated from torchvision, so that files on disk are read without importing it, which takes a second.
_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
_CLASSES = {
    "MNIST": tuple(f"{digit} - {word}" for digit, word in enumerate(_DIGITS)),
    "KMNIST": ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo"),
    "FashionMNIST": (
        *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
        *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    ),
}
_IDX_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
_GZIP_MAGIC = b"\x1f\x8b"


class DownloadStopped(UserError):
    """A signal asked the run to stop."""

    exit_code = PREEMPTED


def mnist(root: str, download: bool) -> dict[str, ImageArrays]:
    """MNIST: handwritten digits, 60,000 and 10,000 images uint8 (1, 28, 28), from the idx files of `<root>/MNIST/raw`."""
    return _read_idx_family("MNIST", root, download)


def fashion_mnist(root: str, download: bool) -> dict[str, ImageArrays]:
    """Fashion-MNIST: clothes; files and sizes as for `mnist`."""
    return _read_idx_family("FashionMNIST", root, download)


def kmnist(root: str, download: bool) -> dict[str, ImageArrays]:
    """Kuzushiji-MNIST: Japanese letters; files and sizes as for `mnist`."""
    return _read_idx_family("KMNIST", root, download)


def cifar10(root: str, download: bool) -> dict[str, ImageArrays]:
    """CIFAR-10: 50,000 and 10,000 images uint8 (3, 32, 32) in 10 classes, from `<root>/cifar-10-batches-py`.

    The files are pickles; torchvision opens only those with the published MD5.
    """
    return _read_by_torchvision("CIFAR10", root, download)


def cifar100(root: str, download: bool) -> dict[str, ImageArrays]:
    """CIFAR-100: 100 classes; otherwise as `cifar10`."""
    return _read_by_torchvision("CIFAR100", root, download)


def svhn(root: str, download: bool) -> dict[str, ImageArrays]:
    """SVHN cropped digits: 73,257 and 26,032 images uint8 (3, 32, 32), without 'extra', from `<root>/*_32x32.mat`."""
    return _read_by_torchvision("SVHN", root, download)


def read_idx(path: Path, dims: int, most: int) -> Tensor:
    """Read an idx file of bytes, the format of MNIST (http://yann.lecun.com/exdb/mnist/), gzipped or not.

    Returns a uint8 tensor with `dims` dimensions: 3 for images, 1 for labels. Raises `UserError`, which names the file, if it
    cannot be read, is damaged, is of another kind, or has more than `most` bytes of data.
    """
    header = 4 + 4 * dims
    try:
        with path.open("rb") as start:
            packed = start.read(2) == _GZIP_MAGIC
        with gzip.open(path) if packed else path.open("rb") as file:
            content = file.read(header + most + 1)  # a small .gz can unpack to gigabytes
    except (OSError, EOFError, zlib.error) as error:
        raise _damaged(path, f"cannot be read ({one_line(error)})") from error
    # Two zero bytes, 8 for unsigned bytes, the number of dimensions; then each size, big-endian.
    if len(content) < header or content[:4] != bytes((0, 0, 8, dims)):
        problem = f"is not an idx file of bytes with {dims} dimensions: it begins with {content[:header].hex()}"
        raise _damaged(path, problem)
    sizes = struct.unpack(f">{dims}I", content[4:header])
    if math.prod(sizes) != len(content) - header or not math.prod(sizes):
        problem = f"has {len(content) - header} bytes of data where its header promises {math.prod(sizes)}"
        raise _damaged(path, problem)
    return torch.frombuffer(bytearray(content[header:]), dtype=torch.uint8).reshape(sizes)


def _read_idx_family(name: str, root: str, download: bool) -> dict[str, ImageArrays]:
    folder = Path(root).expanduser() / name / "raw"

    def fetch() -> None:
        from torchvision import datasets
        from torchvision.datasets.utils import download_url

        # Only the packed files, as torchvision verifies none that it has unpacked
        source = getattr(datasets, name)
        for filename, md5 in source.resources:
            for address in () if (folder / filename).with_suffix("").is_file() else source.mirrors:
                try:
                    download_url(f"{address}{filename}", folder, filename, md5)
                    break
                except (OSError, RuntimeError, HTTPException):
                    if address == source.mirrors[-1]:
                        raise

    return _read(lambda: _read_idx_files(name, folder), fetch if download else None, name, folder)


def _read_idx_files(name: str, folder: Path) -> dict[str, ImageArrays]:
    missing, classes, result = [], _CLASSES[name], {}
    paths: dict[str, Path] = {}
    for filename in (name for pair in _IDX_FILES.values() for name in pair):
        paths[filename] = folder / filename
        if not paths[filename].is_file():
            paths[filename] = folder / f"{filename}.gz"
        missing += [] if paths[filename].is_file() else [filename]
    if missing:
        raise _missing(name, folder, missing, "unpacked or as .gz")
    for split, pair in _IDX_FILES.items():
        images_path, labels_path = (paths[filename] for filename in pair)
        images, labels = read_idx(images_path, 3, 60_000 * 28 * 28).unsqueeze(1), read_idx(labels_path, 1, 60_000).long()
        if len(images) != len(labels):
            raise _damaged(labels_path, f"has {len(labels)} labels, but {images_path} has {len(images)} images")
        if int(labels.max()) >= len(classes):
            raise _damaged(labels_path, f"has the label {int(labels.max())}; {name} has the classes 0 to 9")
        result[split] = ImageArrays(images, labels, classes)
    return result


def _read_by_torchvision(name: str, root: str, download: bool) -> dict[str, ImageArrays]:
    from torchvision import datasets
    from torchvision.datasets.utils import check_integrity, download_and_extract_archive, download_url

    source, parent, is_svhn = getattr(datasets, name), Path(root).expanduser(), name == "SVHN"
    # SVHN is two files, and the others are an archive
    if is_svhn:
        urls = {filename: url for url, filename, _ in (source.split_list[split] for split in ("train", "test"))}
        folder, sums = parent, {filename: md5 for _, filename, md5 in source.split_list.values() if filename in urls}
        by_hand = "from " + " and ".join(urls.values())
    else:
        folder, sums = parent / source.base_folder, dict(source.train_list + source.test_list)
        sums[source.meta["filename"]] = source.meta["md5"]
        by_hand = f"by unpacking {source.url} in {parent}"

    def fetch() -> None:
        if is_svhn:
            for filename, url in urls.items():
                download_url(url, parent, filename, sums[filename])
        else:
            download_and_extract_archive(source.url, parent, filename=source.filename, md5=source.tgz_md5)

    def read() -> dict[str, ImageArrays]:
        if missing := [filename for filename in sums if not (folder / filename).is_file()]:
            raise _missing(name, folder, missing, by_hand)
        try:
            return {split: _arrays(source, parent, split) for split in ("train", "test")}
        # torchvision's message does not say which file is damaged, so the digests find it
        except (OSError, RuntimeError, EOFError) as error:
            damaged = [
                folder / filename for filename, md5 in sums.items() if not check_integrity(folder / filename, md5)
            ]
            if not damaged:
                raise _damaged(folder, f"cannot be read ({one_line(error)})") from error
            raise _damaged(damaged[0], "has another MD5 than the published one") from error

    return _read(read, fetch if download else None, name, folder)


def _arrays(source: Any, root: Path, split: str) -> ImageArrays:
    """A split of CIFAR or SVHN, as torchvision reads it."""
    is_svhn = source.__name__ == "SVHN"
    with warnings.catch_warnings():
        # NumPy 2.4 warns about how NumPy 1 wrote the flags of a dtype into the pickles of CIFAR.
        warnings.simplefilter("ignore", np.exceptions.VisibleDeprecationWarning)
        data = source(root, split=split) if is_svhn else source(root, train=split == "train")
    pixels, labels = (data.data, data.labels) if is_svhn else (data.data.transpose(0, 3, 1, 2), data.targets)
    classes = tuple(str(digit) for digit in range(10)) if is_svhn else tuple(data.classes)
    images = torch.from_numpy(np.ascontiguousarray(pixels))
    return ImageArrays(images, torch.from_numpy(np.array(labels, dtype=np.int64)), classes)


def _read(
    read: Callable[[], dict[str, ImageArrays]], fetch: Callable[[], None] | None, name: str, folder: Path
) -> dict[str, ImageArrays]:
    """Read a data set; if that fails, and there is `fetch`, one process at a time downloads it."""
    try:
        return read()
    except UserError as error:
        if fetch is None:
            raise
        unread = error
    with _downloading(name, folder, unread):
        try:
            return read()  # another process may have downloaded it in the meantime
        except DownloadStopped:
            raise
        except UserError:
            fetch()
    return read()


@contextlib.contextmanager
def _downloading(name: str, folder: Path, unread: UserError) -> Iterator[None]:
    """Let one process at a time download, until a signal ends it; an error says what to do without a download."""

    def stop() -> None:
        raise DownloadStopped("data.download", f"a signal stopped the download of {name}")

    before = socket.getdefaulttimeout()
    writing = reported_writing(folder, "data.root", "a writable folder with space")
    with noticing_signals(stop) as stopped, writing, exclusive(folder / name, stopped):
        socket.setdefaulttimeout(_SILENCE_S)
        try:
            yield
        except (OSError, RuntimeError, HTTPException) as error:
            if isinstance(error, OSError) and error.errno in _OF_THE_DISK:
                raise
            problem = f"downloading {name} failed: {one_line(error)}"
            allowed = f"data.download=false with files copied by hand: {unread.problems[0].message}"
            raise UserError("data.download", problem, allowed) from error
        finally:
            socket.setdefaulttimeout(before)


def _missing(name: str, folder: Path, files: Iterable[str], note: str) -> UserError:
    problem = f"{name} is incomplete in {folder.absolute()}: {', '.join(files)} not found there ({note})"
    allowed = "data.download=true to fetch them, or data.root=<the folder that holds them>"
    return UserError("data.root", problem, allowed)


def _damaged(path: Path, what: str) -> UserError:
    return UserError("data.root", f"{path.absolute()} {what}", "delete it and set data.download=true, or copy it again")
