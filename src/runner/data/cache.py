"""Decoded and resized images kept on disk, so that each is decoded once instead of once per epoch.

A cache is two arrays and a JSON that names them: the images, (N, C, H, W), which are mapped into memory, and their targets.
The JSON says what they were made from. It is written last and in one step, so that no part of a cache can be taken for a whole.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import inspect
import json
import os
import secrets
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL
import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.base.errors import DataFailed, UserError
from runner.base.files import whole, writing
from runner.base.reading import LARGEST_TEXT, read_regular
from runner.base.secrets import mask_values
from runner.base.signals import heard
from runner.config.schema.sections import Data
from runner.data.bad_samples import ReplacementSampler, reason_of
from runner.data.loaders import BatchPlan
from runner.data.preparation import exclusive, progress
from runner.data.sampler import AllSamples
from runner.data.samples import SeededDataset
from runner.data.sources.arrays import CachedImages
from runner.data.sources.folders import ImageList
from runner.data.splits import targets_of
from runner.data.workers import WorkerLoader

DECODED_AT_ONCE = 64  # images of a batch while a cache is made
_COMPARED = 4  # images that are read again when a cache is opened
_GIB = 2**30


class Opened(NamedTuple):
    """A cache ready to be read."""

    images: CachedImages | None  # None if there are none and none are to be made, or a signal asked the run to stop
    done: str = ""  # 'opened', or 'made' and in what time
    complaint: str = ""  # why an existing file could not be used


@dataclass(frozen=True)
class Cache:
    """Where the images of a data set are kept: files of each split."""

    folder: Path
    name: str  # of the data set, for the names of the files
    recipe: dict[str, Any]  # what the data set is built from, as plain containers; another recipe gets other files
    skips: bool = False  # whether images that cannot be read are marked as such; otherwise the first one is an error

    def path(self, split: str) -> Path:
        """The JSON of a split."""
        plain = "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in self.name)
        return self.folder / f"{plain}-{split}-{_digest(self.recipe).hexdigest()[:12]}.json"

    def open(self, dataset: Dataset[Any], split: str, workers: int | None) -> Opened:
        """Open the images of a data set; they are decoded first if they are missing, damaged or of other data.

        `workers` is the number of processes that decode; None opens an existing file only.
        Raises `UserError` if the images cannot be kept, or there is no space for them.
        """
        path, key = self.path(split), cache_key(dataset, self.recipe)
        found = self._existing(path, key, dataset)
        # Without workers, the caller may read a cache but not create one
        if found.images is not None or workers is None:
            return found._replace(complaint="")
        before = len(heard)
        with writing(path, "data.cache_dir", "a writable folder, or data.cache=null"), exclusive(path) as locked:
            # Another process may have made it while this one waited for the lock.
            found = self._existing(path, key, dataset)
            if found.images is not None:
                return found
            # What cannot be used, and what killed processes have left, if no other process can be writing
            name = glob.escape(path.stem)
            for pattern in (path.name, f"{name}-*.npy", f".{name}*.tmp") if locked else ():
                for useless in path.parent.glob(pattern):
                    useless.unlink(missing_ok=True)
            began = time.perf_counter()  # after the wait for another process
            if len(heard) > before or not self._make(key, dataset, split, workers, before):
                return Opened(None)
            return Opened(_read(path, key), f"made in {time.perf_counter() - began:.1f} s", found.complaint)

    def _make(self, key: str, dataset: Dataset[Any], split: str, workers: int, before: int) -> bool:
        """Decode all images into files; False, and nothing is left, if more signals than `before` asked the run to stop."""
        path, targets, missing = self.path(split), list[Tensor](), set[int]()
        name = f"{path.stem}-{secrets.token_hex(4)}"
        arrays = [path.with_name(f"{name}.npy"), path.with_name(f"{name}-targets.npy")]
        example, everything = self._example(dataset), AllSamples(len(dataset))  # type: ignore[arg-type]
        count = len(everything)

        def say(done: int, rate: float) -> str:
            left = (count - done) / rate
            return f"caching {split}: {done:,} of {count:,} images, {rate:,.0f} a second, {left:.0f} s left"

        # Places of samples that cannot be read hold other images, which are never used.
        loader = WorkerLoader(
            SeededDataset(dataset, 0, (), ReplacementSampler(0, everything) if self.skips else None),
            BatchPlan(everything, DECODED_AT_ONCE),
            torch.device("cpu"),
            Data(dataset={}, persistent_workers=False, timeout_s=None),
            workers=workers,
            on_skipped=lambda found: missing.update(unreadable.sample for unreadable in found),
        )
        with contextlib.ExitStack() as undo:
            for array in arrays:
                undo.callback(array.unlink, missing_ok=True)
            # Written and not mapped: on a full disk, the system kills a process that writes to a mapped file
            with whole(arrays[0]) as file, contextlib.closing(loader), progress(say) as advance:
                header = {"descr": example.numpy().dtype.str, "fortran_order": False, "shape": (count, *example.shape)}
                np.lib.format.write_array_header_1_0(file, header)
                for number, batch in enumerate(loader.batches(0, 0, count), 1):
                    if len(heard) > before:
                        return False
                    if batch.images.dtype != example.dtype or batch.images.shape[1:] != example.shape:
                        problem = f"'disk' keeps uint8 images of one size, and this data set gives {_kind(example)}"
                        allowed = "data.image_size=224, for example, or data.cache=null"
                        raise UserError("data.cache", f"{problem} and {_kind(batch.images[0])}", allowed)
                    file.write(batch.images.contiguous().numpy().data)
                    targets.append(batch.targets)
                    advance(min(count, number * DECODED_AT_ONCE))
            with whole(arrays[1]) as file:
                np.save(file, torch.cat(targets).numpy())
            states = {array.name: _state(array) for array in arrays}
            known = {"made_from": mask_values(self.recipe), "key": key, "unreadable": sorted(missing), "arrays": states}
            with whole(path) as file:
                file.write(json.dumps(known, default=str).encode())
            undo.pop_all()
        return True

    def _existing(self, path: Path, key: str, dataset: Dataset[Any]) -> Opened:
        """The cache at `path`, or why it cannot be used, if there is a file."""
        if not os.path.lexists(path):
            return Opened(None)
        try:
            cached = _read(path, key)
            self._compare(cached, dataset)
        except (UserError, MemoryError):  # the data set cannot be read
            raise
        except Exception as error:  # the files may hold anything
            return Opened(None, complaint=f"{path} was rebuilt: {reason_of(error)}")
        return Opened(cached, "opened")

    def _compare(self, cached: CachedImages, dataset: Dataset[Any]) -> None:
        """Read a few samples again, as reading all would cost what the cache saves; raises `ValueError` if they differ."""
        count, missing = len(dataset), set(cached.unreadable.tolist())  # type: ignore[arg-type]
        if len(cached) != count:
            raise ValueError(f"it has {len(cached):,} images for {count:,}")
        # A cache that was made with on_error=skip has gaps, which on_error=raise must not hide
        if missing and not self.skips:
            raise ValueError(f"{len(missing):,} of its images could not be read, and data.on_error=raise")
        for place in sorted({part * (count - 1) // max(1, _COMPARED - 1) for part in range(_COMPARED)} - missing):
            try:
                image, target = SeededDataset(dataset, 0)[0, place]
            except UserError as error:
                if isinstance(error, DataFailed) or not self.skips:
                    raise
                raise ValueError(f"image {place} cannot be read any more") from error
            if not (_same(cached.images[place], image) and _same(cached.targets[place], target)):
                raise ValueError(f"image {place} differs from the data set")

    def _example(self, dataset: Dataset[Any]) -> Tensor:
        """The first image that can be read; raises `UserError` if it is not of a kind that can be kept, or does not fit."""

        # Twice, because a data set that draws random numbers would be frozen in one version of each image
        def read_twice(index: int) -> list[tuple[Tensor, Tensor]]:
            return SeededDataset(dataset, 0).items([(0, index), (1, index)])

        everything = AllSamples(len(dataset))  # type: ignore[arg-type]
        chooser = ReplacementSampler(0, everything)
        (image, target), (again, _) = chooser.read(read_twice, 0, 0, []) if self.skips else read_twice(0)
        problem = ""
        if image.dtype != torch.uint8 and not isinstance(dataset, ImageList):
            problem = f"keeps uint8 images, and this data set gives {_kind(image)}"
        elif target.is_complex():
            problem = "keeps targets that are real numbers, and this data set gives complex ones"
        elif not _same(image, again):
            problem = "would keep one random version of each image: this data set draws another at every reading"
        if problem:
            allowed = "data.cache=null, or uint8 images, real targets and random changes in the section transform"
            raise UserError("data.cache", f"'disk' {problem}", allowed)
        # The disk is checked before hours of decoding
        needed = len(everything) * (image.nbytes + target.nbytes)
        if needed > (free := shutil.disk_usage(self.folder).free):
            amounts = f"{needed / _GIB:.2f} GiB, and {self.folder} has {free / _GIB:.2f} GiB free"
            allowed = "data.cache_dir on another disk, a smaller data.image_size, or data.cache=null"
            raise UserError("data.cache", f"{len(everything):,} images of {_kind(image)} need {amounts}", allowed)
        return image


def _read(path: Path, key: str) -> CachedImages:
    """The images of a cache; raises any error if it is damaged, or was made from something else."""
    known = json.loads(read_regular(path, LARGEST_TEXT))
    if known["key"] != key:
        raise ValueError("it was made from other files, settings or library versions")
    images, targets = (path.with_name(name) for name in known["arrays"])
    for array in (images, targets):
        if _state(array) != known["arrays"][array.name]:
            raise ValueError(f"{array.name} was changed after it was made")
    unreadable = torch.tensor(known["unreadable"], dtype=torch.int64)
    return CachedImages(images, torch.from_numpy(np.load(targets, allow_pickle=False)), unreadable)


def _state(path: Path) -> list[int]:
    """The size and time of a file, which show that it was changed without reading it."""
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]


def _digest(recipe: dict[str, Any]) -> Any:
    return hashlib.sha256(json.dumps(recipe, sort_keys=True, default=str).encode())


def recipe_of(data: Data) -> dict[str, Any]:
    """What the data sets are built from, for `cache_key`."""
    # Other decoders give the same pixels on the host, and share caches
    decoder = {"decode": data.decode} if data.decode == "torchcodec" else {}
    return {"dataset": {**data.dataset}, "root": data.location, "image_size": data.image_size, **decoder}


def cache_key(dataset: Dataset[Any], recipe: dict[str, Any]) -> str:
    """A digest of all that the images of a data set depend on, as far as is known without reading them.

    A data set may define it with a method `fingerprint`. Otherwise it covers the recipe, the length, the targets, the
    file that defines the class, and the versions of the libraries that decode.
    """
    fingerprint = getattr(dataset, "fingerprint", None)
    if callable(fingerprint):
        return hashlib.sha256(str(fingerprint()).encode()).hexdigest()
    # Without a fingerprint of its own, a data set is identified by all that is known about it
    digest, kind = _digest(recipe), type(dataset)
    digest.update(repr((kind.__qualname__, len(dataset), torch.__version__, PIL.__version__)).encode())  # type: ignore[arg-type]
    targets = targets_of(dataset)
    if targets is not None:
        digest.update(targets.numpy().tobytes())
    with contextlib.suppress(TypeError, OSError):  # a class without a source file
        digest.update(Path(inspect.getfile(kind)).read_bytes())
    return str(digest.hexdigest())


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def _kind(image: Tensor) -> str:
    return f"{str(image.dtype).removeprefix('torch.')} {'x'.join(map(str, image.shape))}"
