"""Data sets whose samples are not pairs of image and target (`data.images` is set): batches are what a function makes of them."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from runner.base.cores import cores
from runner.base.errors import UserError
from runner.config.schema.train import Train
from runner.config.targets import resolve
from runner.data.bad_samples import BadSampleLog, ReplacementSampler
from runner.data.dataset_fingerprint import fingerprint_data
from runner.data.loaders import Batch, Fields
from runner.data.module import (
    DataModule,
    SplitData,
    as_splits,
    batch_plan,
    callables,
    make_callable,
    read_dataset,
    use_batch_sampler,
)
from runner.data.num_workers import choose_num_workers
from runner.data.sampler import AllSamples
from runner.data.samples import Collate, SeededDataset, stacked
from runner.data.sources.folders import ImageFolder
from runner.data.sources.image_io import Decoding
from runner.data.splits import Parts, make_splits
from runner.data.transforms.augment import Pipeline
from runner.data.workers import WorkerLoader, as_numbers, worker_options
from runner.instrument.nested import mapped_items, tensors_in, tensors_moved

_TRIED = 2  # samples


class ImageSamples(ImageFolder):
    """Image files as samples without a target: (image, 0), or {field: image}; images are tv_tensors, uint8 (C, H, W)."""

    field = "0"

    def __getitem__(self, index: int) -> Any:
        from torchvision.tv_tensors import Image  # takes a second, and few runs need it

        image = Image(super().__getitem__(index)[0])
        return (image, 0) if self.field == "0" else {self.field: image}


class _Loaders:
    """Builds the loaders of the splits; `workers` read the samples, 0 for this process."""

    workers = 0

    def __init__(self, config: Train, device: torch.device, parts: Parts, dtype: torch.dtype) -> None:
        data, self.config, self.device, self.parts = config.data, config, device, parts
        assert data.images is not None, "samples are pairs of image and target"
        # The task is built later, as it has to know the data; how it makes batches is a matter of its class
        of_task = getattr(resolve(config.task["_target_"]), "collate", None)
        collate = of_task if data.collate is None else make_callable("data.collate", data.collate)
        self.make_batch, (mean, std) = Collate(collate or stacked), (data.normalize.mean, data.normalize.std)
        last = config.channels_last
        self.prepare = Pipeline([], mean or [0.0], std or [1.0], config.seed, device, channels_last=last, dtype=dtype)
        self.fields, self.bad_samples = Fields(data.images, self.prepare, dtype), BadSampleLog(data.max_skipped)

    def reader(self, name: str, training: bool) -> SeededDataset:
        """Reads samples of a split, as training or evaluations get them."""
        (dataset, indices), transform = self.parts[name], self.config.transform
        key, nodes = ("train", transform.sample_train) if training else ("eval", transform.sample_eval)
        skips = self.config.data.on_error == "skip"
        replacements = ReplacementSampler(self.config.seed, indices) if skips else None
        transforms = callables(f"transform.sample_{key}", nodes)
        return SeededDataset(dataset, self.config.seed, transforms, replacements, name, pairs=False)

    def first(self, name: str, batch_size: int, training: bool = False) -> tuple[torch.Tensor, Sequence[Any]]:
        """The indices of the first samples of a split, at most two and a batch, and these samples."""
        indices = self.parts[name][1][: min(_TRIED, batch_size)]
        return indices, self.reader(name, training).__getitems__([(0, index) for index in indices.tolist()])

    def build(self, name: str, training: bool = False) -> WorkerLoader:
        """The loader of a split."""
        dataset, indices = self.parts[name]
        return WorkerLoader(
            self.reader(name, training),
            batch_plan(self.config, indices, training),
            self.device,
            workers=self.workers,
            prepare=self.fields,
            on_skipped=self.bad_samples.noting(name, dataset, len(indices)),
            collate=self.make_batch,
            **worker_options(self.config.data, self.device),
        )


def read_image_files(config: Train, device: torch.device, paths: Sequence[Path]) -> tuple[WorkerLoader, BadSampleLog]:
    """A loader of image files in their order, as `ImageSamples`; and its unreadable files.

    Files are RGB, or grey if `data.dataset.channels` or else `model.in_channels` is 1. Raises `UserError` if samples are not
    made of one image.
    """
    data, count, fields = config.data, len(paths), config.data.images or []
    if len(fields) != 1 or (fields[0].isdigit() and fields[0] != "0"):
        problem = f"files are images, and data.images={fields} does not say which field of a sample is the image"
        raise UserError("input", problem, "train, val or test, a split of the data; or a model with one such field")
    channels: Literal[1, 3] = 1 if data.dataset.get("channels", config.model.get("in_channels")) == 1 else 3
    files = ImageSamples(paths, torch.zeros(count), (), Decoding(None, channels, max_pixels=data.max_pixels))
    files.field = fields[0]
    loaders = _Loaders(config, device, {"input": (files, AllSamples(count))}, getattr(torch, config.dtype))
    # A few images are read sooner than workers start
    loaders.workers = data.num_workers if data.num_workers != "auto" else min(cores(), 8) if count >= 64 else 0
    return loaders.build("input"), loaders.bad_samples


def read_whole_samples(config: Train, device: torch.device, *, dtype: torch.dtype) -> DataModule:
    """Read a data set of any samples and prepare its splits.

    Args:
        config: the config.
        device: of the batches.
        dtype: of images after their normalisation, and with float64 of all floating-point numbers.

    Raises:
        UserError: if the data cannot be found, read or split, or do not fit the settings.
    """
    data = config.data
    parts = make_splits(as_splits(read_dataset(data)), data.split)
    loaders = _Loaders(config, device, parts, dtype)
    fields, prepare, bad_samples = loaders.fields, loaders.prepare, loaders.bad_samples

    # The first samples tell how large batches are, and are tried before training
    tried, items = loaders.first("train", data.samples_a_batch, training=True)

    def batch(samples: Sequence[Any], indices: torch.Tensor) -> Batch:
        # A collation may change what it is given
        read = loaders.make_batch([copy.deepcopy(sample) for sample in samples])
        moved = tensors_moved(mapped_items(read.data, np.ndarray, as_numbers), device)
        return Batch(fields.of(moved), indices.to(device))

    def repeated(samples: int) -> Batch:
        places = torch.arange(samples) % len(items)
        return batch([items[place] for place in places.tolist()], tried[places])

    def evaluated() -> Batch:
        name = next(each for each in ("val", "test", "train") if each in parts)
        indices, samples = loaders.first(name, config.evaluate.batch_size)
        return batch(samples, indices)

    sample_bytes = sum(each.nbytes for each in tensors_in(mapped_items([*items], np.ndarray, as_numbers))) // len(items)
    choice = choose_num_workers(
        data.num_workers,
        loaders.reader("train", True),
        parts["train"][1],
        data.samples_a_batch,
        bytes_ahead=data.prefetch * (data.samples_a_batch + config.evaluate.batch_size) * sample_bytes,
    )
    loaders.workers = choice.workers

    def split(name: str, training: bool = False) -> SplitData:
        return SplitData(loaders.build(name, training), prepare)

    train = split("train", training=True)
    use_batch_sampler(config, train.loader, parts)
    sources, full = {name: dataset for name, (dataset, _) in parts.items()}, data.identity == "full"
    return DataModule(
        train=train,
        val=split("val") if "val" in parts else None,
        test=split("test") if "test" in parts else None,
        train_for_eval=split("train"),
        classes=tuple(str(name) for name in getattr(parts["train"][0], "classes", None) or ()),
        class_counts=None,
        channels=0,
        image_size=(0, 0),
        mean=[],
        std=[],
        example=(torch.empty(0, device=device), torch.empty(0, device=device)),
        choices=[("workers", str(choice.workers), choice.reason)] if choice.reason else [],
        warnings=choice.warnings,
        bad_samples=bad_samples,
        fingerprint=functools.cache(functools.partial(fingerprint_data, parts, sources, full, pairs=False)),
        parts=parts,
        trial=repeated(len(tried)),
        repeated=repeated,
        evaluated=evaluated,
    )
