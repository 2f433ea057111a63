"""Image files without targets, as a model takes them; files that cannot be read are reported and not fatal."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, cast

import torch
from PIL import Image
from torch import Tensor

from runner.base.errors import UserError
from runner.config.schema.sections import Data
from runner.config.schema.train import Train
from runner.data.bad_samples import BadSample, BadSamples, ReplacementSampler, one_line
from runner.data.loaders import BatchPlan, Fields, Loader
from runner.data.module import DataModule
from runner.data.placement import choose_num_workers
from runner.data.sampler import AllSamples
from runner.data.samples import SampleTransform, SeededDataset, as_tensor, crops_while_decoding, transformed
from runner.data.sources import image_io
from runner.data.sources.bands import KEPT, Channels
from runner.data.sources.folders import ImageFolder
from runner.data.sources.image_io import Decoding, middle_square
from runner.data.transforms.augment import Pipeline
from runner.data.workers import WorkerLoader

T = TypeVar("T")

_DECODED = (
    "runner.data.sources.folders.image_folder",
    "runner.data.sources.tables.image_table",
    "runner.data.sources.hugging_face.hugging_face",
)


class ImageSamples(ImageFolder):
    """Image files as samples without a target: (image, 0), or {field: image}; images are tv_tensors, uint8 (C, H, W)."""

    field = "0"
    pictures: Mapping[int, Image.Image] = MappingProxyType({})  # in memory, by index, instead of files

    def encoded(self, index: int) -> Any:
        """See `ImageList.encoded`."""
        picture = self.pictures.get(index)
        return super().encoded(index) if picture is None else ("in memory", picture)

    def __getitem__(self, index: int) -> Any:
        from torchvision import tv_tensors  # takes a second, and few runs need it

        image = tv_tensors.Image(super().__getitem__(index)[0])
        return (image, 0) if self.field == "0" else {self.field: image}


class ImageFiles(ImageFolder):
    """Map-style data set of image files; item i is (image of `shape` (C, H, W), 0).

    Files are decoded as by the data set of `data`, then the sample transforms follow; unless that has a size, they get the whole
    image. Without transforms, the central part in the shape of `shape` is resized to it.

    Args:
        data, transforms: section of the config that the model was trained with, and `transform.sample_eval`.
        shape: channels, height and width of the images that the model was trained on.

    Raises `UserError` if the config does not determine how to read them.
    """

    def __init__(
        self, paths: Sequence[Path], data: Data, transforms: Sequence[SampleTransform], shape: tuple[int, int, int]
    ) -> None:
        dataset, share, channels, (height, width) = data.dataset, 1.0, cast(Any, shape[0]), shape[1:]
        size = None if transforms or height != width else height
        if dataset.get("_target_") in _DECODED:
            channels, own = dataset.get("channels", channels), dataset.get("image_size") or data.image_size
            share = dataset.get("crop_share", share) if own is not None else share
            size = own if transforms else size
        if dataset.get("channels") in KEPT:
            channels = dataset["channels"]
        elif channels not in (1, 3):
            problem = f"the model was trained on images of {channels} channels, and files have 1 or 3"
            raise UserError("input", problem, "train, val or test, a split of the data")
        try:
            found = None if transforms else (shape[0], None)  # transforms may change the channels
            decoding = Decoding(size, channels, share, dataset.get("max_pixels") or data.max_pixels, data.decode, found)
        except ValueError as error:
            raise UserError("data.dataset", str(error)) from error
        super().__init__(paths, torch.zeros(len(paths), dtype=torch.int64), (), decoding)
        self.shape = shape
        self._transforms = list(transforms) or [functools.partial(fitted, height=height, width=width)]
        self._cut: Any = self._transforms.pop(0) if crops_while_decoding(self, transforms) else None

    def __getitem__(self, index: int) -> tuple[Tensor, int | Tensor]:
        """Decode one image; raises `UserError`, which names the file, if it cannot be decoded."""
        return self.read(self.path(index)), 0

    def read(self, source: Path | Image.Image) -> Tensor:
        """The image of a file, or one in memory; raises `UserError` if it cannot be decoded."""
        decoding = self.decoding
        cut, size = functools.partial(middle_square, share=decoding.crop_share), decoding.image_size
        if self._cut is not None:
            cut, size = self._cut.region, self._cut.size
        path, content = (source, None) if isinstance(source, Path) else ("in memory", source)
        return as_tensor(transformed(decoding.read(path, content, size, cut), self._transforms))

    def _found(self) -> tuple[int, torch.dtype | None]:
        """The channels and the dtype of the first file that can be read, which all others must have."""
        for path in map(self.path, range(len(self))):
            with contextlib.suppress(UserError):
                image = self.decoding.read(path)
                self.decoding = replace(self.decoding, found=(len(image), image.dtype))
                break
        return self.decoding.found or (self.shape[0], None)

    def blank(self) -> Tensor:
        """An image of zeros of the shape and dtype of the others; raises `UserError` if the transforms fail on it."""
        size = self.decoding.image_size
        height, width = self.shape[1:] if size is None else (size, size)
        channels, dtype = (self.decoding.channels, None) if self.decoding.channels in (1, 3) else self._found()
        blank = torch.zeros((channels, height, width), dtype=dtype or torch.uint8)
        try:
            made = as_tensor(transformed(blank, self._transforms))
        except Exception as error:  # user code can raise anything
            problem = f"fails on a blank image of the shape {tuple(blank.shape)}: {one_line(error)}"
            raise UserError("transform.sample_eval", problem, "transforms that accept any image") from error
        return torch.zeros(self.shape, dtype=made.dtype)


def fitted(image: Tensor, height: int, width: int) -> Tensor:
    """The central part of an image (C, H, W) in the shape of `height` by `width`, resized to it."""
    if tuple(image.shape[1:]) == (height, width):
        return image
    most_rows, most_columns = image.shape[1:]
    scale = min(most_rows / height, most_columns / width)
    rows, columns = min(most_rows, max(1, round(scale * height))), min(most_columns, max(1, round(scale * width)))
    top, left = (most_rows - rows) // 2, (most_columns - columns) // 2
    return image_io.resized(image, (top, left, rows, columns), (height, width))


@dataclass(frozen=True)
class BlankReplacement(ReplacementSampler):
    """Replaces an image that cannot be read by a blank `image`; `path` gives the file of an index."""

    image: Tensor
    path: Callable[[int], Path]

    def read(self, read: Callable[[int], T], epoch: int, index: int, skipped: list[BadSample]) -> Any:
        """Read a sample, or return the blank one; raises `UserError` if a sample has another shape than the model takes."""
        try:
            sample: Any = read(index)
        except MemoryError:
            raise
        except Exception as error:  # a decoder or user code can raise anything
            skipped.append(BadSample(index, one_line(error)))
            return self.image, 0
        if sample[0].shape != self.image.shape:
            made, taken = tuple(sample[0].shape), f"and the model takes {tuple(self.image.shape)}"
            problem = f"{self.path(index)} comes out of the transforms with the shape {made}, {taken}"
            raise UserError("transform.sample_eval", problem)
        return sample


def files_loader(
    paths: Sequence[Path],
    data: Data,
    transforms: Sequence[SampleTransform],
    shape: tuple[int, int, int],
    *,
    prepare: Pipeline,
    device: torch.device,
    batch_size: int,
) -> tuple[Loader, BadSamples]:
    """A loader of `ImageFiles` in their order, with the same errors; and its unreadable files, known once their batch came."""
    files, unreadable = ImageFiles(paths, data, transforms, shape), BadSamples()
    everything, blank = AllSamples(len(paths)), files.blank()
    ahead = data.prefetch * batch_size * blank.nbytes
    loader = WorkerLoader(
        SeededDataset(files, 0, (), BlankReplacement(0, everything, blank, files.path)),
        BatchPlan(everything, batch_size, prepare=Fields(["0"], prepare)),
        device,
        replace(data, persistent_workers=False),
        workers=choose_num_workers(data.num_workers, len(paths), bytes_ahead=ahead).workers,
        on_skipped=functools.partial(unreadable.note, "input", files, len(paths)),
    )
    return loader, unreadable


def samples_loader(
    config: Train, device: torch.device, sources: Sequence[Path | Image.Image]
) -> tuple[Loader, BadSamples]:
    """A loader of image files, or images in memory, in their order, as `ImageSamples`; and its unreadable files.

    Files are RGB, unless `data.dataset.channels` or else `model.in_channels` says otherwise. Raises `UserError` if samples are not
    made of one image.
    """
    data, count, fields = config.data, len(sources), config.data.images or []
    if len(fields) != 1 or (fields[0].isdigit() and fields[0] != "0"):
        problem = f"files are images, and data.images={fields} does not say which field of a sample is the image"
        raise UserError("input", problem, "train, val or test, a split of the data; or a model with one such field")
    given: Any = data.dataset.get("channels", config.model.get("in_channels"))
    channels: Channels = given if given in (1, *KEPT) else 3
    paths = [source if isinstance(source, Path) else Path() for source in sources]
    files = ImageSamples(paths, torch.zeros(count), (), Decoding(None, channels, 1.0, data.max_pixels, data.decode))
    files.pictures = {place: each for place, each in enumerate(sources) if isinstance(each, Image.Image)}
    made = DataModule(config, device, {"input": (files, AllSamples(count))}, getattr(torch, config.dtype))
    made.fix_channels()
    files.field = fields[0]
    made.workers = choose_num_workers(data.num_workers, count).workers
    return made.split("input", False).loader, made.bad_samples
