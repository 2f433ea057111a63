"""Where images live and who reads them: in memory, in a cache file, or through workers; every choice with its reason."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
import torch
from PIL import Image
from torch.utils.data import Dataset, Subset, TensorDataset

from runner.base.cores import cores
from runner.base.errors import UserError
from runner.config.schema.sections import Data
from runner.data.cache import DECODED_AT_ONCE, Cache, recipe_of
from runner.data.module import DataModule
from runner.data.samples import crops_while_decoding
from runner.data.sources.arrays import CachedImages, ImageArrays
from runner.data.sources.folders import ImageList
from runner.data.sources.image_io import Encoded, decoded

_DECODES = "cuda"  # devices with a decoder of JPEGs
_SHARE_OF_DEVICE = 0.3  # of the free memory of a GPU that images may take
_GIB = 2**30
_MOST, _FEW = 8, 64  # workers, samples
_SHARED_MEMORY = Path("/dev/shm")  # where workers put their batches, on Linux


@dataclass(frozen=True)
class WorkerChoice:
    """The worker processes (0 reads in the main one), the reason (empty if they were set), and problems to expect."""

    workers: int
    reason: str = ""
    warnings: list[str] = field(default_factory=list)


def choose_num_workers(
    wanted: int | Literal["auto"], samples: int, *, arrays: bool = False, bytes_ahead: int = 0
) -> WorkerChoice:
    """Choose how many workers read `samples`: if `wanted` is 'auto', as many as there are cores, at most 8.

    None read what is read sooner than they start: `arrays` in memory, and fewer than 64 samples.

    `bytes_ahead` are the bytes of all batches that one worker of every loader may hold at the same time.
    """
    # Workers hold their batches in shared memory, which is small in containers: exceeding it kills a worker
    room = 0 if sys.platform == "linux" else sys.maxsize
    if _SHARED_MEMORY.is_dir():
        room = shutil.disk_usage(_SHARED_MEMORY).free // max(1, bytes_ahead)
    if wanted != "auto":
        held = f"{room} whose batches {_SHARED_MEMORY} has room for: set a smaller data.prefetch, or give the container more"
        limits = {f"{cores()} available CPU cores": cores(), held: room}
        warnings = [
            f"data.num_workers={wanted} is more than the {what}" for what, most in limits.items() if wanted > most
        ]
        return WorkerChoice(wanted, warnings=warnings)
    if arrays or samples < _FEW:  # few samples are read before a process has started
        return WorkerChoice(0, f"auto: {'the samples are in memory' if arrays else f'fewer than {_FEW} samples'}")
    reasons = {
        _MOST: f"at most {_MOST}",
        cores(): f"{cores()} cores",
        room: f"as many as {_SHARED_MEMORY} has room for",
    }
    return WorkerChoice(min(reasons), f"auto: {reasons[min(reasons)]}")


def place(made: DataModule, sample_bytes: int, make_cache: bool = True) -> None:
    """Decide how the splits are read, and make their cache if there is to be one.

    `sample_bytes` is the size of a sample as it is read; `make_cache=False` uses an existing cache and makes none.

    Raises:
        UserError: if settings contradict each other, or the cache cannot be made.
    """
    data, (train, indices), new = made.config.data, made.parts["train"], False
    if data.decode == "device" and made.pairs and (problem := next(_undecodable(made), None)):
        raise UserError("data.decode", f"is device, {problem}", "auto, pillow or torchcodec, which decode on the host")
    # An evaluation inside an epoch reads while workers hold batches of training; a cache is made before both.
    ahead = max(
        data.samples_a_batch + made.config.evaluate.batch_size, DECODED_AT_ONCE if data.cache is not None else 0
    )
    # Transforms of a sample may take long, unless the samples are images that batches are made of at once
    arrays = isinstance(train, ImageArrays) or (holds_tensors(train) and not made.sample_train)
    bytes_ahead = data.prefetch * ahead * sample_bytes
    choice = choose_num_workers(data.num_workers, len(indices), arrays=arrays, bytes_ahead=bytes_ahead)
    # The cache comes first, as images may be placed from it
    if data.cache is not None:
        for key, some, splits in (("train", made.sample_train, ["train"]), ("eval", made.sample_eval, [*made.parts])):
            if any(crops_while_decoding(made.parts[split][0], some) for split in splits):
                problem = f"'disk' keeps central squares, and transform.sample_{key}.0 crops from whole images"
                allowed = f"data.cache=null, or batch transforms in transform.{key} instead"
                raise UserError("data.cache", problem, allowed)
        new = _open_caches(made, choice.workers if make_cache else None)
    elif made.pairs and data.cache_dir is not None and not (isinstance(train, ImageList) and train.indexed):
        made.warnings.append("data.cache_dir has no effect: data.cache is null")
    if made.pairs:
        _place_images(made)
    # Workers that made a cache are shown, even if none is needed afterwards
    if made.in_memory is None:
        made.workers = choice.workers
    if made.in_memory is None or new:
        made.choices += [("workers", str(choice.workers), choice.reason)] if choice.reason else []
        made.warnings += choice.warnings
    made.warnings += _without_effect(made) if made.pairs else []


def _undecodable(made: DataModule) -> Iterator[str]:
    """Why the device cannot decode the images, or what needs their pixels before."""
    if made.device.type != _DECODES:
        yield f"which decodes JPEGs with CUDA, and this run uses {made.device}"
    for dataset, _ in made.parts.values():
        if not isinstance(dataset, ImageList):
            yield "which decodes image files, and the data set gives decoded images"
        for key, transforms in (("train", made.sample_train), ("eval", made.sample_eval)):
            if transforms[crops_while_decoding(dataset, transforms) :]:
                yield f"which decodes where batches are made, and transform.sample_{key} needs decoded images"
    Image.new("RGB", (8, 8)).save(file := io.BytesIO(), "JPEG")
    if decoded([Encoded(file.getvalue(), 1, (0, 0, 8, 8), (3, 8, 8))], made.device)[0] is None:
        yield f"and torchvision cannot decode a JPEG on {made.device}"


def holds_tensors(dataset: Dataset[Any]) -> bool:
    """Tell whether a data set holds its samples as tensors."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return isinstance(dataset, ImageArrays | TensorDataset)


def _open_caches(made: DataModule, workers: int | None) -> bool:
    """Open or make the cache of every data set that is not in memory, in `data.cache_dir` or beside its images.

    All of them or none: batches of both kinds would mix two ways of reading. Returns whether one was made.
    """
    # Splits may share a data set, which is cached once
    data, needed = made.config.data, dict[int, tuple[str, Dataset[Any]]]()
    for split, (dataset, _) in made.parts.items():
        if not isinstance(dataset, ImageArrays):
            needed.setdefault(id(dataset), (split, dataset))
    if not needed:
        made.warnings.append("data.cache=disk has no effect: the images are in memory")
    cache, new = Cache(Path(data.cache_folder), data.name, recipe_of(data), data.on_error == "skip"), False
    for split, dataset in needed.values():
        opened = cache.open(dataset, split, workers)
        if opened.images is None:
            made.caches.clear()
            made.choices.clear()
            if workers is not None:
                made.warnings.append("data.cache was not made: a signal asks the run to stop")
            return new
        made.caches[id(dataset)] = opened.images
        new |= opened.done != "opened"
        made.choices.append((f"{split} cache", str(cache.path(split)), opened.done))
        made.warnings += [opened.complaint] if opened.complaint else []
    return new


def _place_images(made: DataModule) -> None:
    """Decide where images live: on a device, in RAM, in a cache file, or on disk, read through workers."""
    data, wanted, transforms = made.config.data, made.config.data.placement, made.sample_train or made.sample_eval
    # Only arrays can live in memory; a cache file is one too. The sizes of all data sets count together
    sources: dict[int, Any] = {id(source): source for source in made.sources.values()}
    possible = all(isinstance(source, ImageArrays | CachedImages) for source in sources.values())
    if wanted in ("device", "ram") and not possible:
        if data.cache is None:
            problem = f"'{wanted}' needs a data set of image tensors in memory"
            raise UserError("data.placement", problem, "auto or disk, or data.cache=disk")
        # A missing cache is not the mistake of the user, while images that are read one by one cannot be placed in memory.
        made.warnings.append(f"data.placement={wanted} has no effect: data.cache was not made")
    # Sample transforms run in worker processes, so images have to be read one by one
    if wanted == "disk" or not possible or transforms:
        reason = "transform has sample transforms" if transforms else "images are read one by one"
        made.choices.insert(0, ("data path", "workers", "as set" if wanted == "disk" else reason))
        return
    size, cached = sum(source.images.nbytes for source in sources.values()), bool(made.caches)
    home, reason = _choose_home(wanted, size, made.device)
    if wanted == "ram" and cached:
        available = psutil.virtual_memory().available
        _require(size, available, "ram", "are available", "auto, which reads from the cache file")
    made.in_memory = home
    value = f"on {home}" if home.type != "cpu" else "in RAM" if wanted == "ram" or not cached else "cache file"
    made.choices.insert(0, ("data path", value, reason))


def _choose_home(wanted: str, size: int, device: torch.device) -> tuple[torch.device, str]:
    """Where images of `size` bytes live, and why: on the device if they are to or fit well, else in CPU memory."""
    number = f"{size / 2**20:.1f} MiB" if size >= 2**16 else f"{size / 2**10:.1f} KiB"
    shown, cpu = f"{number} of images", torch.device("cpu")
    if wanted == "ram" or device.type == "cpu":
        return cpu, f"{shown}, and the CPU computes" if wanted == "auto" else "as set"
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
        if wanted == "auto" and size > _SHARE_OF_DEVICE * free:
            return cpu, f"{shown} are over {_SHARE_OF_DEVICE:.0%} of the device's free memory"
        if wanted == "device":
            # torch returns its reserved memory when an allocation needs it.
            free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
            _require(size, free, "device", f"on {device} are free", "auto or ram, which keep the images in CPU memory")
    return device, "as set" if wanted == "device" else f"{shown} fit"


def _require(size: int, free: int, what: str, where: str, allowed: str) -> None:
    if size > free:
        problem = f"'{what}' needs {size / _GIB:.1f} GiB, and {free / _GIB:.1f} GiB {where}"
        raise UserError("data.placement", problem, allowed)


def _without_effect(made: DataModule) -> list[str]:
    """Settings that differ from the default, as only those were asked for, and change nothing in this run."""
    data, on_cpu, on_cuda = made.config.data, made.device.type == "cpu", made.device.type == "cuda"
    resident, idle = made.in_memory is not None, "no worker process reads"
    if resident:
        idle = "the images are in memory (data.placement=disk reads them through workers)"
    files = any(isinstance(dataset, ImageList) for dataset, _ in made.parts.values())
    rows = (
        (made.workers == 0, "prefetch persistent_workers timeout_s", idle),
        (not files, "decode", "the data set decodes its images itself"),
        (resident and data.num_workers != 0 and not made.caches, "num_workers", idle),
        (resident and on_cuda, "pin_memory", idle),
        (data.pin_memory is True and not on_cuda, "pin_memory", "it is for copies to a CUDA device"),
        (resident and not on_cpu, "non_blocking", idle),
        (on_cpu, "non_blocking", "nothing is copied to another device"),
        (on_cpu and data.placement == "device", "placement", "the device is the CPU"),
    )
    reasons = {key: reason for useless, keys, reason in rows if useless for key in keys.split()}
    values = {key: value for key in reasons if (value := getattr(data, key)) != getattr(Data, key)}
    shown = {key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()}
    return [f"data.{key}={value} has no effect: {reasons[key]}" for key, value in shown.items()]
