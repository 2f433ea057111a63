"""Build the splits, which give batches, from the sections `data` and `transform` of the config."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.base.errors import DataFailed, UserError
from runner.config.schema.sections import Data
from runner.config.schema.train import Train
from runner.data.bad_samples import ReplacementSampler
from runner.data.consistency import Examples, check_classes, check_images, class_counts, known_targets, shared_groups
from runner.data.module import (
    DataModule,
    LoaderBuilder,
    SplitData,
    as_splits,
    assembled,
    callables,
    make_callable,
    read_dataset,
)
from runner.data.placement import plan_placement
from runner.data.sample_rng import preserved_rng
from runner.data.sampler import BalancedOrder, ClassBalance, Indices
from runner.data.samples import SampleTransform, as_pair, as_target, as_tensor, read_sample
from runner.data.sources.arrays import ImageArrays
from runner.data.sources.folders import ImageList
from runner.data.splits import Parts, make_splits, targets_of
from runner.data.transforms.augment import Pipeline, as_shown
from runner.data.transforms.mixing import Mixing
from runner.data.whole_samples import read_whole_samples

_MOST_CLASSES = 2**16  # numbered ones, in a data set that has fewer samples and no names for them
_MEASURED = 2048  # images that statistics are measured on if they are read one by one


def read_data(config: Train, device: torch.device, *, make_cache: bool = False, dtype: torch.dtype) -> DataModule:
    """Read the data set and prepare its splits.

    `make_cache=False` uses an existing cache of `data.cache` and makes none, for images that are read once. `dtype` is that of
    prepared images.

    Raises:
        UserError: if the data cannot be found, read or split, or do not fit the settings.
    """
    if config.data.images is None:
        return _read_pairs(config, device, make_cache=make_cache, dtype=dtype)
    return read_whole_samples(config, device, make_cache=make_cache, dtype=dtype)


def _read_pairs(config: Train, device: torch.device, *, make_cache: bool, dtype: torch.dtype) -> DataModule:
    """Read a data set of images and targets; see `read_data`."""
    data = config.data
    parts = make_splits(as_splits(read_dataset(data)), data.split)
    train_set, train_indices = parts["train"]
    files = train_set if isinstance(train_set, ImageList) else None
    unkept = [] if files is None else files.keep_indexes(make_cache)
    loaders = LoaderBuilder(config, device, parts)
    transforms = loaders.sample_train, loaders.sample_eval

    # The first sample of each split tells what images and targets are like, before anything is built for them.
    examples = _examples(parts, loaders.sample_eval, loaders.replacements)
    first, target = examples["train"]
    placement = plan_placement(config, parts, transforms, device, first, make_cache=make_cache)
    loaders.placement = placement
    sources = {name: placement.source(dataset) for name, (dataset, _) in parts.items()}

    # Targets that are known without reading samples give class weights, stratified splits and balanced sampling.
    known, warnings = known_targets(parts, sources, examples)
    warnings = [*placement.warnings, *unkept, *warnings]
    warnings += shared_groups(parts, data.split.group) if data.split.group else []
    classes, (channels, height, width) = _classes(train_set), first.shape
    incompatibilities = _incompatibilities(parts, examples, classes)
    # Files are resized when they are read, and transforms may crop them again
    cropped = files is not None and loaders.sample_eval
    if data.image_size is not None and not cropped and (height, width) != (data.image_size, data.image_size):
        problem = f"has no effect: the images of this data set are {height}x{width}"
        warnings.append(f"data.image_size={data.image_size} {problem}")
    mean, std, reason = _normalization(data, parts["train"], loaders.sample_eval, channels)
    choices = [as_shown(mean, std, reason)]

    # Mixing needs the number of classes to make probabilities of targets
    mixing = None
    if (node := config.transform.mix) is not None:
        mixing = Mixing(make_callable("transform.mix", node), config.seed, len(classes) or None)

    # A split is built for training and again for evaluation, which neither shuffles nor augments.
    def split(name: str, training: bool) -> SplitData:
        key, nodes = ("train", config.transform.train) if training else ("eval", config.transform.eval)
        steps, memory = callables(f"transform.{key}", nodes), config.channels_last
        prepare = Pipeline(steps, mean, std, config.seed, device, channels_last=memory, dtype=dtype)
        mix = mixing if training else None
        return SplitData(loaders.build(name, training, prepare, mix), prepare, mix)

    # Balanced sampling is only for training: evaluations count every sample once
    draws = None
    if data.sampler == "balanced":
        balance = _balance(known.get("train"), train_indices, len(classes))
        draws, sizes = functools.partial(BalancedOrder, balance, config.seed), balance.sizes
        amounts = f"{int(sizes.min()):,} to {int(sizes.max()):,} samples"
        choices.append(("sampler", "balanced", f"{len(sizes)} classes of {amounts}, each drawn equally often"))
    return assembled(
        loaders,
        split,
        draws,
        classes=classes,
        class_counts=_class_counts(train_set, train_indices, classes),
        channels=channels,
        image_size=(height, width),
        mean=mean,
        std=std,
        example=(first[None].to(device), target[None].to(device)),
        choices=[*placement.choices, *choices],
        warnings=warnings,
        examples=examples,
        targets=known,
        incompatibilities=incompatibilities,
    )


def _incompatibilities(parts: Parts, examples: Examples, classes: tuple[str, ...]) -> list[UserError]:
    """Reasons why the splits do not fit together. They are kept for `check`, which examines such data; all else refuses it."""
    errors = []
    for check in (functools.partial(check_images, examples), functools.partial(check_classes, parts, classes)):
        try:
            check()
        except UserError as error:
            errors.append(error)
    return errors


def _balance(targets: Tensor | None, indices: Indices, classes: int) -> ClassBalance:
    """The samples of the training split by class; raises `UserError` if it has none, or they are not known."""
    # Unknown targets and targets without classes need different advice
    if targets is None and classes:
        problem = "is balanced, and the classes of the training samples are not known without reading them"
        raise UserError(
            "data.sampler", problem, "a data set with an attribute targets that agrees with its samples, or null"
        )
    if targets is None or not classes or targets.ndim != 1 or targets.is_floating_point():
        problem = "is balanced, which draws every class equally often, and the targets are not one class per sample"
        raise UserError("data.sampler", problem, "null, or a data set with one class per sample")
    some = targets[indices[:]]
    if int(some.min()) < 0 or int(some.max()) >= classes:  # named with its sample by the task
        some = some.clamp(0, classes - 1)
    return ClassBalance(some)


def _sample(name: str, dataset: Dataset[Any], index: int, transforms: list[SampleTransform]) -> tuple[Tensor, Tensor]:
    read = lambda index: as_pair(dataset[index], index, name)  # noqa: E731
    image, target = read_sample(read, index, name, transforms, dataset)
    return as_tensor(image), as_target(target)


def _examples(
    parts: Parts, transforms: list[SampleTransform], replacements: Mapping[str, ReplacementSampler]
) -> dict[str, tuple[Tensor, Tensor]]:
    """The image and the target of the first sample of each split that can be read, as they are evaluated."""

    def first(name: str) -> tuple[Tensor, Tensor]:
        dataset, indices = parts[name]

        def read(index: int) -> tuple[Tensor, Tensor]:
            return _sample(name, dataset, index, transforms)

        index = int(indices[0])
        return replacements[name].read(read, 0, index, []) if name in replacements else read(index)

    # Other splits are read without a trace in the generators: the run is the same whichever splits there are.
    examples = {"train": first("train")}
    with preserved_rng():
        return examples | {name: first(name) for name in parts if name != "train"}


def _classes(dataset: Dataset[Any]) -> tuple[str, ...]:
    named = getattr(dataset, "classes", None)
    if named:
        return tuple(str(name) for name in named)
    targets = targets_of(dataset)
    # Only whole numbers, one for each sample, can be classes
    if targets is None or targets.is_floating_point() or targets.ndim != 1 or isinstance(dataset, ImageArrays):
        return ()
    # A number above the count of samples is an identifier rather than a class
    if (largest := int(targets.max())) >= max(_MOST_CLASSES, len(targets)):
        raise UserError(
            "data.dataset",
            f"the target of sample {int(targets.argmax())} of 'train' is {largest}, and the data set does not name its "
            "classes",
            "class numbers from 0 on, or an attribute classes with their names",
        )
    return tuple(str(number) for number in range(largest + 1))


def _class_counts(dataset: Dataset[Any], indices: Indices, classes: tuple[str, ...]) -> Tensor | None:
    targets = targets_of(dataset)
    if targets is None or targets.ndim != 1 or targets.is_floating_point() or not classes:
        return None
    return class_counts(targets[indices[:]], len(classes))


def _normalization(
    data: Data, part: tuple[Dataset[Any], Indices], transforms: list[SampleTransform], channels: int
) -> tuple[list[float], list[float], str]:
    """Mean and deviation, as they are set or measured on the training split; and where they are from, if they were measured."""
    mean, std, reason = data.normalize.mean, data.normalize.std, ""
    if mean is None or std is None:
        mean, std = _measure(part, transforms, data.on_error == "skip")
        reason = "measured on the training split"
    if len(mean) not in (1, channels):
        problem = f"has {len(mean)} values, but the images have {channels} channels"
        raise UserError("data.normalize", problem, "one value per channel, one for all, or null to measure them")
    return mean, std, reason


def _measure(
    part: tuple[Dataset[Any], Indices], transforms: list[SampleTransform], skips: bool
) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel, pixels in [0, 1], in float64; zero deviations become 1.

    With `skips`, samples that cannot be read are skipped.
    """
    dataset, indices = part

    def chunks() -> Iterator[tuple[int, Tensor]]:
        # Arrays in memory are measured whole; of files, an even part is enough
        if isinstance(dataset, ImageArrays) and not transforms:
            for start in range(0, len(indices), 4096):
                yield start, dataset.images[indices[start : start + 4096]]
            return
        for index in indices[:: max(1, len(indices) // _MEASURED)].tolist():
            try:
                yield index, _sample("train", dataset, index, transforms)[0][None]
            except (MemoryError, DataFailed):
                raise
            except Exception:
                if not skips:
                    raise

    count, total, squares = 0, torch.zeros(()).double(), torch.zeros(()).double()
    for _, chunk in chunks():
        pixels = chunk.double() / (255 if chunk.dtype == torch.uint8 else 1)
        # Sums in float64: a large data set has more pixels than float32 can count.
        count += pixels.numel() // pixels.shape[1]
        total = total + pixels.sum(dim=(0, 2, 3))
        squares = squares + pixels.square().sum(dim=(0, 2, 3))
    if not count:
        allowed = "samples that can be read, or data.normalize.mean and data.normalize.std"
        raise UserError("data.dataset", "no sample of 'train' on which data.normalize is measured can be read", allowed)
    mean = total / count
    std = (squares / count - mean.square()).clamp_min(0).sqrt()
    # A single NaN in the data spoils every statistic, so its sample is named
    if not bool((mean + std).isfinite().all()):
        given = "or data.normalize.mean and data.normalize.std, such as [0.5] and [0.5]"
        for index, image in chunks():
            if not bool(image.isfinite().all()):
                problem = (
                    f"sample {index} of 'train' has values that are not finite, and data.normalize is measured on them"
                )
                raise UserError("data.dataset", problem, f"this sample corrected or removed, {given}")
        problem = "the mean or the standard deviation of 'train' is not finite, as its values are too large"
        raise UserError("data.normalize", problem, f"smaller values, {given}")
    # A constant channel would be divided by zero
    std = torch.where(std > 0, std, torch.ones_like(std))
    return [round(value, 6) for value in mean.tolist()], [max(round(value, 6), 1e-6) for value in std.tolist()]
