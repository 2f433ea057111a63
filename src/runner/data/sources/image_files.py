"""Image files without targets, made into what a model was trained on; those that cannot be read are told, and not fatal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from runner.config.cores import cores
from runner.config.errors import UserError
from runner.config.schema.sections import Data
from runner.data.bad_samples import BadSample, ReplacementSampler
from runner.data.indices import AllSamples, Indices
from runner.data.num_workers import workers_with_room
from runner.data.samples import SampleTransform, as_tensor, crops_while_decoding, transformed
from runner.data.sources import image_io
from runner.data.sources.folders import ImageFolder
from runner.data.transforms.augment import Pipeline
from runner.data.workers import WorkerLoader

T = TypeVar("T")

_FOLDER = "runner.data.sources.folders.image_folder"
_FEW = 64  # images that are read sooner than worker processes start
_MOST_WORKERS = 8


class ImageFiles(ImageFolder):
    """Map-style data set of image files; item i is (image (C, H, W), 0).

    A file is decoded, turned, cut, resized and converted as `runner.data.sources.folders.image_folder` does it, then the sample
    transforms follow. Where the model was trained on a data set of another kind, the middle is cut out in the shape of its
    images and resized to their size, which leaves an image of that size as it is.

    Args:
        paths: the files.
        shape: channels, height and width of every image in the end.
        size: edge of the square that is cut from the middle and resized to, before the transforms; None leaves the image
            whole for them.
        channels: 3 for RGB, 1 for grey.
        crop_share: edge of that square as a share of the shorter side.
        transforms: sample transforms.
        max_pixels: most pixels that a file may have.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        shape: tuple[int, int, int],
        size: int | None,
        channels: Literal[1, 3],
        crop_share: float,
        transforms: Sequence[SampleTransform],
        max_pixels: int,
    ) -> None:
        super().__init__(paths, [0] * len(paths), (), size, channels, crop_share, max_pixels)
        self.shape = shape
        self._transforms = list(transforms)
        self._cut: Any = self._transforms.pop(0) if crops_while_decoding(self, transforms) else None

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Decode one image.

        Raises:
            UserError: if the file cannot be decoded; it names the file.
        """
        if self._cut is not None:
            image = self.read_part(index, self._cut.region, self._cut.size)[0]
        else:
            image = super().__getitem__(index)[0]
        if not self._transforms and self._cut is None:
            image = fitted(image, self.shape[1], self.shape[2])
        return as_tensor(transformed(image, self._transforms)), 0

    def blank(self) -> Tensor:
        """An image of zeros of the shape and type that the others have.

        Raises:
            UserError: if the transforms fail on it.
        """
        height, width = (self.image_size,) * 2 if self.image_size is not None else self.shape[1:]
        blank = torch.zeros((self.channels, height, width), dtype=torch.uint8)
        try:
            made = as_tensor(transformed(blank, self._transforms))
        except Exception as error:  # what a transform of one's own raises has no end
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(
                f"transform.sample_eval: fails on a blank image of the shape {tuple(blank.shape)}: {reason}\n"
                "    allowed: transforms of any image"
            ) from error
        return torch.zeros(self.shape, dtype=made.dtype)


def fitted(image: Tensor, height: int, width: int) -> Tensor:
    """The middle of an image (C, H, W), cut to the shape of height by width and resized to it (bilinear, antialiased)."""
    if tuple(image.shape[1:]) == (height, width):
        return image
    scale = min(image.shape[1] / height, image.shape[2] / width)
    rows, columns = (max(1, round(scale * size)) for size in (height, width))
    rows, columns = min(rows, image.shape[1]), min(columns, image.shape[2])
    top, left = (image.shape[1] - rows) // 2, (image.shape[2] - columns) // 2
    part = image[:, top : top + rows, left : left + columns]
    return F.interpolate(part[None], size=(height, width), mode="bilinear", antialias=True)[0].contiguous()


@dataclass(frozen=True)
class BlankReplacement(ReplacementSampler):
    """A blank image in place of one that cannot be read, which is told.

    Attributes:
        image: the blank image.
        path: gives the file of an index.
    """

    image: Tensor
    path: Callable[[int], Path]

    def read(self, read: Callable[[int], T], epoch: int, index: int, skipped: list[BadSample]) -> Any:
        """Read a sample, or give the blank one.

        Raises:
            UserError: if the image has another shape than the model takes, which is the fault of the config.
        """
        try:
            sample: Any = read(index)
        except MemoryError:
            raise
        except Exception as error:  # what a decoder or a transform of one's own raises has no end
            skipped.append(BadSample(index, " ".join(str(error).split()) or type(error).__name__))
            return self.image, 0
        if sample[0].shape != self.image.shape:
            raise UserError(
                f"transform.sample_eval: {self.path(index)} comes out of the transforms with the shape "
                f"{tuple(sample[0].shape)}, and the model takes {tuple(self.image.shape)}\n"
                "    allowed: transforms that give every image the size that the model takes"
            )
        return sample


def files_loader(
    paths: Sequence[Path],
    data: Data,
    transforms: Sequence[SampleTransform],
    shape: tuple[int, int, int],
    prepare: Pipeline,
    device: torch.device,
    batch_size: int,
    on_unreadable: Callable[[Sequence[BadSample]], None],
) -> WorkerLoader:
    """A loader of image files in their order, as the model is given them.

    Args:
        paths: the files.
        data: section of the config: how the images that the model was trained on were read, and through how many workers.
        transforms: those of `transform.sample_eval`.
        shape: channels, height and width of the images that the model was trained on.
        prepare: what is done to batches on the device.
        device: where batches are wanted.
        batch_size: images of a batch.
        on_unreadable: told of images that cannot be read, at the latest with the batch that they belong to.

    Raises:
        UserError: if the config does not say how to read them.
    """
    channels, size, share = _reading(data, bool(transforms), shape)
    if channels not in (1, 3):
        raise UserError(
            f"input: the model was trained on images of {channels} channels, and files have 1 or 3\n"
            "    allowed: train, val or test, a split of the data"
        )
    try:
        files = ImageFiles(
            paths, shape, size, channels, share, transforms, data.dataset.get("max_pixels") or data.max_pixels
        )
    except ValueError as error:
        raise UserError(f"data.dataset: {error}") from error
    everything: Indices = AllSamples(len(paths))
    if data.num_workers != "auto":
        workers = data.num_workers
    elif len(paths) < _FEW:
        workers = 0
    else:
        ahead = data.prefetch * batch_size * files.blank().nbytes
        workers = min(cores(), _MOST_WORKERS, workers_with_room(ahead))
    pin = device.type == "cuda" if data.pin_memory == "auto" else data.pin_memory and device.type == "cuda"
    return WorkerLoader(
        files,
        everything,
        batch_size,
        0,
        False,
        device,
        workers=workers,
        prefetch=data.prefetch,
        persistent=False,
        pin=pin,
        non_blocking=data.non_blocking,
        prepare=prepare,
        replacements=BlankReplacement(0, everything, files.blank(), files.path),
        on_skipped=on_unreadable,
        timeout_s=data.timeout_s,
    )


def _reading(data: Data, with_transforms: bool, shape: tuple[int, int, int]) -> tuple[Any, int | None, float]:
    """Channels of files that are read, edge of the square that they are resized to, and its share of the shorter side."""
    dataset, (channels, height, width) = data.dataset, shape
    size, share = None, 1.0
    if dataset.get("_target_") == _FOLDER:
        channels, size = dataset.get("channels", channels), dataset.get("image_size") or data.image_size
        share = dataset.get("crop_share", share) if size is not None else share
    if not with_transforms:
        size = height if height == width else None
    return channels, size, share


def reading_steps(data: Data, sample_transforms: Sequence[Any], shape: tuple[int, int, int]) -> list[dict[str, Any]]:
    """What makes pixels of an image file, for programs that do the same; see `ImageFiles`.

    Args:
        data: section of the config.
        sample_transforms: nodes of `transform.sample_eval`.
        shape: channels, height and width of the images that the model was trained on.
    """
    channels, size, share = _reading(data, bool(sample_transforms), shape)
    steps = image_io.reading_steps(size, channels, share)
    if sample_transforms:
        # One that cuts the images takes the place of the middle square.
        steps.append({"step": "transform", "transforms": list(sample_transforms)})
    elif size is None:
        steps += [
            {
                "step": "crop",
                "place": "middle",
                "scale": f"min(height / {shape[1]}, width / {shape[2]})",
                "rows": f"min(height, max(1, round(scale * {shape[1]})))",
                "columns": f"min(width, max(1, round(scale * {shape[2]})))",
                "top": "(height - rows) // 2",
                "left": "(width - columns) // 2",
            },
            image_io.resize_step(*shape[1:]),
        ]
    return steps
