"""A data set with its splits, ready for training and evaluation, and what builds their loaders."""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from runner.base.errors import UserError
from runner.config.schema.sections import Data
from runner.config.schema.train import Train
from runner.config.targets import FACTS, build
from runner.data.bad_samples import NOT_READ, BadSample, BadSamples, ReplacementSampler
from runner.data.consistency import Examples
from runner.data.dataset_fingerprint import fingerprint_data
from runner.data.loaders import Batch, BatchPlan, Fields, Loader, MemoryLoader
from runner.data.placement import DataPlacement
from runner.data.sampler import AllSamples, BlockOrder, GivenOrder, block_ends
from runner.data.samples import Read, SampleTransform, SeededDataset, collate
from runner.data.sources.folders import ImageFolder
from runner.data.sources.listing import in_two_splits
from runner.data.splits import Parts, targets_of
from runner.data.transforms.augment import Pipeline
from runner.data.transforms.mixing import Mixing
from runner.data.workers import WorkerLoader, worker_options


@dataclass
class SplitData:
    """One split: batches as the model takes them, and how they are prepared on the device; mixing comes last, if any."""

    loader: Loader
    prepare: Pipeline
    mix: Mixing | None = None

    @property
    def samples(self) -> int:
        """Samples of an epoch."""
        return self.loader.samples


@dataclass
class DataModule:
    """A data set, ready for training and evaluation."""

    train: SplitData
    val: SplitData | None
    test: SplitData | None
    train_for_eval: SplitData  # the training split in order, without augmentation
    classes: tuple[str, ...]  # names; empty for regression
    class_counts: Tensor | None  # training samples of each class, int64 (C,)
    channels: int
    image_size: tuple[int, int]  # height and width
    mean: list[float]
    std: list[float]
    example: tuple[Tensor, Tensor]  # the first training sample, image (1, C, H, W) and target (1, ...), on the device
    choices: list[tuple[str, str, str]] = field(default_factory=list)  # rows of (label, value, reason) to show
    warnings: list[str] = field(default_factory=list)
    bad_samples: BadSamples = field(default_factory=BadSamples)
    fingerprint: Callable[[], dict[str, Any]] = dict  # computes a fingerprint of the data, for checkpoints
    parts: Parts = field(default_factory=dict)
    # For each split the image (C, H, W) and the target (...) of its first sample, on the CPU.
    examples: Examples = field(default_factory=dict)
    # The targets of the whole data set, (N, ...), of each split where they are known without reading samples.
    targets: Mapping[str, Tensor] = field(default_factory=dict)
    # Why the splits cannot be used together; `check` examines such data, all else refuses them.
    incompatibilities: list[UserError] = field(default_factory=list)
    # Splits that were searched for samples that are not finite.
    searched_for_nonfinite: set[str] = field(default_factory=set)
    # The first two samples of the training split as a batch, if samples are not pairs of image and target; else None.
    trial: Batch | None = None
    # Makes a batch of so many copies of these samples; None where there is no `trial`.
    repeated: Callable[[int], Batch] | None = None
    # Reads the first samples of an evaluated split as evaluations do, at most two; None where there is no `trial`.
    evaluated: Callable[[], Batch] | None = None

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        return self.channels, *self.image_size

    @property
    def target_shape(self) -> tuple[int, ...]:
        """Shape of the target of a sample."""
        return tuple(self.example[1].shape[1:])

    def eval_split(self, name: str) -> SplitData | None:
        """A split as it is evaluated: without augmentation, in order."""
        return {"train": self.train_for_eval, "val": self.val, "test": self.test}[name]

    def close(self) -> None:
        """End worker processes."""
        for split in (self.train, self.val, self.test, self.train_for_eval):
            if split is not None:
                split.loader.close()


def read_dataset(data: Data) -> Any:
    """What the function or class of `data.dataset` gives."""
    return build("data.dataset", data.dataset, facts={name: getattr(data, name) for name in FACTS["data.dataset"]})


def as_splits(made: Any) -> dict[str, Dataset[Any]]:
    """The data sets by the names of their splits."""
    datasets = dict(made) if isinstance(made, Mapping) else {"train": made}
    for name, dataset in datasets.items():
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise UserError(
                "data.dataset",
                f"its '{name}' is a {type(dataset).__name__}, which has no length or no items",
                "a map-style data set giving (image, target), or a mapping of split names to such",
            )
    return datasets


class LoaderBuilder:
    """Builds the loaders of the splits: from memory, or through workers, as `placement` says."""

    def __init__(self, config: Train, device: torch.device, parts: Parts) -> None:
        self.config, self.device, self.parts, self.placement = config, device, parts, DataPlacement()
        self.pairs, self.bad_samples = config.data.images is None, BadSamples(config.data.max_skipped)
        skips = config.data.on_error == "skip"
        self.replacements = {name: ReplacementSampler(config.seed, part[1]) for name, part in parts.items() if skips}
        self.ends = block_ends(*parts["train"]) if config.data.shuffle == "blocks" else None

    @functools.cached_property
    def sample_train(self) -> list[SampleTransform]:
        """Transforms of the samples of training."""
        return callables("transform.sample_train", self.config.transform.sample_train)

    @functools.cached_property
    def sample_eval(self) -> list[SampleTransform]:
        """Those of evaluations."""
        return callables("transform.sample_eval", self.config.transform.sample_eval)

    def reader(self, name: str, training: bool) -> SeededDataset:
        """Reads samples of a split, as training or evaluations get them."""
        source, replacements = self.placement.source(self.parts[name][0]), self.replacements.get(name)
        transforms = self.sample_train if training else self.sample_eval
        if not self.pairs:  # each reader has its own, as they may keep state
            transforms = copy.deepcopy(transforms)
        return SeededDataset(source, self.config.seed, transforms, replacements, name, pairs=self.pairs)

    def build(
        self,
        name: str,
        training: bool,
        prepare: Pipeline | Fields,
        mix: Mixing | None = None,
        *,
        collate: Callable[[list[Any]], Read] = collate,
    ) -> Loader:
        """The loader of a split."""
        (dataset, indices), data = self.parts[name], self.config.data
        plan = BatchPlan(indices, self.config.evaluate.batch_size, self.config.seed)
        if training:
            plan = BatchPlan(indices, data.samples_a_batch, self.config.seed, data.shuffle is not False)
        note = self.bad_samples.noting(name, dataset, len(indices))
        # Workers read files; what is in memory or in a cache needs no processes
        if self.placement.in_memory is None:
            return WorkerLoader(
                self.reader(name, training),
                plan,
                self.device,
                workers=self.placement.workers,
                prepare=prepare,
                mix_batch=mix,
                on_skipped=note,
                collate=collate,
                **worker_options(data, self.device),
            )
        # A cache knows already which images cannot be read, so that they are noted before training.
        unreadable, source_of = self.placement.unreadable(dataset), None
        if not isinstance(indices, AllSamples):
            unreadable = unreadable[torch.isin(unreadable, indices)]
        if name in self.replacements and len(unreadable):
            note([BadSample(sample, NOT_READ) for sample in unreadable.tolist()])
            source_of = functools.partial(self.replacements[name].sources, unreadable=unreadable)
        images, targets = self.placement.stored(dataset)
        assert isinstance(prepare, Pipeline), "samples in memory are pairs"
        return MemoryLoader(images, targets, plan, self.device, prepare=prepare, mix_batch=mix, source_of=source_of)


def assembled(
    loaders: LoaderBuilder,
    split: Callable[[str, bool], SplitData],
    draws: Callable[[int], Any] | None = None,
    **facts: Any,
) -> DataModule:
    """The data of which `split` builds each part, for training or for evaluations; `draws` is the order of training, if given."""
    # The training split is read a second time without augmentation, for BatchNorm's statistics and for checks
    config, parts, train, train_for_eval = loaders.config, loaders.parts, split("train", True), split("train", False)
    train.loader.draws = draws
    folders = {name: dataset for name, (dataset, _) in parts.items() if isinstance(dataset, ImageFolder)}
    facts["warnings"] += dict.fromkeys(text for folder in folders.values() for text in folder.warnings)
    # Annotations may list a file twice; the folders of an index do not, and may have a million
    names = {name: [*map(os.fsdecode, each.file_names())] for name, each in folders.items() if not each.indexed}
    files = {name: map(of.__getitem__, parts[name][1][:].tolist()) for name, of in names.items()}
    shared = in_two_splits("file", files)
    facts["warnings"] += [f"data.dataset: {warning}; list each file for one split" for warning in shared]
    if loaders.ends is not None:
        train.loader.draws = functools.partial(BlockOrder, loaders.ends, config.data.shuffle_window, config.seed)
    elif config.data.shuffle_window != Data.shuffle_window:
        problem = f"has no effect: data.shuffle={str(config.data.shuffle).lower()} is not blocks"
        facts["warnings"].append(f"data.shuffle_window={config.data.shuffle_window} {problem}")
    use_batch_sampler(config, train.loader, parts)
    sources = {name: loaders.placement.source(dataset) for name, (dataset, _) in parts.items()}
    fingerprint = functools.partial(fingerprint_data, parts, sources, ends=loaders.ends)
    return DataModule(
        train=train,
        val=split("val", False) if "val" in parts else None,
        test=split("test", False) if "test" in parts else None,
        train_for_eval=train_for_eval,
        bad_samples=loaders.bad_samples,
        fingerprint=functools.cache(functools.partial(fingerprint, pairs=loaders.pairs)),
        parts=parts,
        **facts,
    )


def use_batch_sampler(config: Train, loader: Loader, parts: Parts) -> None:
    """Let the function of `data.batch_sampler`, if any, give the order of the training samples.

    Raises:
        UserError: if it gives no samples of the training split, or others when it is called again.
    """
    if (node := config.data.batch_sampler) is None:
        return
    dataset, indices = parts["train"]
    some = Subset(dataset, indices[:].tolist())
    if (targets := targets_of(dataset)) is not None:
        some.targets = targets[indices[:]]  # type: ignore[attr-defined]  # classes are known without reading samples
    function = functools.partial(make_callable("data.batch_sampler", node), some, config.data.samples_a_batch)
    loader.draws = functools.partial(GivenOrder, function, len(some), config.seed)
    once, again = (loader.draws(0) for _ in range(2))
    if not torch.equal(once.slice(0, once.samples), again.slice(0, again.samples)):
        problem = "gives other samples when it is called again for the same epoch, so a run could not be resumed"
        raise UserError("data.batch_sampler", problem, "random numbers from its argument generator alone, and no state")
    loader.samples = once.samples


def callables(key: str, nodes: list[dict[str, Any]]) -> list[Any]:
    """Build a list of transforms; raises `UserError` if one refuses its arguments or cannot be called."""
    return [make_callable(f"{key}.{index}", node) for index, node in enumerate(nodes)]


def make_callable(key: str, node: dict[str, Any]) -> Any:
    """Build what must be something that can be called."""
    made = build(key, node)
    if not callable(made):
        raise UserError(key, f"{node['_target_']} gives something that cannot be called")
    return made
