"""A data set with its splits, ready for training and evaluation."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.base.errors import UserError
from runner.config.schema.sections import Data
from runner.config.schema.train import Train
from runner.config.targets import FACTS, build, resolve
from runner.data.bad_samples import NOT_READ, BadSample, BadSamples, ReplacementSampler
from runner.data.dataset_fingerprint import fingerprint_data
from runner.data.loaders import Batch, BatchPlan, Fields, Loader, MemoryLoader
from runner.data.sampler import AllSamples
from runner.data.samples import SampleTransform, SeededDataset, batch_of, pair_batch, stacked
from runner.data.sources.arrays import CachedImages
from runner.data.sources.bands import KEPT
from runner.data.sources.folders import ImageList
from runner.data.sources.masks import MaskFolder
from runner.data.splits import Parts
from runner.data.transforms.augment import Pipeline
from runner.data.transforms.mixing import Mixing
from runner.data.workers import WorkerLoader, as_numbers
from runner.instrument.nested import mapped_items, tensors_moved

_TRIED = 2  # samples


@dataclass
class SplitData:
    """One split: its batches as the model takes them, and how these are made of samples; mixing comes last, if any."""

    loader: Loader
    prepare: Pipeline  # of the fields that are images
    mix: Mixing | None = None
    collate: Callable[[list[Any]], Any] = pair_batch

    @property
    def samples(self) -> int:
        """Samples of an epoch."""
        return self.loader.samples

    def batch(self, samples: Sequence[Any], indices: Tensor, epoch: int = 0) -> Batch:
        """Samples, as `SeededDataset` gives them, as a batch of the loader, but for mixing; `indices` are theirs, int64 (B,)."""
        device, prepare = self.loader.device, self.loader.prepare
        assert prepare is not None
        # A function of the user may change what it is given; the copy of a view would copy all that it is a view of
        given = [*samples] if self.collate is pair_batch else [*map(copy.deepcopy, samples)]
        data = mapped_items(batch_of(given, self.collate), np.ndarray, as_numbers)
        indices = indices.to(device)
        return Batch(prepare(tensors_moved(data, device), indices, epoch), indices)


def read_datasets(data: Data) -> dict[str, Dataset[Any]]:
    """The data sets that the function or class of `data.dataset` gives, by the names of their splits."""
    made = build("data.dataset", data.dataset, facts={name: getattr(data, name) for name in FACTS["data.dataset"]})
    datasets = dict(made) if isinstance(made, Mapping) else {"train": made}
    for name, dataset in datasets.items():
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            problem = f"its '{name}' is a {type(dataset).__name__}, which has no length or no items"
            allowed = "a map-style data set giving (image, target), or a mapping of split names to such"
            raise UserError("data.dataset", problem, allowed)
        if data.decode != "auto" and (files := _files(dataset)) is not None:
            files.decoding = replace(files.decoding, decode=data.decode)
    return datasets


def _files(dataset: Dataset[Any]) -> ImageList | None:
    """The image files of a data set, if it has any."""
    files = dataset.images if isinstance(dataset, MaskFolder) else dataset
    return files if isinstance(files, ImageList) else None


def callables(key: str, nodes: list[dict[str, Any]]) -> list[Any]:
    """Build a list of transforms; raises `UserError` if one refuses its arguments or cannot be called."""
    return [make_callable(f"{key}.{index}", node) for index, node in enumerate(nodes)]


def make_callable(key: str, node: dict[str, Any]) -> Any:
    """Build what must be something that can be called."""
    made = build(key, node)
    if not callable(made):
        raise UserError(key, f"{node['_target_']} gives something that cannot be called")
    return made


@dataclass(eq=False)
class DataModule:
    """A data set with its splits, ready for training and evaluation: what is known of it, and what builds its loaders.

    `read_data` sets what has a default; most of that stays unknown of samples that are not pairs. Loaders are built from memory,
    or with workers, which is decided once the first samples are known (`runner.data.placement`).
    """

    config: Train
    device: torch.device  # where batches are
    parts: Parts  # the data set and the samples of each split
    dtype: torch.dtype  # of prepared images
    in_memory: torch.device | None = None  # where images are gathered from; None to read samples one by one
    workers: int = 0  # processes that read them one by one
    caches: dict[int, CachedImages] = field(default_factory=dict)  # by the `id` of the data set
    train: SplitData = field(init=False)
    val: SplitData | None = None
    test: SplitData | None = None
    train_for_eval: SplitData = field(init=False)  # the training split in order, without augmentation
    classes: tuple[str, ...] = ()  # names; empty for regression
    class_counts: Tensor | None = None  # training samples of each class, int64 (C,)
    channels: int = 0
    image_size: tuple[int, int] = (0, 0)  # height and width
    kept_channels: int | None = None  # of image files, before transforms, unless they are converted to grey or RGB
    mean: list[float] = field(default_factory=list)  # of each channel, of pixels in [0, 1]
    std: list[float] = field(default_factory=list)
    mixing: Mixing | None = None
    ends: Tensor | None = None  # of blocks of training samples, if they are shuffled by them
    choices: list[tuple[str, str, str]] = field(default_factory=list)  # rows of (label, value, reason) to show
    warnings: list[str] = field(default_factory=list)
    # For each split the image (C, H, W) and the target (...) of its first sample, on the CPU.
    examples: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    # The targets of the whole data set, (N, ...), of each split where they are known without reading samples.
    targets: dict[str, Tensor] = field(default_factory=dict)
    # Why the splits cannot be used together; `check` examines such data, all else refuses them.
    incompatibilities: list[UserError] = field(default_factory=list)
    # The first samples of the training split with their indices; of pairs the first one twice, as evaluations get it.
    tried: tuple[Sequence[Any], Tensor] = ((), torch.arange(0))
    # Splits that were searched for samples that are not finite.
    searched_for_nonfinite: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        data = self.config.data
        self.pairs = data.images is None  # whether samples are an image and a target; else they have any fields
        self.bad_samples = BadSamples(data.max_skipped)  # that could not be read
        skips = data.on_error == "skip"
        self.replacements = {
            name: ReplacementSampler(self.config.seed, indices) for name, (_, indices) in self.parts.items() if skips
        }
        self._collate, self._stored = pair_batch, dict[int, tuple[Tensor, Tensor]]()
        if not self.pairs:
            # The task is built later, as it has to know the data; how it makes batches is a matter of its class
            of_task = getattr(resolve(self.config.task["_target_"]), "collate", None)
            own = of_task if data.collate is None else make_callable("data.collate", data.collate)
            self._collate = own or stacked

    def fix_channels(self) -> None:
        """Let the first sample say which channels and bits all image files must have whose channels are kept."""
        name, (dataset, indices) = next(iter(self.parts.items()))
        if (files := _files(dataset)) is None or files.decoding.channels not in KEPT:
            return
        reader = SeededDataset(dataset, self.config.seed, (), self.replacements.get(name), name, pairs=False)
        first = reader[0, int(indices[0])][0]
        self.kept_channels = len(first)
        for dataset, _ in self.parts.values():
            if (files := _files(dataset)) is not None:
                files.decoding = replace(files.decoding, found=(len(first), first.dtype))

    @property
    def sources(self) -> dict[str, Dataset[Any]]:
        """What each split is read from: its data set, or the cache of it."""
        return {name: self.caches.get(id(dataset), dataset) for name, (dataset, _) in self.parts.items()}

    @functools.cached_property
    def sample_train(self) -> list[SampleTransform]:
        """Transforms of the samples of training."""
        why = "without data.images, transforms take images alone" if self.pairs else ""
        if self.config.data.shuffle == "blocks":
            why = "data.shuffle=blocks reads shards one after another"
        return self._of_samples("sample_train", why)

    @functools.cached_property
    def sample_eval(self) -> list[SampleTransform]:
        """Those of evaluations."""
        return self._of_samples("sample_eval", "an evaluation takes each sample alone")

    def _of_samples(self, name: str, why: str) -> list[SampleTransform]:
        """Transforms of a list in the config; raises `UserError` if one takes other samples and `why` speaks against it."""
        made = callables(f"transform.{name}", getattr(self.config.transform, name))
        for number, transform in enumerate(made):
            if why and getattr(transform, "takes_others", False):
                problem = f"takes other samples of the training split, and {why}"
                raise UserError(f"transform.{name}.{number}", problem, "transforms of one sample")
        return made

    def close_others(self, epochs: int) -> None:
        """Leave transforms that take other samples out of the last of `epochs`; to be called before workers start."""
        if closed := self.config.transform.close_epochs:
            if not any(getattr(transform, "takes_others", False) for transform in self.sample_train):
                problem = "has no effect: no transform of transform.sample_train takes other samples"
                self.warnings.append(f"transform.close_epochs={closed} {problem}")
            elif closed >= epochs:
                self.warnings.append(
                    f"transform.close_epochs={closed} leaves no epoch with mosaics: the run has {epochs}"
                )
            if isinstance(self.train.loader, WorkerLoader):
                self.train.loader.reader.others_until = epochs - closed

    def fingerprint(self) -> dict[str, Any]:
        """Read a few samples, and compute what tells these data from others, for checkpoints."""
        return fingerprint_data(self.parts, self.sources, pairs=self.pairs, ends=self.ends)

    def reader(self, name: str, training: bool, *, replacing: bool = True) -> SeededDataset:
        """Reads samples of a split, as training or evaluations get them; `replacing` those that cannot be read, as configured."""
        transforms = self.sample_train if training else self.sample_eval
        if not self.pairs:  # each reader has its own, as they may keep state
            transforms = copy.deepcopy(transforms)
        replacements = self.replacements.get(name) if replacing else None
        others = self.parts[name][1] if training else AllSamples(0)
        arguments = self.sources[name], self.config.seed, transforms, replacements, name
        return SeededDataset(*arguments, pairs=self.pairs, collate=self._collate, others=others)

    def first(self, name: str, training: bool, most: int) -> tuple[Sequence[Any], Tensor]:
        """The first samples of a split, at most two, and their indices."""
        indices = self.parts[name][1][: min(_TRIED, most)]
        return self.reader(name, training).items([(0, index) for index in indices.tolist()]), indices

    def split(self, name: str, training: bool) -> SplitData:
        """A split for training, or for evaluations, which neither shuffle nor augment."""
        (dataset, indices), config, data = self.parts[name], self.config, self.config.data
        key, nodes = ("train", config.transform.train) if training else ("eval", config.transform.eval)
        steps, memory = callables(f"transform.{key}", nodes), {"channels_last": config.channels_last}
        mean, std = self.mean or data.normalize.mean or [0.0], self.std or data.normalize.std or [1.0]
        pipeline = Pipeline(steps, mean, std, config.seed, self.device, **memory, dtype=self.dtype)
        wide = not self.pairs and self.dtype == torch.float64
        prepare = Fields(["0"] if data.images is None else data.images, pipeline, wide)
        mix = self.mixing if training else None
        batch_size, shuffle = config.evaluate.batch_size, False
        if training:
            batch_size, shuffle = data.samples_a_batch, data.shuffle is not False
        plan = BatchPlan(indices, batch_size, config.seed, shuffle, prepare, mix)
        note = functools.partial(self.bad_samples.note, name, dataset, len(indices))
        # Workers read files; what is in memory or in a cache needs no processes
        if self.in_memory is None:
            reader = self.reader(name, training)
            if self.pairs and data.decode == "device":
                reader.encoded = copy.copy(dataset)
                reader.encoded.defers = True
            loader = WorkerLoader(reader, plan, self.device, data, workers=self.workers, on_skipped=note)
            return SplitData(loader, pipeline, mix, self._collate)
        source, source_of = self.sources[name], None
        # A cache knows already which images cannot be read, so that they are noted before training.
        unreadable = getattr(source, "unreadable", torch.arange(0))
        if not isinstance(indices, AllSamples):
            unreadable = unreadable[torch.isin(unreadable, indices)]
        if name in self.replacements and len(unreadable):
            note([BadSample(sample, NOT_READ) for sample in unreadable.tolist()])
            source_of = functools.partial(self.replacements[name].sources, unreadable=unreadable)
        if id(source) not in self._stored:  # once for all splits that are read from it
            copied = data.placement == "ram" and isinstance(source, CachedImages)
            images = source.images.to(self.in_memory, copy=copied)  # type: ignore[attr-defined]
            self._stored[id(source)] = images, source.targets.to(self.in_memory)  # type: ignore[attr-defined]
        images, targets = self._stored[id(source)]
        return SplitData(MemoryLoader(images, targets, plan, self.device, source_of), pipeline, mix)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        return self.channels, *self.image_size

    @property
    def target_shape(self) -> tuple[int, ...]:
        """Shape of the target of a sample."""
        return tuple(self.example[1].shape[1:])

    @property
    def example(self) -> tuple[Tensor, Tensor]:
        """The first training sample, image (1, C, H, W) and target (1, ...), on the device; without values if there is none."""
        image, target = (each[None] for each in self.examples["train"]) if self.pairs else (torch.empty(0),) * 2
        return image.to(self.device), target.to(self.device)

    @functools.cached_property
    def trial(self) -> Batch:
        """The batch that is tried before training: the first two samples, or one where a batch has one; of pairs, copies of one."""
        return self.example_batch(len(self.tried[1]))

    def example_batch(self, samples: int) -> Batch:
        """A batch of so many copies of the first training samples, pairs without augmentation."""
        if self.pairs:  # views of one image, as a batch that is tried may be as large as the device
            image, target = (each.expand(samples, *each.shape[1:]) for each in self.example)
            indices = torch.zeros(samples, dtype=torch.int64, device=self.device)
            return Batch((self.train_for_eval.prepare(image, indices, 0), target), indices)
        items, indices = self.tried
        places = torch.arange(samples) % len(items)
        return self.train_for_eval.batch([items[place] for place in places.tolist()], indices[places])

    def evaluated_batch(self) -> Batch:
        """The first samples as evaluations get them, at most two; of pairs, those of training."""
        if self.pairs:
            return self.trial
        name, split = next((name, split) for name in ("val", "test", "train") if (split := self.eval_split(name)))
        return split.batch(*self.first(name, False, split.loader.batch_size))

    def eval_split(self, name: str) -> SplitData | None:
        """A split as it is evaluated: without augmentation, in order."""
        return {"train": self.train_for_eval, "val": self.val, "test": self.test}[name]

    def close(self) -> None:
        """End worker processes."""
        for split in (self.train, self.val, self.test, self.train_for_eval):
            if split is not None:
                split.loader.close()
