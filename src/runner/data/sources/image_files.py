"""Image files without targets, as a model takes them; files that cannot be read are reported."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import torch
from PIL import Image
from torch import Tensor

from runner.base.errors import UserError
from runner.config.schema.sections import Data
from runner.config.schema.train import Train
from runner.data.bad_samples import BadSample, BadSamples, ReplacementSampler
from runner.data.loaders import Loader
from runner.data.module import DataModule, callables
from runner.data.placement import choose_num_workers
from runner.data.sampler import AllSamples
from runner.data.samples import SampleTransform, as_tensor, crops_while_decoding, transformed
from runner.data.sources import image_io
from runner.data.sources.bands import KEPT, Channels
from runner.data.sources.folders import ImageFolder
from runner.data.sources.image_io import Decoding, middle_square

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
    """Map-style data set of image files; item i is (image (C, H, W), 0), which `transforms` give `shape`.

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
        self.transforms = list(transforms) or [functools.partial(fitted, height=height, width=width)]
        self._cuts = crops_while_decoding(self, transforms)

    def read(self, source: Path | Image.Image) -> Tensor:
        """The image of a file, or one in memory; raises `UserError` if it cannot be decoded."""
        decoding, first = self.decoding, cast(Any, self.transforms[0])
        cut, size = functools.partial(middle_square, share=decoding.crop_share), decoding.image_size
        if self._cuts:
            cut, size = first.region, first.size
        path, content = (source, None) if isinstance(source, Path) else ("in memory", source)
        return as_tensor(transformed(decoding.read(path, content, size, cut), self.transforms[self._cuts :]))


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
class AnyReadable(ReplacementSampler):
    """Replaces an unreadable file by the one that was read last, or else by the next: all that can be read are predicted."""

    last: list[int] = field(default_factory=list)  # at most one

    def candidates(self, epoch: int, index: int) -> Iterator[int]:
        """See `ReplacementSampler`."""
        yield from self.last
        yield from (place % len(self.indices) for place in range(index + 1, index + len(self.indices)))

    def read(self, read: Callable[[int], Any], epoch: int, index: int, skipped: list[BadSample]) -> Any:
        """See `ReplacementSampler`."""

        def noted(source: int) -> Any:
            sample = read(source)
            self.last[:] = [source]
            return sample

        return super().read(noted, epoch, index, skipped)

    def refused(self, index: int, reason: str) -> UserError:
        """See `ReplacementSampler`."""
        count = len(self.indices)
        return UserError("input", reason if count == 1 else f"none of the {count:,} images can be read: {reason}")


def of_shape(image: Any, shape: tuple[int, int, int]) -> Tensor:
    """An image as a tensor (C, H, W); raises `ValueError` if it has another shape."""
    tensor = as_tensor(image)
    if tensor.shape != shape:
        raise ValueError(f"it gets the shape {tuple(tensor.shape)}, and the model takes {shape}")
    return tensor


def files_loader(
    config: Train, device: torch.device, sources: Sequence[Path | Image.Image], shape: tuple[int, int, int]
) -> tuple[Loader, BadSamples]:
    """A loader of image files in their order, read as a split in evaluations; and its unreadable files, which others replace.

    If `data.images` is null, they are `ImageFiles` of `shape`. Otherwise they are `ImageSamples`, RGB unless
    `data.dataset.channels` or else `model.in_channels` says otherwise; raises `UserError` if it does not name one image.
    """
    # What fits an image to the model needs its pixels, so no device decodes it
    decode, count = "auto" if config.data.decode == "device" else config.data.decode, len(sources)
    paths = [source if isinstance(source, Path) else Path() for source in sources]
    config = replace(config, data=replace(config.data, decode=decode))
    data, fields = config.data, config.data.images
    files: ImageFolder
    if fields is None:
        files = ImageFiles(paths, data, callables("transform.sample_eval", config.transform.sample_eval), shape)
    elif len(fields) != 1 or (fields[0].isdigit() and fields[0] != "0"):
        problem = f"files are images, and data.images={fields} does not say which field of a sample is the image"
        raise UserError("input", problem, "train, val or test, a split of the data; or a model with one such field")
    else:
        given: Any = data.dataset.get("channels", config.model.get("in_channels"))
        channels: Channels = given if given in (1, *KEPT) else 3
        files = ImageSamples(paths, torch.zeros(count), (), Decoding(None, channels, 1.0, data.max_pixels, decode))
        files.pictures = {place: each for place, each in enumerate(sources) if isinstance(each, Image.Image)}
    made = DataModule(config, device, {"input": (files, AllSamples(count))}, getattr(torch, config.dtype))
    made.replacements = {name: AnyReadable(0, each.indices) for name, each in made.replacements.items()}
    made.fix_channels()
    if isinstance(files, ImageSamples) and fields:
        files.field = fields[0]
    bytes_ahead = 0
    if isinstance(files, ImageFiles):
        made.sample_eval = [*files.transforms, functools.partial(of_shape, shape=shape)]
        width = 1 if files.decoding.channels in (1, 3) and not config.transform.sample_eval else 4  # bytes, or floats
        bytes_ahead = data.prefetch * config.evaluate.batch_size * math.prod(shape) * width
    made.workers = choose_num_workers(data.num_workers, count, bytes_ahead=bytes_ahead).workers
    return made.split("input", False).loader, made.bad_samples
