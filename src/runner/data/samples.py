"""Samples of any data set as tensors, read many at a time with random draws of their own."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from runner.config.errors import UserError, first_line
from runner.data.bad_samples import BadSample, ReplacementSampler
from runner.data.sample_rng import preserved_rng, seed_generators

SampleTransform = Callable[[Any], Any]

_WIDE_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # torch computes little with them


class Read(NamedTuple):
    """A batch as it comes from where it was read.

    Attributes:
        images: (B, C, H, W), uint8 with values 0 to 255 or float; in shared memory if a worker read it.
        targets: (B, ...) numbers. An array, since a small one passes between processes faster than a tensor.
        skipped: samples that could not be read, in whose places others are.
    """

    images: Tensor
    targets: np.ndarray
    skipped: tuple[BadSample, ...] = ()


class Items(list[tuple[Any, Any]]):
    """Pairs of image and target, and which samples could not be read on the way to them."""

    def __init__(self) -> None:
        super().__init__()
        self.skipped: list[BadSample] = []


class SeededDataset(Dataset[Any]):
    """A data set that is asked for (epoch, index), many at a time, random draws keyed by both.

    Args:
        dataset: map-style data set giving (image, target).
        seed: seed of the run.
        transforms: callables on one image, in order. If the first has a method `region(height, width)` and a `size`, and
            the data set a method `read_part`, the data set is asked for that part of the image instead of the whole.
        replacements: what is read in place of a sample that cannot be; None raises what reading it raised. What a stand-in
            goes through is drawn as for the sample itself.
        split: name of the split, for messages.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        seed: int,
        transforms: Sequence[SampleTransform] = (),
        replacements: ReplacementSampler | None = None,
        split: str = "",
    ) -> None:
        self._split = split
        self._dataset, self._seed, self._transforms = dataset, seed, list(transforms)
        self._stand_ins = replacements
        self._cut: Any = None
        if crops_while_decoding(dataset, transforms):
            self._cut = self._transforms.pop(0)

    def __getitems__(self, places: list[tuple[int, int]]) -> Items:
        items = Items()
        with preserved_rng(), _one_thread():
            for epoch, index in places:
                items.append(self._item(epoch, index, items.skipped))
        return items

    def _item(self, epoch: int, index: int, skipped: list[BadSample]) -> tuple[Any, Any]:
        def read(source: int) -> tuple[Any, Any]:
            seed_generators(self._seed, epoch, index)
            if self._cut is None:
                item = self._dataset[source]
            else:
                item = self._dataset.read_part(source, self._cut.region, self._cut.size)  # type: ignore[attr-defined]
            return as_pair(item, source, self._split)

        try:
            image, target = (
                read(index) if self._stand_ins is None else self._stand_ins.read(read, epoch, index, skipped)
            )
        except (UserError, MemoryError):
            raise
        except Exception as error:
            raise unreadable(error, index, self._split) from error
        if not self._transforms:
            return image, target
        try:
            return transformed(image, self._transforms), target
        except (UserError, MemoryError):
            raise
        except Exception as error:
            raise untransformed(error, index, self._split) from error

    def __getitem__(self, place: tuple[int, int]) -> tuple[Any, Any]:
        return self.__getitems__([place])[0]

    def __len__(self) -> int:
        return len(self._dataset)  # type: ignore[arg-type]


def as_pair(item: Any, index: int, split: str) -> tuple[Any, Any]:
    """A sample as image and target.

    Raises:
        UserError: if it is something else.
    """
    if not isinstance(item, tuple | list) or len(item) != 2:
        what = f"{len(item)} values" if isinstance(item, tuple | list) else f"a {type(item).__name__}"
        raise UserError(
            f"data.dataset: {_sample(index, split)} is not a pair (image, target), but {what}\n"
            "    allowed: a data set whose samples are pairs (image, target)"
        )
    return item[0], item[1]


def unreadable(error: Exception, index: int, split: str) -> UserError:
    """What to say of a sample that a data set cannot give."""
    return UserError(
        f"data.dataset: {_sample(index, split)} cannot be read: {_told(error)}\n"
        "    allowed: a data set that gives every sample that its length says, or data.on_error=skip to skip those that it "
        "cannot"
    )


def untransformed(error: Exception, index: int, split: str) -> UserError:
    """What to say of a sample that a sample transform cannot take."""
    return UserError(
        f"transform.sample_train, transform.sample_eval: cannot take {_sample(index, split)}: {_told(error)}\n"
        "    allowed: transforms that take every image of the data set"
    )


def _sample(index: int, split: str) -> str:
    return f"sample {index} of '{split}'" if split else f"sample {index}"


def _told(error: Exception) -> str:
    """An error in one line, with the last line of the user's own code that it passed."""
    own = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(folder in Path(frame.filename).parts for folder in ("runner", "site-packages", "dist-packages"))
    ]
    place = f" ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {first_line(error)}{place}"


def transformed(image: Any, transforms: Sequence[SampleTransform]) -> Any:
    """What the transforms make of an image, which stays as it is: it may be a view of the data set itself."""
    if transforms and isinstance(image, Tensor):
        image = image.clone()
    elif transforms and isinstance(image, np.ndarray):
        image = image.copy()
    for transform in transforms:
        image = transform(image)
    return image


def crops_while_decoding(dataset: Dataset[Any], transforms: Sequence[SampleTransform]) -> bool:
    """Whether the first transform says which part of an image to decode, and the data set can do that."""
    first = transforms[0] if transforms else None
    return hasattr(dataset, "read_part") and hasattr(first, "region") and getattr(first, "size", None) is not None


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one thread, as worker processes do: sums over many pixels round differently on several."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def collate(items: list[tuple[Any, Any]]) -> Read:
    """Put samples into one batch; in a worker, images are written straight into shared memory.

    Raises:
        UserError: if images have different shapes or dtypes, or something is no image or no number.
    """
    images = [as_tensor(image) for image, _ in items]
    shapes = {tuple(image.shape) for image in images}
    if len(shapes) > 1:
        first, second = sorted(shapes)[:2]
        raise UserError(
            f"images of one batch have different shapes, such as {first} and {second}; "
            "set data.image_size, or add a transform that makes them equal (transform.sample_train, sample_eval)"
        )
    dtypes = {str(image.dtype) for image in images}
    if len(dtypes) > 1:
        raise UserError(f"data.dataset: images of one batch are of different kinds: {', '.join(sorted(dtypes))}")
    targets = [as_target(target) for _, target in items]
    if len(target_shapes := {tuple(target.shape) for target in targets}) > 1:
        first, second = sorted(target_shapes)[:2]
        raise UserError(
            f"data.dataset: targets of one batch have different shapes, such as {first} and {second}\n"
            "    allowed: targets of one shape"
        )
    return Read(default_collate(images), torch.stack(targets).numpy(), tuple(getattr(items, "skipped", ())))


def as_target(target: Any) -> Tensor:
    """One target as a tensor; floats of any width become float32, unsigned integers wider than a byte int64.

    Raises:
        UserError: if it is no number.
    """
    try:
        tensor = torch.as_tensor(target)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"data.dataset: a target is {str(target)[:80]!r}, which is not a number; give class numbers, or numbers to regress"
        ) from error
    if tensor.dtype in _WIDE_UNSIGNED:
        return tensor.long()
    return tensor.float() if tensor.is_floating_point() else tensor


def as_tensor(image: Any) -> Tensor:
    """One image as a contiguous CHW tensor: tensors as they are, arrays and PIL images as uint8 or float.

    Raises:
        UserError: for anything else, or another number of dimensions.
    """
    tensor: Tensor
    if isinstance(image, Tensor):
        tensor = image
    else:
        array = np.asarray(image)
        if array.dtype == object or array.ndim not in (2, 3):
            kind = type(image).__name__
            raise UserError(
                f"data.dataset: gave {kind} where an image was expected (a tensor, an array or a PIL image)"
            )
        # A copy in any case: the memory may be another's, or not to be written to.
        tensor = torch.from_numpy(np.array(array.transpose(2, 0, 1) if array.ndim == 3 else array, order="C"))
    if tensor.ndim == 2:
        tensor = tensor[None]
    if tensor.ndim != 3:
        raise UserError(f"data.dataset: an image has shape {tuple(tensor.shape)}; expected (channels, height, width)")
    tensor = tensor if tensor.dtype == torch.uint8 or tensor.is_floating_point() else tensor.float()
    return tensor.contiguous()
