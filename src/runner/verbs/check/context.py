"""What checks look at: the data, model, loss and step of a run, built as `train` builds them and restored after each check."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from runner.build.batch_size import auto_batch_size
from runner.build.evaluation import load_best
from runner.build.run import Run
from runner.build.validate import validate_limits
from runner.checkpoint import find, resume, rng
from runner.config.errors import UserError
from runner.config.schema.verbs import Check
from runner.config.targets import build
from runner.data.build import DataModule, build_data
from runner.data.loaders import Batch, Loader
from runner.data.samples import SampleTransform, SeededDataset, as_target, as_tensor, collate
from runner.instrument.no_trace import SavedBuffers, evaluating
from runner.runtime.device import choose_device, prepare_repeating
from runner.train import build_run
from runner.verbs.check.result import NotApplicable, need
from runner.verbs.check.split_stats import SplitStats, compute_split_stats, is_classes, known_targets

_SAMPLES = 64  # of the batch that goes through the model, and of one of an evaluation
_FEWEST = 16  # of it for large images and models
_FEWEST_IF_SLOW = 4  # of it if a pass is slow
_SHARE_OF_PASS = 1 / 40  # of the budget, for this batch forward and backward
_BACKWARD = 3  # forward and backward take this many times as long as forward
_PIXELS = 2**21  # of this batch
_PARAMETERS = 2**29  # of the model, times the samples
_SHARE_OF_READING = 0.3  # of the time left, for reading images from disk
_LAST_SHARE = 0.6  # of it, until the checks have as many images as they need
_MOST_SAMPLES = 256  # of a split in full size
_VALUES = 2**24  # pixels and channels of these samples together
_SHARE = 0.05  # of the time left, for reading these samples of one split
_ENOUGH = 128  # images of a split that a check needs to pass
_ENOUGH_OF_CLASS = 2  # the same for each class, on average

# The base classes are private, and torch has no public ones.
DROPOUT, BATCH_NORM = nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm

T = TypeVar("T")


class CheckContext:
    """What checks look at.

    Args:
        config: the validated config.
        found: a checkpoint with the weights of the model, or None.

    Attributes:
        began: start of the time budget, by `time.monotonic`.
        used_stats: whether `stats` was used since this was last set to False.
    """

    def __init__(self, config: Check, found: find.LoadedCheckpoint | None) -> None:
        self.config, self.found, self.began = config, found, time.monotonic()
        prepare_repeating(config.deterministic)
        self.device, _ = choose_device(config.device)
        self._splits: DataModule | None = None
        self._training: Run | None = None
        self._cache: dict[Callable[[CheckContext], Any], tuple[Any, bool]] = {}
        self.used_stats = False

    def build(self) -> None:
        """Build data, model, loss and optimizer.

        Raises:
            UserError: as in `train`.
        """
        if self.config.data.batch_size == "auto":
            self.config, _ = auto_batch_size(self.config, functools.partial(build_run, make_cache=False))
        config = self.config
        data = dataclasses.replace(
            config.data, on_error="skip", max_skipped=1.0
        )  # the check `readable` counts unreadable images
        size = min(config.evaluate.batch_size, _SAMPLES)
        arguments = (data, config.transform, config.seed, self.device, size, config.channels_last)
        self._splits = build_data(*arguments, make_cache=False, dtype=getattr(torch, config.dtype))
        plain = dataclasses.replace(config, compile=False)  # compiled code calls no hooks
        training = build_run(plain, data=self._splits, fresh=self.found is None)
        validate_limits(training)
        if self.found is not None:
            try:
                load_best(training, self.found.contents)
            except ValueError as error:
                raise UserError(str(self.found.path), str(error)) from error
        state = training.state
        self._start = resume.copied(state.state_dict()), rng.capture(), SavedBuffers(training.model), state.meter
        self._training = training

    def close(self) -> None:
        """Close the data."""
        if self._splits is not None:
            self._splits.close()

    def cached(self, compute: Callable[[CheckContext], T]) -> T:
        """`compute(self)`, computed for the first check that asks for it."""
        before = self.used_stats
        if compute not in self._cache:
            self.used_stats = False
            self._cache[compute] = compute(self), self.used_stats
        value: T
        value, used = self._cache[compute]
        self.used_stats = before or used
        return value

    @property
    def left(self) -> float:
        """Seconds left of the budget."""
        return self.config.budget_s - (time.monotonic() - self.began)

    # Data

    @property
    def splits(self) -> DataModule:
        """The data."""
        if self._splits is None:
            raise NotApplicable("the data was not built")
        return self._splits

    @functools.cached_property
    def sample_transforms(self) -> list[SampleTransform]:
        """Transforms of one image, as for an evaluation."""
        nodes = self.config.transform.sample_eval
        return [build(f"transform.sample_eval.{index}", node) for index, node in enumerate(nodes)]

    @property
    def stats(self) -> dict[str, SplitStats]:
        """Statistics of each split. A check that uses them passes only if they cover enough images."""
        self.used_stats = True
        return self.unmarked_stats

    @functools.cached_property
    def unmarked_stats(self) -> dict[str, SplitStats]:
        """The same for a check that needs only a few images."""
        found, left, parts = {}, self.left, self.splits.parts
        taken, whole = 0, len(parts) + 1  # the training split counts twice
        for name, part in parts.items():
            taken += 2 if name == "train" else 1
            until, last = (left * (1 - share * taken / whole) for share in (_SHARE_OF_READING, _LAST_SHARE))

            def in_time(read: int, until: float = until, last: float = last) -> bool:
                return self.left > (until if read >= self._enough else last)

            most, seed = self.config.samples, self.config.seed
            found[name] = compute_split_stats(name, part, self.sample_transforms, most, seed, in_time)
        return found

    @property
    def _enough(self) -> int:
        return max(_ENOUGH, _ENOUGH_OF_CLASS * self.classes)

    def undersampled(self) -> list[str]:
        """Splits of which too few images were read for a check to pass, in words."""
        return [
            f"{stats.read:,} of {stats.samples:,} images of {name}"
            for name, stats in self.unmarked_stats.items()
            if stats.read < min(stats.asked, self._enough)
        ]

    @property
    def train_stats(self) -> SplitStats:
        """Statistics of the training split."""
        return self.stats["train"]

    @property
    def held_out_stats(self) -> list[SplitStats]:
        """Statistics of the other splits."""
        return [stats for name, stats in self.stats.items() if name != "train"]

    @property
    def classes(self) -> int:
        """Number of classes; 0 for regression."""
        return len(self.splits.classes)

    @functools.cached_property
    def labels(self) -> dict[str, Tensor]:
        """Class numbers of each split, int64 (N,): of all samples if they are known without reading images."""
        found = {}
        for name, part in self.splits.parts.items():
            known = known_targets(part)
            targets = self.stats[name].targets if known is None else known
            if is_classes(targets):
                found[name] = targets.long()
        return found

    def read(self, split: str, indices: Sequence[int], epoch: int = 0, again: bool = True) -> Batch:
        """Samples of a split by their indices in the data set, prepared as for an evaluation.

        The epoch matters only for random transforms. `again` also reads images that were kept when the split was measured.
        """
        data, device = self.splits.eval_split(split), self.splits.example[0].device
        assert data is not None
        if not again and all(index in self.unmarked_stats[split].kept for index in indices):
            items = [self.unmarked_stats[split].kept[index] for index in indices]
        else:
            seeded = SeededDataset(self.splits.parts[split][0], self.config.seed, self.sample_transforms)
            items = seeded.__getitems__([(epoch, index) for index in indices])
        read, places = collate(items), torch.tensor(list(indices), device=device)
        images = data.prepare(read.images.to(device), places, epoch)
        return Batch(images, torch.from_numpy(read.targets).to(device), places)

    def readable(self, split: str, count: int) -> list[int]:
        """Indices of random samples that are readable and finite; the same at each call."""
        stats = self.unmarked_stats[split]
        good = stats.indices[stats.finite]
        if not stats.kept:  # images that are kept were read in a random order
            good = good[torch.randperm(len(good), generator=torch.Generator().manual_seed(0))]
        indices: list[int] = good[:count].tolist()
        return indices

    @property
    def most_samples(self) -> int:
        """How many images in full size to look at together."""
        return max(16, min(_MOST_SAMPLES, _VALUES // math.prod(self.splits.image_shape)))

    @functools.cached_property
    def sample_images(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Images of each split that has at least two of one shape, before augmentation and normalization, and their targets.

        Images are float32 (N, C, H, W); uint8 values are divided by 255.
        """
        found = {}
        for name, (dataset, _) in self.splits.parts.items():
            seeded, until = SeededDataset(dataset, self.config.seed, self.sample_transforms), self.left * (1 - _SHARE)
            pairs: list[tuple[Tensor, Tensor]] = []
            for index in self.readable(name, self.most_samples):
                if self.left < until and len(pairs) >= 2:
                    break
                image, target = seeded[0, index]
                image = as_tensor(image)
                if not pairs or (image.shape, image.dtype) == (pairs[0][0].shape, pairs[0][0].dtype):
                    pairs.append((image, as_target(target)))
            if len(pairs) >= 2:
                images, targets = map(torch.stack, zip(*pairs, strict=True))
                found[name] = images.float() / (255 if images.dtype == torch.uint8 else 1), targets
        return found

    @functools.cached_property
    def batch(self) -> Batch:
        """Up to 64 training samples without augmentation, of as many classes as possible, to send through the model."""
        size = math.prod(self.splits.image_shape)
        parameters = sum(p.numel() for p in self._training.model.parameters()) if self._training is not None else 1
        most = min(self._batch_limit, max(_FEWEST, min(_SAMPLES, _PIXELS // size, _PARAMETERS // max(1, parameters))))
        indices = self.readable("train", most)
        need(len(indices) >= 2, "there are not two readable training images without NaN")
        return self.read("train", indices, again=False)

    # Model

    @functools.cached_property
    def _seconds_per_sample(self) -> float:
        """Time of one sample through the model, forward and backward; 0 if there is no model."""
        indices = self.readable("train", 2)
        if self._training is None or len(indices) < 2:
            return 0.0
        images = self.read("train", indices, again=False).images
        taken = math.inf
        with evaluating(self.model):
            for _ in range(2):  # the first call may prepare kernels
                start = time.monotonic()
                self.model(images).sum().item()
                taken = min(taken, time.monotonic() - start)
        return _BACKWARD * taken / len(images)

    @property
    def _batch_limit(self) -> int:
        """Samples of a batch that can go through the model a few times within the budget."""
        share = _SHARE_OF_PASS * self.config.budget_s
        return max(_FEWEST_IF_SLOW, int(share / max(self._seconds_per_sample, 1e-9)))

    def shortened(self, loader: Loader) -> Loader:
        """The loader, with batches cut to what the budget allows; for checks that work with any batch size."""
        most = self._batch_limit
        return loader if most >= loader.batch_size else _ShortBatches(loader, most)

    def affordable_steps(self) -> float:
        """An upper bound of the training steps in the time left: a sample of a large batch takes less time."""
        plan = self.training.plan
        return 2 * self.left / max(self._seconds_per_sample * plan.batch_size * plan.accumulate, 1e-9)

    @property
    def training(self) -> Run:
        """The objects of the run, in their initial state."""
        if self._training is None:
            raise NotApplicable(f"the {'data' if self._splits is None else 'model'} was not built")
        return self._training

    @property
    def model(self) -> nn.Module:
        """The model of the run."""
        return self.training.model

    def targets(self, batch: Batch) -> Tensor:
        """Targets of a batch as the loss takes them."""
        return self.training.task.targets(batch.targets)

    def loss(self) -> Tensor:
        """The loss of `batch`, with its graph."""
        loss: Tensor = self.training.parts.loss(self.model(self.batch.images), self.targets(self.batch))
        return loss

    def disable_dropout(self) -> None:
        """Training mode, but for dropout layers: their noise would hide signals and differences."""
        self.training.state.train()
        for module in self.model.modules():
            if isinstance(module, DROPOUT):
                module.eval()

    def restore(self) -> None:
        """Put weights, buffers, gradients, modes, optimizer and random generators back to the start."""
        if self._training is None:
            return
        state, guard = self._training.state, self._training.parts.guard
        for parameter in self.model.parameters():
            parameter.grad = None
        start, generators, buffers, state.meter = self._start
        buffers.restore()
        state.load_state_dict(resume.copied(start))
        state.meter.reset()
        if guard is not None:
            guard.start()
        state.train()
        rng.restore(generators)


class _ShortBatches(Loader):
    """The first samples of each batch of a loader."""

    def __init__(self, loader: Loader, most: int) -> None:
        self._loader, self.samples, self.batch_size = loader, loader.samples, most

    def batches(self, epoch: int, start: int, stop: int, step: int = 1) -> Iterator[Batch]:
        found = self._loader.batches(epoch, start, stop, step)
        return (Batch(*(part[: self.batch_size] for part in batch)) for batch in found)
