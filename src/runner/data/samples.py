"""Samples of any data set as tensors, read many at a time with separate random numbers."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from runner.base.errors import UserError, with_place
from runner.data.bad_samples import BadSample, ReplacementSampler, path_of
from runner.data.sample_rng import preserved_rng, seed_generators
from runner.data.sampler import SAMPLE_BITS, AllSamples, Indices, sample_of
from runner.data.sources.image_io import Encoded, decoded

SampleTransform = Callable[..., Any]

SHARED_MEMORY = "</torch_"
"""How torch names its shared memory in an error."""
_NONE = AllSamples(0)
_SKIP = "data.on_error=skip, which reads other samples instead"
_WIDE_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # torch supports few operations on them


@dataclass(eq=False)
class SeededDataset(Dataset[Any]):
    """A data set that is indexed by (epoch, place), many at a time; both seed the generators of a sample, see `sample_of`.

    With `pairs`, samples are an image and a target, which become tensors as `as_tensor` and `as_target` make them, and transforms
    are called with the image; otherwise samples are of any kind, and transforms are called with the whole sample.

    If the first of `transforms` has a method `region(height, width)` and a `size`, and the data set a method `read_part`,
    only that part of the image is read. `replacements` replaces samples that cannot be read (None raises the error), with the
    random numbers of the sample. `split` is for messages. `collate` makes a batch of a list of samples, see `batch_of`.
    `others` are the samples that transforms with `takes_others` are given: `transform(sample, other)` calls `other()` for each.
    """

    dataset: Any
    seed: int
    transforms: Sequence[SampleTransform] = ()
    replacements: ReplacementSampler | None = None
    split: str = ""
    _: KW_ONLY
    pairs: bool = True
    collate: Callable[[list[Any]], Any] | None = None  # `pair_batch`
    others: Indices = _NONE
    others_until: float = math.inf  # the first epoch without transforms that take others
    encoded: Any = None  # the data set with `Encoded` images, of which batches are made, and which `on_device` decodes

    def __post_init__(self) -> None:
        self._steps = [*self.transforms]
        cuts = self.pairs and crops_while_decoding(self.dataset, self.transforms)
        self._cut: Any = self._steps.pop(0) if cuts else None

    def __getitems__(self, places: list[tuple[int, int]]) -> tuple[Any, list[BadSample]]:
        """A batch, in shared memory if a worker reads it, and the samples that could not be read, which others replace."""
        skipped: list[BadSample] = []
        return batch_of(self.items(places, skipped, self.encoded), self.collate or pair_batch), skipped

    def on_device(self, batch: Any, epoch: int, drawn: Tensor, device: torch.device, skipped: list[BadSample]) -> Any:
        """Decode the `Encoded` images of a batch of pairs on a device, where all its images are then, if it has any.

        What fails there is read again on the host, for the same errors and replacements; `drawn` are the places of the batch.
        """
        if isinstance(batch[0], Tensor):
            return batch
        images, targets = [*batch[0]], [*torch.from_numpy(batch[1])]
        waiting = [row for row, image in enumerate(images) if isinstance(image, Encoded)]
        for row, image in zip(waiting, decoded([images[row] for row in waiting], device), strict=True):
            if image is None:
                image, targets[row] = self.items([(epoch, int(drawn[row]))], skipped)[0]
            images[row] = image
        images = [torch.as_tensor(image).to(device) for image in images]
        return pair_batch([*zip(images, targets, strict=True)])

    def items(
        self, places: list[tuple[int, int]], skipped: list[BadSample] | None = None, dataset: Any = None
    ) -> list[Any]:
        """The samples; whatever user code raises becomes a `UserError`, except for `MemoryError`."""
        dataset, skipped = self.dataset if dataset is None else dataset, [] if skipped is None else skipped
        with preserved_rng(), _one_thread():
            return [self._item(dataset, epoch, place, skipped) for epoch, place in places]

    def _item(self, dataset: Any, epoch: int, place: int, skipped: list[BadSample], before: int | None = None) -> Any:
        # A replacement is read with the random numbers of the sample that it replaces, so an epoch has the same draws.
        def read(source: int) -> Any:
            seed_generators(self.seed, epoch, place)
            # A cut reads only the region that is used, which is faster for large images
            if self._cut is None:
                item = dataset[source]
            else:
                item = dataset.read_part(source, self._cut.region, self._cut.size)
            if not self.pairs:
                return item
            if not isinstance(item, tuple | list) or len(item) != 2:
                what = f"{len(item)} values" if isinstance(item, tuple | list) else f"a {type(item).__name__}"
                problem = f"{self._name(source)} is not a pair (image, target), but {what}"
                raise UserError("data.dataset", problem, "data.images=[] for samples of any kind")
            return item

        # The message tells reading from transforming, as each has another cure
        index, transforming = sample_of(place), False
        try:
            sample = read(index) if self.replacements is None else self.replacements.read(read, epoch, index, skipped)
            transforming = True
            if not self.pairs:
                for number, transform in enumerate(self._steps[:before]):
                    if not getattr(transform, "takes_others", False):
                        sample = transform(sample)
                    elif epoch < self.others_until:
                        sample = transform(sample, functools.partial(self._other, dataset, epoch, skipped, number))
                return sample
            image = sample[0] if isinstance(sample[0], Encoded) else as_tensor(transformed(sample[0], self._steps))
            return image, as_target(sample[1])
        except MemoryError:
            raise
        except UserError as error:
            # Only a plain sentence about a file gets the advice; errors that name a key say already what to do.
            if type(error) is not UserError or transforming or error.problems[0].key or error.problems[0].allowed:
                raise
            raise UserError("", str(error), _SKIP) from error
        except Exception as error:
            name, why = self._name(index), with_place(error)
            # A path finds the file faster than the number of a sample
            if (path := path_of(self.dataset, index)) is not None and path not in why:
                name = f"{name}, {path},"
            if transforming:
                keys, allowed = "transform.sample_train, transform.sample_eval", "transforms that accept every sample"
                raise UserError(keys, f"cannot take {name}: {why}", allowed) from error
            raise UserError("data.dataset", f"{name} cannot be read: {why}", _SKIP) from error

    def _other(self, dataset: Any, epoch: int, skipped: list[BadSample], before: int) -> Any:
        """Another sample, chosen by the generators of the one that takes it; reading it draws from others."""
        index, draw = (int(torch.randint(count, ())) for count in (len(self.others), 2**30))
        with preserved_rng():
            # The draw keeps its augmentation apart from that of the same sample elsewhere in this epoch
            place = int(self.others[index]) | draw << SAMPLE_BITS
            return self._item(dataset, epoch, place, skipped, before)

    def _name(self, index: int) -> str:
        return f"sample {index} of '{self.split}'" if self.split else f"sample {index}"

    def __getitem__(self, place: tuple[int, int]) -> Any:
        return self.items([place])[0]

    def __len__(self) -> int:
        return len(self.dataset)


def transformed(image: Any, transforms: Sequence[SampleTransform]) -> Any:
    """The transformed image; the original, which may be a view of the data set, is not changed."""
    if transforms and isinstance(image, Tensor):
        image = image.clone()
    elif transforms and isinstance(image, np.ndarray):
        image = image.copy()
    for transform in transforms:
        image = transform(image)
    return image


def crops_while_decoding(dataset: Dataset[Any], transforms: Sequence[SampleTransform]) -> bool:
    """Tell whether the first transform chooses the part of an image to decode, and the data set supports that."""
    first = transforms[0] if transforms else None
    return hasattr(dataset, "read_part") and hasattr(first, "region") and getattr(first, "size", None) is not None


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Compute on one thread, as worker processes do: sums over many pixels round differently on several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def pair_batch(samples: list[tuple[Any, Tensor]]) -> tuple[Any, np.ndarray]:
    """Images, in a worker written straight into shared memory, and targets, of which a small array passes between processes faster.

    If some images are `Encoded`, images are a list of these and of arrays. Raises `UserError` if images have different shapes or
    dtypes, or targets different shapes.
    """
    images, targets = map(list, zip(*samples, strict=True))
    # Stacking would fail with sizes that say nothing about the cause
    size = "data.image_size, or a transform that gives one size (transform.sample_train, transform.sample_eval)"
    for what, tensors, allowed in (("images", images, size), ("targets", targets, "targets of one shape")):
        if len(shapes := sorted({tuple(tensor.shape) for tensor in tensors})) > 1:
            problem = f"{what} of one batch have different shapes, such as {shapes[0]} and {shapes[1]}"
            raise UserError("data.dataset", problem, allowed)
    if len(dtypes := {str(image.dtype) for image in images}) > 1:
        raise UserError("data.dataset", f"images of one batch are of different kinds: {', '.join(sorted(dtypes))}")
    numbers = torch.stack(targets).numpy()
    if any(isinstance(image, Encoded) for image in images):  # a worker would pass a file descriptor for each tensor
        return [image if isinstance(image, Encoded) else image.numpy() for image in images], numbers
    return default_collate(images), numbers


def stacked(samples: list[Any]) -> Any:
    """torch's `default_collate` with tuples where it makes lists, so that a list in a batch has an item for each sample."""
    first = samples[0]
    if isinstance(first, Mapping):
        return {key: stacked([sample[key] for sample in samples]) for key in first}
    if isinstance(first, list | tuple):
        fields = [stacked(list(column)) for column in zip(*samples, strict=True)]
        return first._make(fields) if hasattr(first, "_make") else tuple(fields)
    return default_collate(samples)


def _plain(data: Any) -> Any:
    """The data of a batch with every mapping as a dict, which torch knows how to walk through."""
    if isinstance(data, Mapping):
        return {key: _plain(value) for key, value in data.items()}
    if isinstance(data, tuple):
        return data._make(map(_plain, data)) if hasattr(data, "_make") else tuple(map(_plain, data))
    return data


def batch_of(samples: list[Any], collate: Callable[[list[Any]], Any]) -> Any:
    """A batch of samples as `SeededDataset` gives them, made by `pair_batch`, `stacked` or a function of the user.

    A list that the function returns becomes a tuple, so that a list inside of it is one item a sample. Raises `UserError` with
    what a function of the user says.
    """
    try:
        data = collate(samples)
    except (UserError, MemoryError):
        raise
    except Exception as error:
        if collate is pair_batch or SHARED_MEMORY in str(error):  # no function of the user is at fault
            raise
        raise UserError("data.collate", f"cannot make a batch of samples: {with_place(error)}") from error
    return _plain(tuple(data) if type(data) is list else data)


def as_target(target: Any) -> Tensor:
    """One target as a tensor; floats become float32, unsigned integers wider than a byte int64.

    Raises `UserError` if it is not a number.
    """
    try:
        tensor = torch.as_tensor(target)
    except (TypeError, ValueError, RuntimeError) as error:
        problem = f"a target is {str(target)[:80]!r}, which is not a number"
        raise UserError("data.dataset", problem, "class numbers, or numbers to regress") from error
    if tensor.dtype in _WIDE_UNSIGNED:
        return tensor.long()
    return tensor.float() if tensor.is_floating_point() else tensor


def as_tensor(image: Any) -> Tensor:
    """One image as a contiguous CHW tensor: tensors as they are, arrays and PIL images as uint8 or float.

    Raises `UserError` for anything else, or another number of dimensions.
    """
    tensor: Tensor
    if isinstance(image, Tensor):
        tensor = image
    else:
        array = np.asarray(image)
        if array.dtype == object or array.ndim not in (2, 3):
            problem = f"gave {type(image).__name__} where an image was expected"
            raise UserError("data.dataset", problem, "a tensor, an array or a PIL image")
        # Always a copy: the memory may be shared or read-only.
        tensor = torch.from_numpy(np.array(array.transpose(2, 0, 1) if array.ndim == 3 else array, order="C"))
    # Grey images have no channel axis in arrays and files
    if tensor.ndim == 2:
        tensor = tensor[None]
    if tensor.ndim != 3:
        raise UserError("data.dataset", f"an image has shape {tuple(tensor.shape)}", "(channels, height, width)")
    tensor = tensor if tensor.dtype == torch.uint8 or tensor.is_floating_point() else tensor.float()
    return tensor.contiguous()
