"""From the sections `data` and `transform` of the config to splits that give batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.config.errors import UserError
from runner.config.schema.sections import Data, Transform
from runner.config.targets import build
from runner.data.bad_samples import BadSample, BadSampleLog, ReplacementSampler, missing
from runner.data.cache_file import NOT_READ
from runner.data.consistency import Examples, check_classes, check_images, known_targets
from runner.data.dataset_fingerprint import fingerprint_data
from runner.data.indices import Indices
from runner.data.leakage import find_leaks
from runner.data.loaders import Loader, MemoryLoader
from runner.data.placement import plan_placement
from runner.data.sample_rng import preserved_rng
from runner.data.samples import (
    SampleTransform,
    as_pair,
    as_target,
    as_tensor,
    transformed,
    unreadable,
    untransformed,
)
from runner.data.sources.arrays import ImageArrays
from runner.data.splits import make_splits, targets_of
from runner.data.transforms.augment import Pipeline
from runner.data.transforms.mixing import Mixing
from runner.data.workers import WorkerLoader

_MOST_CLASSES = 2**16  # that are numbered where a data set has no names for them and fewer samples
_MEASURED = 2048  # images that statistics are measured on where they are read one by one


@dataclass
class SplitData:
    """One split: batches as the model is given them, and what was done to them on the device; blending last, if any."""

    loader: Loader
    prepare: Pipeline
    samples: int
    mix: Mixing | None = None


@dataclass
class DataModule:
    """A data set, ready to be trained and evaluated on.

    Attributes:
        train, val, test: the splits; val and test are None where there is none.
        classes: names of the classes; empty for regression.
        class_counts: training samples of each class, int64 of shape (C,), or None.
        channels: colour channels of an image.
        image_size: height and width.
        mean, std: statistics that images are normalised with.
        example: the first training sample, image (1, C, H, W) and target (1, ...), on the device.
        choices: rows of (label, value, reason) for people.
        warnings: settings without effect.
        bad_samples: the samples that could not be read, so far.
        fingerprint: tells which data these are, for checkpoints.
        parts: for each split the data set that it is read from, and its samples in it.
        examples: for each split the image (C, H, W) and the target (...) of its first sample, on the CPU.
        incompatibilities: why the splits cannot be used together; `check` looks at such data too, everything else refuses them.
        searched_for_nonfinite: splits that were searched for samples that are not finite.
        targets: for each split of which they are known without reading samples the targets of its whole data set, (N, ...).
    """

    train: SplitData
    val: SplitData | None
    test: SplitData | None
    train_for_eval: SplitData
    classes: tuple[str, ...]
    class_counts: Tensor | None
    channels: int
    image_size: tuple[int, int]
    mean: list[float]
    std: list[float]
    example: tuple[Tensor, Tensor]
    choices: list[tuple[str, str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    bad_samples: BadSampleLog = field(default_factory=BadSampleLog)
    fingerprint: Callable[[], dict[str, Any]] = dict
    parts: Mapping[str, tuple[Dataset[Any], Indices]] = field(default_factory=dict)
    examples: Examples = field(default_factory=dict)
    targets: Mapping[str, Tensor] = field(default_factory=dict)
    incompatibilities: list[UserError] = field(default_factory=list)
    searched_for_nonfinite: set[str] = field(default_factory=set)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        return self.channels, *self.image_size

    def eval_split(self, name: str) -> SplitData | None:
        """A split as it is evaluated: without augmentation, in order."""
        return {"train": self.train_for_eval, "val": self.val, "test": self.test}[name]

    def close(self) -> None:
        """End worker processes."""
        for split in (self.train, self.val, self.test, self.train_for_eval):
            if split is not None:
                split.loader.close()


def build_data(
    data: Data,
    transform: Transform,
    seed: int,
    device: torch.device,
    eval_batch_size: int,
    channels_last: bool,
    make_cache: bool = True,
) -> DataModule:
    """Read the data set and prepare its splits.

    Args:
        data: section of the config.
        transform: section of the config.
        seed: seed of the run, for sample order and augmentation.
        device: where batches are wanted.
        eval_batch_size: samples of a batch of an evaluation.
        channels_last: memory layout of the batches.
        make_cache: False uses a cache of `data.cache` that is there and makes none, for images that are read once.

    Raises:
        UserError: if the data cannot be found, read or split, or does not fit the settings.
    """
    facts = {name: getattr(data, name) for name in ("root", "download", "image_size", "max_pixels")}
    datasets = _as_splits(build("data.dataset", data.dataset, facts=facts))
    parts = make_splits(datasets, data.split)
    sample_train = callables("transform.sample_train", transform.sample_train)
    sample_eval = callables("transform.sample_eval", transform.sample_eval)

    replacements = (
        {name: ReplacementSampler(seed, indices) for name, (_, indices) in parts.items()}
        if data.on_error == "skip"
        else {}
    )
    skipped = BadSampleLog()
    train_set, train_indices = parts["train"]
    first, target = _first("train", train_set, train_indices, sample_eval, replacements.get("train"))
    with preserved_rng():
        held_out = {name: part for name, part in parts.items() if name != "train"}
        others = {name: _first(name, *part, sample_eval, replacements.get(name)) for name, part in held_out.items()}
    examples = {"train": (first, target), **others}
    reading = plan_placement(data, parts, sample_train, sample_eval, device, first, eval_batch_size, make_cache)
    sources = {name: reading.source(dataset) for name, (dataset, _) in parts.items()}
    known, more = known_targets(parts, sources, examples)
    classes = _classes(train_set)
    misfits, doubts = [], more
    for found in (
        functools.partial(check_images, parts, examples, sample_eval, data.normalize),
        functools.partial(check_classes, parts, classes, known),
    ):
        try:
            doubts += found()
        except UserError as error:
            misfits.append(error)
    choices, warnings = reading.choices, [*reading.warnings, *doubts, *find_leaks(parts, data.split.group)]
    mean, std = data.normalize.mean, data.normalize.std
    if mean is None or std is None:
        mean, std = _measure(train_set, train_indices, sample_eval, bool(replacements))
        choices.append(("normalize", f"mean {_short(mean)}, std {_short(std)}", "measured on the training split"))
    channels, height, width = first.shape
    if data.image_size is not None and (height, width) != (data.image_size, data.image_size):
        warnings.append(
            f"data.image_size={data.image_size} has no effect: this data set gives images of {height}x{width} as they are"
        )
    _check_statistics(mean, channels)

    def loader(name: str, training: bool, prepare: Pipeline, mix: Mixing | None) -> Loader:
        dataset, indices = parts[name]
        size, shuffle = (data.samples_a_batch, data.shuffle) if training else (eval_batch_size, False)
        others, note = replacements.get(name), skipped.noting(name, dataset)
        if reading.in_memory is not None:
            images, numbers = reading.stored(dataset)
            source_of = None
            if others is not None and len(unreadable := missing(reading.unreadable(dataset), indices)):
                note([BadSample(sample, NOT_READ) for sample in unreadable.tolist()])
                source_of = functools.partial(others.sources, unreadable=unreadable)
            return MemoryLoader(images, numbers, indices, size, seed, shuffle, device, prepare, mix, source_of)
        return WorkerLoader(
            reading.source(dataset),
            indices,
            size,
            seed,
            shuffle,
            device,
            sample_train if training else sample_eval,
            reading.workers,
            data.prefetch,
            data.persistent_workers,
            reading.pin,
            data.non_blocking,
            prepare,
            mix,
            others,
            note,
            data.timeout_s,
            name,
        )

    def part(name: str, training: bool) -> SplitData | None:
        if name not in parts:
            return None
        key = "train" if training else "eval"
        nodes = transform.train if training else transform.eval
        steps = callables(f"transform.{key}", nodes)
        pipeline = Pipeline(steps, mean, std, seed, device, channels_last)
        mix = mixing if training else None
        return SplitData(loader(name, training, pipeline, mix), pipeline, len(parts[name][1]), mix)

    mixing = _mixing(transform.mix, seed, len(classes))
    train, again = part("train", True), part("train", False)
    assert train is not None
    assert again is not None
    counts, targets = None, targets_of(train_set)
    if targets is not None and targets.ndim == 1 and not targets.is_floating_point() and classes:
        numbers = targets[train_indices[:]]
        # Others are refused by the task.
        counts = torch.bincount(numbers[(numbers >= 0) & (numbers < len(classes))], minlength=len(classes))
    return DataModule(
        train=train,
        val=part("val", False),
        test=part("test", False),
        train_for_eval=again,
        classes=classes,
        class_counts=counts,
        channels=channels,
        image_size=(height, width),
        mean=mean,
        std=std,
        example=(first[None].to(device), target[None].to(device)),
        choices=choices,
        warnings=warnings,
        bad_samples=skipped,
        fingerprint=functools.partial(fingerprint_data, parts, sources, data.identity == "full"),
        parts=parts,
        examples=examples,
        targets=known,
        incompatibilities=misfits,
    )


def _as_splits(made: Any) -> dict[str, Dataset[Any]]:
    datasets = dict(made) if isinstance(made, Mapping) else {"train": made}
    for name, dataset in datasets.items():
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise UserError(
                f"data.dataset: its '{name}' is a {type(dataset).__name__}, which has no length or no items\n"
                "    allowed: a map-style data set giving (image, target), or a mapping of split names to such"
            )
    return datasets


def _mixing(node: dict[str, Any] | None, seed: int, classes: int) -> Mixing | None:
    if node is None:
        return None
    made = build("transform.mix", node)
    if not callable(made):
        raise UserError(f"transform.mix: {node['_target_']} gives something that cannot be called")
    return Mixing(made, seed, classes or None)


def callables(key: str, nodes: list[dict[str, Any]]) -> list[Any]:
    """Build a list of transforms.

    Raises:
        UserError: if one refuses its arguments, or is nothing that can be called.
    """
    built = [build(f"{key}.{index}", node) for index, node in enumerate(nodes)]
    for index, made in enumerate(built):
        if not callable(made):
            raise UserError(f"{key}.{index}: {nodes[index]['_target_']} gives something that cannot be called")
    return built


def _sample(name: str, dataset: Dataset[Any], index: int, transforms: list[SampleTransform]) -> tuple[Tensor, Tensor]:
    try:
        image, target = as_pair(dataset[index], index, name)
    except (UserError, MemoryError):
        raise
    except Exception as error:
        raise unreadable(error, index, name) from error
    try:
        image = transformed(image, transforms)
    except (UserError, MemoryError):
        raise
    except Exception as error:
        raise untransformed(error, index, name) from error
    return as_tensor(image), as_target(target)


def _first(
    name: str,
    dataset: Dataset[Any],
    indices: Indices,
    transforms: list[SampleTransform],
    replacements: ReplacementSampler | None,
) -> tuple[Tensor, Tensor]:
    index = int(indices[0])
    if replacements is None:
        return _sample(name, dataset, index, transforms)
    return replacements.read(lambda source: _sample(name, dataset, source, transforms), 0, index, [])


def _classes(dataset: Dataset[Any]) -> tuple[str, ...]:
    named = getattr(dataset, "classes", None)
    if named:
        return tuple(str(name) for name in named)
    targets = targets_of(dataset)
    if targets is None or targets.is_floating_point() or targets.ndim != 1 or isinstance(dataset, ImageArrays):
        return ()
    if (largest := int(targets.max())) >= max(_MOST_CLASSES, len(targets)):
        index = int(targets.argmax())
        raise UserError(
            f"data.dataset: the target of sample {index} of 'train' is {largest}, and the data set does not name its classes\n"
            "    allowed: class numbers from 0 on, or an attribute classes with their names"
        )
    return tuple(str(number) for number in range(largest + 1))


def _check_statistics(mean: list[float], channels: int) -> None:
    if len(mean) not in (1, channels):
        raise UserError(
            f"data.normalize: has {len(mean)} values, but the images have {channels} channels\n"
            "    allowed: one value a channel, one for all, or null to measure them"
        )


def _measure(
    dataset: Dataset[Any], indices: Indices, transforms: list[SampleTransform], skips: bool
) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel, pixels in [0, 1], in float64; zero deviations become 1.

    With `skips`, samples that cannot be read are left out.
    """
    if isinstance(dataset, ImageArrays) and not transforms:
        chunks: Iterator[Tensor] = (
            dataset.images[indices[start : start + 4096]] for start in range(0, len(indices), 4096)
        )
    else:
        chunks = _read_one_by_one(dataset, _measured(indices), transforms, skips)
    count, total, squares = 0, torch.zeros(()).double(), torch.zeros(()).double()
    for chunk in chunks:
        pixels = chunk.double() / (255 if chunk.dtype == torch.uint8 else 1)
        count += pixels.numel() // pixels.shape[1]
        total = total + pixels.sum(dim=(0, 2, 3))
        squares = squares + pixels.square().sum(dim=(0, 2, 3))
    mean = total / count
    std = (squares / count - mean.square()).clamp_min(0).sqrt()
    if not bool((mean + std).isfinite().all()):
        raise _not_finite(dataset, indices, transforms, skips)
    std = torch.where(std > 0, std, torch.ones_like(std))
    return [round(value, 6) for value in mean.tolist()], [max(round(value, 6), 1e-6) for value in std.tolist()]


def _not_finite(dataset: Dataset[Any], indices: Indices, transforms: list[SampleTransform], skips: bool) -> UserError:
    """The error that names a sample whose values make the statistics infinite or not a number."""
    settings = "or data.normalize.mean and data.normalize.std, such as [0.5] and [0.5]"
    for index in _measured(indices):
        for image in _read_one_by_one(dataset, [index], transforms, skips):
            if not bool(image.isfinite().all()):
                return UserError(
                    f"data.dataset: sample {index} of 'train' has values that are not finite, and data.normalize is "
                    f"measured on them\n    allowed: this sample corrected or removed, {settings}"
                )
    return UserError(
        "data.normalize: the mean or the standard deviation of 'train' is not finite, as its values are too large\n"
        f"    allowed: smaller values, {settings}"
    )


def _measured(indices: Indices) -> list[int]:
    return indices[:: max(1, len(indices) // _MEASURED)].tolist()


def _read_one_by_one(
    dataset: Dataset[Any], indices: list[int], transforms: list[SampleTransform], skips: bool
) -> Iterator[Tensor]:
    for index in indices:
        try:
            image, _ = _sample("train", dataset, index, transforms)
        except MemoryError:
            raise
        except Exception:
            if not skips:
                raise
            continue
        yield image[None]


def _short(values: list[float]) -> str:
    return ", ".join(f"{value:.4f}" for value in values)
