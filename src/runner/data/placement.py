"""Where images live and who reads them: in memory, in a cache file, or through workers; every choice with its reason."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.config.errors import UserError
from runner.config.schema.sections import Data
from runner.data.bad_samples import ReplacementSampler
from runner.data.cache import DECODED_AT_ONCE, Cache
from runner.data.cache_file import CachedImages
from runner.data.indices import Indices
from runner.data.num_workers import WorkerChoice, choose_num_workers
from runner.data.samples import SampleTransform, crops_while_decoding
from runner.data.sources.arrays import ImageArrays
from runner.data.sources.stored_images import StoredImages

_SHARE_OF_DEVICE = 0.3  # of the free memory of a GPU that images may take

Parts = Mapping[str, tuple[Dataset[Any], Indices]]
"""For each split the data set that it is read from, and its samples in it."""
Row = tuple[str, str, str]
"""Label, value and reason of a choice, for people."""


@dataclass
class DataPlacement:
    """How the splits are read.

    Attributes:
        in_memory: where images are gathered from; None to read them one by one.
        workers: processes that read them one by one.
        pin: whether batches that are read one by one go through page-locked memory.
        choices: rows of (label, value, reason) for people.
        warnings: settings without effect, and what else people should know.
    """

    in_memory: torch.device | None = None
    workers: int = 0
    pin: bool = False
    choices: list[Row] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    _caches: dict[int, CachedImages] = field(default_factory=dict)
    _stored: dict[int, tuple[Tensor | StoredImages, Tensor]] = field(default_factory=dict)
    _in_ram: bool = False
    _cache_missing: bool = False

    def source(self, dataset: Dataset[Any]) -> Dataset[Any]:
        """What is read in place of a data set: its cache, or itself."""
        return self._caches.get(id(dataset), dataset)

    def unreadable(self, dataset: Dataset[Any]) -> Tensor:
        """Samples of a data set of which it is known that they cannot be read, int64 (U,)."""
        source = self.source(dataset)
        return source.unreadable if isinstance(source, CachedImages) else torch.zeros(0, dtype=torch.int64)

    def stored(self, dataset: Dataset[Any]) -> tuple[Tensor | StoredImages, Tensor]:
        """All images and targets of a data set, where they are to stay; the same tensors at every call."""
        assert self.in_memory is not None, "the images are read one by one"
        if id(dataset) not in self._stored:
            source = self.source(dataset)
            assert isinstance(source, ImageArrays | CachedImages)
            images: Tensor | StoredImages = source.images
            if isinstance(images, Tensor):
                images = images.to(self.in_memory)
            elif self._in_ram or self.in_memory.type != "cpu":
                images = images.copied(self.in_memory)
            self._stored[id(dataset)] = images, source.targets.to(self.in_memory)
        return self._stored[id(dataset)]


def plan_placement(
    data: Data,
    parts: Parts,
    sample_train: Sequence[SampleTransform],
    sample_eval: Sequence[SampleTransform],
    device: torch.device,
    example: Tensor,
    eval_batch_size: int,
    make_cache: bool = True,
) -> DataPlacement:
    """Decide how the splits are read, and make their cache if there is to be one.

    Args:
        data: section of the config.
        parts: the splits.
        sample_train, sample_eval: transforms of one image.
        device: where batches are wanted.
        example: an image as it is read.
        eval_batch_size: samples of a batch of an evaluation.
        make_cache: False uses a cache that is there and makes none.

    Raises:
        UserError: if settings contradict each other, or the cache cannot be made.
    """
    plan = DataPlacement()
    train, indices = parts["train"]
    replacements = ReplacementSampler(0, indices) if data.on_error == "skip" else None
    # An evaluation inside an epoch reads while workers hold batches of training; a cache is made by itself.
    ahead = max(data.samples_a_batch + eval_batch_size, DECODED_AT_ONCE if data.cache is not None else 0)

    def crew(dataset: Dataset[Any]) -> WorkerChoice:
        size, wanted = data.samples_a_batch, data.num_workers
        return choose_num_workers(
            wanted, data.prefetch, dataset, indices, sample_train, size, ahead, example.nbytes, replacements
        )

    decoding = functools.cache(lambda: crew(train))  # asked only if there is a cache to be made
    if data.cache is not None:
        _require_whole_images_unwanted(parts, sample_train, sample_eval)
        _fill_caches(plan, data, parts, (lambda: decoding().workers) if make_cache else None)
    elif data.cache_dir is not None:
        plan.warnings.append("data.cache_dir has no effect: data.cache is null")
    sources = {id(dataset): plan.source(dataset) for dataset, _ in parts.values()}
    _place(plan, data, list(sources.values()), bool(sample_train or sample_eval), device)
    asked = decoding() if decoding.cache_info().currsize else None
    if plan.in_memory is None:
        asked = crew(plan.source(train))
        plan.workers = asked.workers
        plan.pin = device.type == "cuda" and data.pin_memory is not False
    if asked is not None:
        if asked.reason:
            plan.choices.append(("workers", str(asked.workers), asked.reason))
        plan.warnings += asked.warnings
    plan.warnings += _without_effect(plan, data, device)
    return plan


def _require_whole_images_unwanted(
    parts: Parts, sample_train: Sequence[SampleTransform], sample_eval: Sequence[SampleTransform]
) -> None:
    """Refuse a cache of middle squares where a transform is to cut from whole images; evaluation reads every split."""
    key = None
    if crops_while_decoding(parts["train"][0], sample_train):
        key = "sample_train"
    elif any(crops_while_decoding(dataset, sample_eval) for dataset, _ in parts.values()):
        key = "sample_eval"
    if key is not None:
        raise UserError(
            f"data.cache: 'disk' keeps the middle squares of images, and transform.{key}.0 cuts from whole images\n"
            f"    allowed: data.cache=null, or batch transforms in transform.{key.removeprefix('sample_')} in its place"
        )


def _fill_caches(plan: DataPlacement, data: Data, parts: Parts, workers: Callable[[], int] | None) -> None:
    """Open or make the cache of every data set that is not in memory as it is."""
    needed: dict[int, tuple[str, Dataset[Any]]] = {}
    for split, (dataset, _) in parts.items():
        if not isinstance(dataset, ImageArrays):
            needed.setdefault(id(dataset), (split, dataset))
    if not needed:
        plan.warnings.append("data.cache=disk has no effect: the images are in memory")
        return
    cache = cache_of(data)
    for split, dataset in needed.values():
        opened = cache.open(dataset, split, workers)
        if opened.images is None:
            plan._cache_missing = True
            plan._caches.clear()
            plan.choices.clear()
            if workers is not None:
                plan.warnings.append("data.cache was not made: a signal asks the run to stop")
            return
        plan._caches[id(dataset)] = opened.images
        plan.choices.append((f"{split} cache", str(cache.path(split)), opened.done))
        if opened.complaint:
            plan.warnings.append(opened.complaint)


def cache_of(data: Data) -> Cache:
    """Where the images of a data set are kept: in `data.cache_dir`, or beside the folder that they are read from."""
    root = Path(data.dataset.get("root") or data.root).expanduser().absolute()
    folder = Path(data.cache_dir).expanduser() if data.cache_dir is not None else root.with_name(f"{root.name}.cache")
    recipe = {"dataset": data.dataset, "root": str(root), "image_size": data.image_size}
    return Cache(folder, data.name, recipe, data.on_error == "skip")


def _place(
    plan: DataPlacement, data: Data, sources: Sequence[Dataset[Any]], sample_transforms: bool, device: torch.device
) -> None:
    """Decide where images live: on a device, in RAM, in a cache file, or on the disk to be read through workers."""
    arrays = [source for source in sources if isinstance(source, ImageArrays | CachedImages)]
    possible = len(arrays) == len(sources)
    if data.placement in ("device", "ram") and not possible:
        if not plan._cache_missing:
            raise UserError(
                f"data.placement: '{data.placement}' needs a data set of image tensors in memory\n"
                "    allowed: auto or disk, or data.cache=disk"
            )
        plan.warnings.append(f"data.placement={data.placement} has no effect: the cache of data.cache is not there")
    if data.placement == "disk" or not possible or sample_transforms:
        reason = "images are read one by one"
        if data.placement == "disk":
            reason = "as set"
        elif sample_transforms:
            reason = "transform has sample transforms"
        plan.choices.insert(0, ("data path", "workers", reason))
        return
    cached = any(isinstance(source, CachedImages) for source in arrays)
    size = sum(source.images.nbytes for source in arrays)
    where, value, reason = _home(data, size, cached, device)
    if where.type == "cpu" and cached and value == "in RAM":
        _require_memory(size)
        plan._in_ram = True
    plan.in_memory = where
    plan.choices.insert(0, ("data path", value, reason))


def _home(data: Data, size: int, cached: bool, device: torch.device) -> tuple[torch.device, str, str]:
    """Where tensors of this size live, in words, and why."""
    cpu, shown = torch.device("cpu"), f"{size / 2**20:.1f} MiB of images"
    if data.placement == "ram":
        return cpu, "in RAM", "as set"
    home = "cache file" if cached else "in RAM"
    if device.type == "cpu":
        return cpu, home, "as set" if data.placement == "device" else f"{shown}, and the CPU computes"
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if data.placement == "device":
            _require_device_memory(size, free, device)
        elif size > _SHARE_OF_DEVICE * free:
            return cpu, home, f"{shown} are over {_SHARE_OF_DEVICE:.0%} of the device's free memory"
    return device, f"on {device}", "as set" if data.placement == "device" else f"{shown} fit"


def _require_memory(size: int) -> None:
    available = psutil.virtual_memory().available
    if size > available:
        raise UserError(
            f"data.placement: 'ram' needs {size / 2**30:.1f} GiB, and {available / 2**30:.1f} GiB are available\n"
            "    allowed: auto, which reads from the cache file and leaves to the system what is in RAM"
        )


def _require_device_memory(size: int, free: int, device: torch.device) -> None:
    # What torch keeps for later it gives back when an allocation needs it.
    available = free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if size > available:
        raise UserError(
            f"data.placement: 'device' needs {size / 2**30:.1f} GiB, and {device} has {available / 2**30:.1f} GiB free\n"
            "    allowed: auto or ram, which leave the images in the memory of the CPU"
        )


def _without_effect(plan: DataPlacement, data: Data, device: torch.device) -> list[str]:
    """What was set to something else than the default and changes nothing in this run."""
    useless: list[str] = []

    def say(setting: str, reason: str) -> None:
        useless.append(f"{setting} has no effect: {reason}")

    if data.placement == "device" and device.type == "cpu":
        say("data.placement=device", "the device is the CPU")
    if plan.in_memory is not None:
        reason = "the images are in memory (data.placement=disk reads them through workers)"
        if isinstance(data.num_workers, int) and data.num_workers > 0 and not plan._caches:
            say(f"data.num_workers={data.num_workers}", reason)
    else:
        reason = "no worker process reads"
    if plan.workers == 0:
        if data.prefetch != Data.prefetch:
            say(f"data.prefetch={data.prefetch}", reason)
        if not data.persistent_workers:
            say("data.persistent_workers=false", reason)
        if data.timeout_s != Data.timeout_s:
            say(f"data.timeout_s={_number(data.timeout_s)}", reason)
    if data.pin_memory is True and device.type != "cuda":
        say("data.pin_memory=true", f"it is for copies to a GPU of CUDA's, and the device is {device.type}")
    elif data.pin_memory != Data.pin_memory and device.type == "cuda" and plan.in_memory is not None:
        say(f"data.pin_memory={str(data.pin_memory).lower()}", reason)
    if not data.non_blocking:
        if device.type == "cpu":
            say("data.non_blocking=false", "nothing is copied to another device")
        elif plan.in_memory is not None:
            say("data.non_blocking=false", reason)
    return useless


def _number(value: float | None) -> str:
    return "null" if value is None else f"{value:g}"
