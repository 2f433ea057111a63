"""The small benchmark sets of torchvision, as tensors in memory.

Every function takes `root`, the folder of the files, and `download`, whether torchvision may download files that are missing or
damaged. It returns 'train' and 'test', and raises `UserError` if files are missing or damaged, or the download fails.
"""

from __future__ import annotations

import errno
import gzip
import math
import signal
import socket
import struct
import warnings
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.base.errors import PREEMPTED, UserError
from runner.base.files import writing
from runner.base.signals import STOPPING, listening
from runner.data.bad_samples import Place, one_line
from runner.data.preparation import exclusive
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
_ANOTHER = "delete it and set data.download=true, or copy it again"
_Arrays = Callable[[str], ImageArrays]


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
    with Place(path.absolute(), "data.root", _ANOTHER):
        with path.open("rb") as start:
            packed = start.read(2) == _GZIP_MAGIC
        with gzip.open(path) if packed else path.open("rb") as file:
            content = file.read(header + most + 1)  # a small .gz can unpack to gigabytes
        # Two zero bytes, 8 for unsigned bytes, the number of dimensions; then each size, big-endian.
        if len(content) < header or content[:4] != bytes((0, 0, 8, dims)):
            begin = content[:header].hex()
            raise ValueError(f"it is not an idx file of bytes with {dims} dimensions: it begins with {begin}")
        sizes = struct.unpack(f">{dims}I", content[4:header])
        if math.prod(sizes) != len(content) - header or not math.prod(sizes):
            found = f"it has {len(content) - header} bytes of data"
            raise ValueError(f"{found} where its header promises {math.prod(sizes)}")
        return torch.frombuffer(bytearray(content[header:]), dtype=torch.uint8).reshape(sizes)


def _read_idx_family(name: str, root: str, download: bool) -> dict[str, ImageArrays]:
    folder = Path(root).expanduser() / name / "raw"

    def path(file: str) -> Path:
        return unpacked if (unpacked := folder / file).is_file() else folder / f"{file}.gz"

    def arrays(split: str) -> ImageArrays:
        images, labels = map(path, _IDX_FILES[split])
        pixels, targets = read_idx(images, 3, 60_000 * 28 * 28), read_idx(labels, 1, 60_000)
        with Place(labels.absolute(), "data.root", _ANOTHER):
            return ImageArrays(pixels.unsqueeze(1), targets.long(), _CLASSES[name])

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

    files = [file for pair in _IDX_FILES.values() for file in pair]
    return _read(name, lambda: [*map(path, files)], "unpacked or as .gz", arrays, fetch if download else None)


def _read_by_torchvision(name: str, root: str, download: bool) -> dict[str, ImageArrays]:
    from torchvision import datasets
    from torchvision.datasets.utils import check_integrity, download_and_extract_archive, download_url

    source, folder, is_svhn = getattr(datasets, name), Path(root).expanduser(), name == "SVHN"
    if is_svhn:  # two files, and the others are an archive
        listed = [source.split_list[split] for split in ("train", "test")]
        sums, inner = {filename: md5 for _, filename, md5 in listed}, folder
        by_hand = "from " + " and ".join(url for url, _, _ in listed)
    else:
        sums = dict(source.train_list + source.test_list) | {source.meta["filename"]: source.meta["md5"]}
        inner, by_hand = folder / source.base_folder, f"by unpacking {source.url} in {folder}"

    def damaged() -> list[Path]:
        return [inner / filename for filename, md5 in sums.items() if not check_integrity(inner / filename, md5)]

    def fetch() -> None:
        for url, filename, md5 in listed if is_svhn else ():
            download_url(url, folder, filename, md5)
        if not is_svhn and damaged():  # torchvision's own check omits the names of classes
            download_and_extract_archive(source.url, folder, filename=source.filename, md5=source.tgz_md5)

    def arrays(split: str) -> ImageArrays:
        try:
            with warnings.catch_warnings():
                # NumPy 2.4 warns about how NumPy 1 wrote the flags of a dtype into the pickles of CIFAR.
                warnings.simplefilter("ignore", np.exceptions.VisibleDeprecationWarning)
                data = source(folder, split if is_svhn else split == "train")
        # torchvision's message does not say which file is damaged, so the digests find it
        except (OSError, RuntimeError, EOFError) as error:
            what = "has another MD5 than the published one" if damaged() else f"cannot be read ({one_line(error)})"
            raise UserError("data.root", f"{[*damaged(), inner][0].absolute()} {what}", _ANOTHER) from error
        pixels, labels = (data.data, data.labels) if is_svhn else (data.data.transpose(0, 3, 1, 2), data.targets)
        images, targets = np.ascontiguousarray(pixels), np.array(labels, dtype=np.int64)
        classes = tuple(map(str, range(10) if is_svhn else data.classes))
        return ImageArrays(torch.from_numpy(images), torch.from_numpy(targets), classes)

    return _read(name, lambda: [inner / file for file in sums], by_hand, arrays, fetch if download else None)


def _read(
    name: str, paths: Callable[[], list[Path]], by_hand: str, arrays: _Arrays, fetch: Callable[[], None] | None
) -> dict[str, ImageArrays]:
    """Read a data set; if that fails, and there is `fetch`, one process at a time downloads it, until a signal ends it.

    `paths` are those of its files now, in one folder, `by_hand` is where they come from, and `arrays` reads a split.
    """
    folder = paths()[0].parent

    def read() -> dict[str, ImageArrays]:
        if missing := [path.name.removesuffix(".gz") for path in paths() if not path.is_file()]:
            problem = f"{name} is incomplete in {folder.absolute()}: {', '.join(missing)} not found there ({by_hand})"
            allowed = "data.download=true to fetch them, or data.root=<the folder that holds them>"
            raise UserError("data.root", problem, allowed)
        return {split: arrays(split) for split in ("train", "test")}

    def stop(number: int, frame: FrameType | None) -> None:
        handlers[number](number, frame)
        raise DownloadStopped("data.download", f"a signal stopped the download of {name}")

    try:
        return read()
    except UserError as error:
        if fetch is None:
            raise
        unread = error.problems[0].message
    # Only handlers of the run are wrapped: a default action ends the process anyway
    found: dict[int, Any] = {number: signal.getsignal(number) for number in STOPPING}
    handlers = {number: each for number, each in found.items() if callable(each) and each != signal.default_int_handler}
    before, reported = socket.getdefaulttimeout(), writing(folder, "data.root", "a writable folder with space")
    with listening(stop, [*map(signal.Signals, handlers)]), reported, exclusive(folder / name):
        socket.setdefaulttimeout(_SILENCE_S)
        try:
            fetch()  # only what another process has not downloaded in the meantime
        except (OSError, RuntimeError, HTTPException) as error:
            if isinstance(error, OSError) and error.errno in _OF_THE_DISK:
                raise
            problem = f"downloading {name} failed: {one_line(error)}"
            allowed = f"data.download=false with files copied by hand: {unread}"
            raise UserError("data.download", problem, allowed) from error
        finally:
            socket.setdefaulttimeout(before)
    return read()
