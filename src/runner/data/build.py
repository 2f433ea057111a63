"""Build the splits, which give batches, from the sections `data` and `transform` of the config."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from runner.base.errors import DataFailed, UserError, blame
from runner.config.schema.sections import Data
from runner.config.schema.train import Train
from runner.data.loaders import Batch
from runner.data.module import DataModule, make_callable, read_datasets
from runner.data.placement import place
from runner.data.sampler import BalancedOrder, BlockOrder, ClassBalance, GivenOrder, Indices, RepeatFactors, block_ends
from runner.data.sources.arrays import ImageArrays
from runner.data.sources.folders import ImageFolder, ImageList
from runner.data.sources.listing import IndexFile, in_two_splits
from runner.data.sources.masks import MaskFolder
from runner.data.splits import Parts, groups_of, make_splits, targets_of
from runner.data.transforms.augment import as_shown
from runner.data.transforms.mixing import Mixing
from runner.data.workers import as_numbers
from runner.instrument.nested import fields_of, mapped_items, tensors_in

_MOST_CLASSES = 2**16  # numbered ones, in a data set that has fewer samples and no names for them
_MEASURED = 2048  # images that statistics are measured on if they are read one by one
_GIVEN = "data.normalize.mean and data.normalize.std, such as [0.5] and [0.5]"


def read_data(config: Train, device: torch.device, *, make_cache: bool = False, dtype: torch.dtype) -> DataModule:
    """Read the data set and prepare its splits.

    `make_cache=False` uses an existing cache of `data.cache` and makes none, for images that are read once. `dtype` is that of
    prepared images.

    Raises:
        UserError: if the data cannot be found, read or split, or do not fit the settings.
    """
    data = config.data
    parts = make_splits(read_datasets(data), data.split)
    train_set, train_indices = parts["train"]
    made = DataModule(config, device, parts, dtype)
    made.fix_channels()
    made.warnings += train_set.keep_indexes(make_cache) if isinstance(train_set, ImageList) else []
    made.ends = block_ends(train_set, train_indices) if data.shuffle == "blocks" else None
    made.classes = tuple(str(name) for name in getattr(train_set, "classes", None) or ())
    # The first samples tell what batches are like, before anything is built for them
    if made.pairs:
        _learn_of_pairs(made, make_cache)
    else:
        items, _ = made.tried = made.first("train", True, data.samples_a_batch)
        tensors = tensors_in(mapped_items([*items], np.ndarray, as_numbers))
        if any(each.layout != torch.strided for each in tensors):
            raise UserError("data.dataset", "has sparse or nested tensors", "to_dense(), or indices and values")
        place(made, sum(each.nbytes for each in tensors) // len(items))
        made.choices += [as_shown(data.normalize.mean, data.normalize.std)] if data.images else []
        # Pixels are counted where a loss asks for it, as all masks are read
        if config.loss.get("class_weights") == "balanced" and hasattr(train_set, "class_counts"):
            made.class_counts = train_set.class_counts(train_indices[:].tolist())
    made.warnings += _files_listed_twice(parts)
    # Mixing needs the number of classes to make probabilities of targets
    if (node := config.transform.mix) is not None:
        made.mixing = Mixing(make_callable("transform.mix", node), config.seed, len(made.classes) or None)
    # The training split is read a second time without augmentation, for BatchNorm's statistics and for checks
    made.train, made.train_for_eval = made.split("train", True), made.split("train", False)
    made.val, made.test = (made.split(name, False) if name in parts else None for name in ("val", "test"))
    loader = made.train.loader
    # Balanced sampling is only for training: evaluations count every sample once
    if data.sampler == "balanced":
        balance = _balance(made, train_indices, make_cache)
        loader.draws = functools.partial(BalancedOrder, balance, config.seed)
        if isinstance(balance, RepeatFactors):
            how = f"images of rare classes up to {balance.factors.max() / balance.factors.min():.3g} times as often"
        else:
            amounts = f"{int(balance.sizes.min()):,} to {int(balance.sizes.max()):,} samples"
            how = f"{len(balance.sizes)} classes of {amounts}, each drawn equally often"
        made.choices.append(("sampler", "balanced", how))
    if made.ends is not None:
        loader.draws = functools.partial(BlockOrder, made.ends, data.shuffle_window, config.seed)
    elif data.shuffle_window != Data.shuffle_window:
        problem = f"has no effect: data.shuffle={str(data.shuffle).lower()} is not blocks"
        made.warnings.append(f"data.shuffle_window={data.shuffle_window} {problem}")
    if data.batch_sampler is not None:
        _use_batch_sampler(made, data.batch_sampler)
    if not made.pairs:  # the functions that make batches of samples are tried before a model is built
        _ = made.trial
    return made


def _learn_of_pairs(made: DataModule, make_cache: bool) -> None:
    """Set what is known of images and targets, and decide how they are read."""
    data, parts, (train_set, indices) = made.config.data, made.parts, made.parts["train"]
    made.examples = {name: made.first(name, False, 1)[0][0] for name in parts}
    first, made.tried = made.examples["train"][0], ([made.examples["train"]] * 2, torch.zeros(2, dtype=torch.int64))
    place(made, first.nbytes, make_cache)

    # Targets that are known without reading samples give class weights, stratified splits and balanced sampling.
    _learn_targets(made)
    made.warnings += shared_groups(parts, data.split.group) if data.split.group else []
    made.classes = made.classes or _numbered_classes(train_set)
    channels, height, width = first.shape
    made.channels, made.image_size = channels, (height, width)
    # Files are resized when they are read, and transforms may crop them again
    cropped = isinstance(train_set, ImageList) and made.sample_eval
    if data.image_size is not None and not cropped and (height, width) != (data.image_size, data.image_size):
        problem = f"has no effect: the images of this data set are {height}x{width}"
        made.warnings.append(f"data.image_size={data.image_size} {problem}")
    # `check` examines data whose splits do not fit together; all else refuses them
    made.incompatibilities = [*_different_images(made.examples), *_different_classes(parts, made.classes)]
    targets, classes = targets_of(train_set), len(made.classes)
    if targets is not None and targets.ndim == 1 and not targets.is_floating_point() and classes:
        # The task refuses numbers outside of the classes, which do not count here
        numbers = targets[indices[:]].long()
        made.class_counts = torch.bincount(numbers[(numbers >= 0) & (numbers < classes)], minlength=classes)

    mean, std, reason = data.normalize.mean, data.normalize.std, ""
    if mean is None or std is None:
        mean, std = _measured(made)
        reason = "measured on the training split"
    if len(mean) not in (1, channels):
        problem = f"has {len(mean)} values, but the images have {channels} channels"
        raise UserError("data.normalize", problem, "one value per channel, one for all, or null to measure them")
    made.mean, made.std = mean, std
    made.choices.append(as_shown(mean, std, reason))


def _files_listed_twice(parts: Parts) -> list[str]:
    """Warnings of folders of images, and of files that are in two splits."""
    sets = {
        name: dataset.images if isinstance(dataset, MaskFolder) else dataset for name, (dataset, _) in parts.items()
    }
    folders = {name: dataset for name, dataset in sets.items() if isinstance(dataset, ImageFolder)}
    warnings = list(dict.fromkeys(text for folder in folders.values() for text in folder.warnings))
    # Annotations may list a file twice; the folders of an index do not, and may have a million
    names = {name: [*map(os.fsdecode, each.file_names())] for name, each in folders.items() if not each.indexed}
    files = {name: map(of.__getitem__, parts[name][1][:].tolist()) for name, of in names.items()}
    return warnings + [f"data.dataset: {each}; list each file for one split" for each in in_two_splits("file", files)]


def _balance(made: DataModule, indices: Indices, keep: bool) -> ClassBalance | RepeatFactors:
    """How likely each training sample is by its classes, which a file may `keep`.

    Raises `UserError` if it has none, or they are not known.
    """
    dataset, data = made.parts["train"][0], made.config.data
    if (classes_of := getattr(dataset, "classes_of", None)) is not None:
        file = None
        if isinstance(dataset, MaskFolder):  # which decodes every mask
            key = f"{dataset.fingerprint()} {hashlib.sha256(indices[:].numpy().tobytes()).hexdigest()}"
            file = IndexFile.of(data.cache_folder, f"{data.location} classes", key)
            if (known := file.read()) is not None:
                parts = torch.split(known["classes"], known["counts"].tolist())
                return RepeatFactors([each.tolist() for each in parts])
        shown, read = list[list[int]](), 0
        with blame("data.sampler", "is balanced, and classes_of(index) of the data set fails"):
            for index in indices[:].tolist():
                shown.append([])
                with contextlib.suppress(UserError):  # said, or skipped, when it is used
                    shown[-1], read = classes_of(index), read + 1
            balance = RepeatFactors(shown)
        if file is not None and keep and read == len(shown):  # a file that cannot be read may be repaired
            joined = torch.tensor([*itertools.chain.from_iterable(shown)], dtype=torch.int64)
            warning = file.write({"classes": joined, "counts": torch.tensor([*map(len, shown)])})
            made.warnings += [warning] if warning else []
        return balance
    targets, classes = made.targets.get("train"), len(made.classes)
    if targets is None or not classes or targets.ndim != 1 or targets.is_floating_point():
        unknown = "the classes of the training samples are not known without reading them"
        why = unknown if targets is None and classes else "the targets are not one class per sample"
        allowed = "null, or data with an attribute targets, one class per sample, or a method classes_of(index)"
        raise UserError("data.sampler", f"is balanced, and {why}", allowed)
    # A number outside of the classes is named with its sample by the task
    return ClassBalance(targets[indices[:]].clamp(0, classes - 1))


def _use_batch_sampler(made: DataModule, node: dict[str, Any]) -> None:
    """Let the function of `data.batch_sampler` give the order of the training samples.

    Raises:
        UserError: if it gives no samples of the training split, or others when it is called again.
    """
    (dataset, indices), loader = made.parts["train"], made.train.loader
    some = Subset(dataset, indices[:].tolist())
    if (targets := targets_of(dataset)) is not None:
        some.targets = targets[indices[:]]  # type: ignore[attr-defined]  # classes are known without reading samples
    function = functools.partial(make_callable("data.batch_sampler", node), some, loader.batch_size)
    loader.draws = functools.partial(GivenOrder, function, len(some), made.config.seed)
    once, again = (loader.draws(0) for _ in range(2))
    if not torch.equal(once.slice(0, once.samples), again.slice(0, again.samples)):
        problem = "gives other samples when it is called again for the same epoch, so a run could not be resumed"
        raise UserError("data.batch_sampler", problem, "random numbers from its argument generator alone, and no state")
    loader.samples = once.samples


def _numbered_classes(dataset: Dataset[Any]) -> tuple[str, ...]:
    """The numbers of classes that have no names; empty where targets are none."""
    targets = targets_of(dataset)
    # Only whole numbers, one for each sample, can be classes
    if targets is None or targets.is_floating_point() or targets.ndim != 1 or isinstance(dataset, ImageArrays):
        return ()
    # A number above the count of samples is an identifier rather than a class
    if (largest := int(targets.max())) >= max(_MOST_CLASSES, len(targets)):
        problem = f"the target of sample {int(targets.argmax())} of 'train' is {largest}, and classes have no names"
        raise UserError("data.dataset", problem, "class numbers from 0 on, or an attribute classes with their names")
    return tuple(str(number) for number in range(largest + 1))


def _measured(made: DataModule) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel, pixels in [0, 1], in float64; zero deviations become 1.

    With `data.on_error=skip`, samples that cannot be read are skipped.
    """
    dataset, indices = made.parts["train"]

    def chunks() -> Iterator[tuple[int, Tensor]]:
        # Arrays in memory are measured whole; of files, an even part is enough
        if isinstance(dataset, ImageArrays) and not made.sample_eval:
            for start in range(0, len(indices), 4096):
                yield start, dataset.images[indices[start : start + 4096]]
            return
        reader = made.reader("train", False, replacing=False)
        # Several at once, as keeping the random generators takes longer than a small sample
        for some in torch.split(indices[:: max(1, len(indices) // _MEASURED)], 1 if made.replacements else 64):
            try:
                items = reader.items([(0, index) for index in some.tolist()])
            except Exception as error:
                if not made.replacements or isinstance(error, MemoryError | DataFailed):
                    raise
                continue
            yield from ((index, image[None]) for index, (image, _) in zip(some.tolist(), items, strict=True))

    count, total, squares = 0, torch.zeros(()).double(), torch.zeros(()).double()
    for index, chunk in chunks():
        # A single NaN in the data spoils every statistic, so its sample is named
        if not bool(chunk.isfinite().all()):
            problem = f"sample {index} of 'train' has values that are not finite, so nothing can be measured"
            raise UserError("data.dataset", problem, _GIVEN)
        pixels = chunk.double() / (255 if chunk.dtype == torch.uint8 else 1)
        # Sums in float64: a large data set has more pixels than float32 can count.
        count += pixels.numel() // pixels.shape[1]
        total = total + pixels.sum(dim=(0, 2, 3))
        squares = squares + pixels.square().sum(dim=(0, 2, 3))
    if not count:
        raise UserError("data.dataset", "no sample of 'train' on which data.normalize is measured can be read")
    mean = total / count
    std = (squares / count - mean.square()).clamp_min(0).sqrt()
    if not bool((mean + std).isfinite().all()):
        problem = "the mean or the standard deviation of 'train' is not finite, as its values are too large"
        raise UserError("data.normalize", problem, _GIVEN)
    # A constant channel would be divided by zero
    std = torch.where(std > 0, std, torch.ones_like(std))
    return [round(value, 6) for value in mean.tolist()], [max(round(value, 6), 1e-6) for value in std.tolist()]


# Whether the splits agree with each other and with their attributes. All targets are checked if they are known without reading
# samples, and the first image of each split; `check` looks at more.


def _learn_targets(made: DataModule) -> None:
    """Set the targets of each split where the attribute `targets` agrees with its first sample, and warn of others.

    Raises `UserError` if the attribute has another length.
    """
    for name, (dataset, indices) in made.parts.items():
        targets, index, read = targets_of(made.sources[name]), int(indices[0]), made.examples[name][1]
        if targets is None:
            continue
        samples = len(dataset)  # type: ignore[arg-type]
        if len(targets) != samples:
            problem = f"its attribute targets has {len(targets)} entries for {samples} samples of '{name}'"
            raise UserError("data.dataset", problem, "one target for each sample, or no such attribute")
        # One sample tells whether the attribute is in the order of the samples.
        listed = targets[index]
        if listed.shape == read.shape and torch.allclose(listed.double(), read.double(), equal_nan=True):
            made.targets[name] = targets
        elif getattr(dataset, "target_transform", None) is None:
            made.warnings.append(
                f"data.dataset: its attribute targets has {listed.tolist()} for sample {index} of '{name}', and the sample "
                f"itself {read.tolist()}: stratified splits and class weights follow the attribute; make them agree"
            )


def _different_classes(parts: Parts, classes: Sequence[str]) -> Iterator[UserError]:
    """Classes that have different numbers in two splits; `classes` is empty for regression."""
    for name, (dataset, _) in parts.items():
        theirs = [str(label) for label in getattr(dataset, "classes", None) or ()]
        for number, (one, other) in enumerate(zip(classes, theirs, strict=False)):
            if one != other:
                problem = f"class {number} is '{other}' in '{name}' and '{one}' in 'train'"
                yield UserError("data.dataset", problem, "the same classes in the same order in every split")


def _different_images(examples: Mapping[str, tuple[Tensor, Tensor]]) -> Iterator[UserError]:
    """Why images of one split cannot be used with those of another, by the first one of each."""
    first, _ = examples["train"]
    for name, (image, _) in examples.items():
        if len(image) != len(first):
            problem = f"images of '{name}' have {len(image)} channels, and those of 'train' {len(first)}"
            yield UserError("data.dataset", problem, "images with the same channels in every split")
    # Bytes are divided by 255 and floats are not, so splits of both kinds agree only if the floats end at 1.
    of_bytes = next((name for name, (image, _) in examples.items() if image.dtype == torch.uint8), None)
    for name, (image, _) in examples.items():
        low, high = float(image.min()), float(image.max())
        if of_bytes is not None and image.is_floating_point() and (low < 0 or high > 1):
            problem = f"images of '{name}' are {image.dtype} with values from {low:g} to {high:g}"
            problem += f", and those of '{of_bytes}' uint8, which are divided by 255"
            yield UserError("data.dataset", problem, "uint8 in every split, or floats from 0 to 1")


def shared_groups(parts: Parts, group: str) -> list[str]:
    """Warnings about groups (see `groups_of`) that are in two splits."""
    groups: dict[str, list[str]] = {}
    for name, (dataset, indices) in parts.items():
        try:
            labels = groups_of(dataset, group)
        except UserError as error:  # a test set that comes with the data need not name groups
            problem = error.args[0].splitlines()[0]
            return [f"whether groups are in '{name}' and in another split is not known: {problem}"]
        groups[name] = [labels[index] for index in indices[:].tolist()]
    return [f"data.split.group: {warning}" for warning in in_two_splits("group", groups)]


def not_finite(batches: Iterable[Batch], name: str) -> str:
    """A sentence on the first sample of a split with a number that is not finite; empty if there is none."""
    known = {"images": "pixels that are", "targets": "a target that is"}
    for batch in batches:
        for field, values in fields_of(batch.data).items():
            if not values.is_floating_point() or values.shape[:1] != batch.indices.shape:
                continue
            wrong = (~values.isfinite()).reshape(len(values), -1).any(1)
            if bool(wrong.any()):
                index = int(batch.indices[wrong.nonzero()[0, 0]])
                what = known.get(field, f"a value in '{field}' that is")
                return f"sample {index} of '{name}' has {what} not finite: correct it, or remove it"
    return ""
