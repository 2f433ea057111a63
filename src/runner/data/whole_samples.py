"""Data sets whose samples are not pairs of image and target (`data.images` is set): batches are what a function makes of them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from runner.base.errors import UserError
from runner.config.schema.train import Train
from runner.config.targets import resolve
from runner.data.bad_samples import BadSamples
from runner.data.loaders import Batch, Fields, Loader
from runner.data.module import DataModule, LoaderBuilder, SplitData, as_splits, assembled, make_callable, read_dataset
from runner.data.num_workers import choose_num_workers, workers_for_files
from runner.data.sampler import AllSamples
from runner.data.samples import Collate, stacked
from runner.data.sources.folders import ImageFolder, ImageList
from runner.data.sources.image_io import Decoding
from runner.data.splits import make_splits
from runner.data.transforms.augment import Pipeline, as_shown
from runner.data.workers import as_numbers
from runner.instrument.nested import mapped_items, tensors_in, tensors_moved

_TRIED = 2  # samples


class ImageSamples(ImageFolder):
    """Image files as samples without a target: (image, 0), or {field: image}; images are tv_tensors, uint8 (C, H, W)."""

    field = "0"

    def __getitem__(self, index: int) -> Any:
        from torchvision.tv_tensors import Image  # takes a second, and few runs need it

        image = Image(super().__getitem__(index)[0])
        return (image, 0) if self.field == "0" else {self.field: image}


def _batches(config: Train, device: torch.device, dtype: torch.dtype) -> tuple[Collate, Fields, Pipeline]:
    """What makes a batch of samples, what prepares the images in it, and the part of that for one image."""
    data = config.data
    assert data.images is not None, "samples are pairs of image and target"
    # The task is built later, as it has to know the data; how it makes batches is a matter of its class
    of_task = getattr(resolve(config.task["_target_"]), "collate", None)
    collate = of_task if data.collate is None else make_callable("data.collate", data.collate)
    mean, std, last = data.normalize.mean or [0.0], data.normalize.std or [1.0], config.channels_last
    prepare = Pipeline([], mean, std, config.seed, device, channels_last=last, dtype=dtype)
    return Collate(collate or stacked), Fields(data.images, prepare, dtype), prepare


def read_image_files(config: Train, device: torch.device, paths: Sequence[Path]) -> tuple[Loader, BadSamples]:
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
    loaders = LoaderBuilder(config, device, {"input": (files, AllSamples(count))})
    loaders.placement.workers = workers_for_files(data.num_workers, count)
    collate, prepare, _ = _batches(config, device, getattr(torch, config.dtype))
    return loaders.build("input", False, prepare, collate=collate), loaders.bad_samples


def read_whole_samples(config: Train, device: torch.device, *, make_cache: bool, dtype: torch.dtype) -> DataModule:
    """Read a data set of any samples and prepare its splits.

    Args:
        config: the config.
        device: of the batches.
        make_cache: keep indexes of the files that are not kept yet.
        dtype: of images after their normalisation, and with float64 of all floating-point numbers.

    Raises:
        UserError: if the data cannot be found, read or split, or do not fit the settings.
    """
    data = config.data
    parts = make_splits(as_splits(read_dataset(data)), data.split)
    train = parts["train"][0]
    unkept = train.keep_indexes(make_cache) if isinstance(train, ImageList) else []
    loaders = LoaderBuilder(config, device, parts)
    collate, fields, prepare = _batches(config, device, dtype)

    def first(name: str, training: bool, batch_size: int) -> tuple[torch.Tensor, Sequence[Any]]:
        indices = parts[name][1][: min(_TRIED, batch_size)]
        return indices, loaders.reader(name, training).__getitems__([(0, index) for index in indices.tolist()])

    # The first samples tell how large batches are, and are tried before training
    tried, items = first("train", True, data.samples_a_batch)

    def batch(samples: Sequence[Any], indices: torch.Tensor) -> Batch:
        # A collation may change what it is given
        read = collate([copy.deepcopy(sample) for sample in samples])
        moved = tensors_moved(mapped_items(read.data, np.ndarray, as_numbers), device)
        return Batch(fields.of(moved), indices.to(device))

    def repeated(samples: int) -> Batch:
        places = torch.arange(samples) % len(items)
        return batch([items[place] for place in places.tolist()], tried[places])

    def evaluated() -> Batch:
        name = next(each for each in ("val", "test", "train") if each in parts)
        indices, samples = first(name, False, config.evaluate.batch_size)
        return batch(samples, indices)

    sample_bytes = sum(each.nbytes for each in tensors_in(mapped_items([*items], np.ndarray, as_numbers))) // len(items)
    ahead = data.prefetch * (data.samples_a_batch + config.evaluate.batch_size) * sample_bytes
    choice = choose_num_workers(data.num_workers, len(parts["train"][1]), bytes_ahead=ahead)
    loaders.placement.workers = choice.workers

    def split(name: str, training: bool) -> SplitData:
        return SplitData(loaders.build(name, training, fields, collate=collate), prepare)

    shown = [("workers", str(choice.workers), choice.reason)] if choice.reason else []
    shown += [as_shown(data.normalize.mean, data.normalize.std)] if data.images else []
    return assembled(
        loaders,
        split,
        classes=tuple(str(name) for name in getattr(train, "classes", None) or ()),
        class_counts=None,
        channels=0,
        image_size=(0, 0),
        mean=[],
        std=[],
        example=(torch.empty(0, device=device), torch.empty(0, device=device)),
        choices=shown,
        warnings=[*unkept, *choice.warnings],
        trial=repeated(len(tried)),
        repeated=repeated,
        evaluated=evaluated,
    )
