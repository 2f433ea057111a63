"""What checks look at: the data, model, loss and step of a run, built as `train` builds them and restored after each check."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from runner.build.evaluation import load_best
from runner.build.run import Run
from runner.build.validate import validate_limits
from runner.checkpoint import find, resume, rng
from runner.config.errors import UserError
from runner.config.schema.check import Check
from runner.config.targets import build
from runner.data.build import DataModule
from runner.data.loaders import Batch, Loader
from runner.data.samples import SampleTransform, SeededDataset, collate
from runner.data.splits import targets_of
from runner.instrument.no_trace import SavedBuffers, evaluating
from runner.train import build_run
from runner.verbs.check.result import NotApplicable
from runner.verbs.check.split_stats import SplitStats, compute_split_stats

_SAMPLES = 64  # of the batch that goes through the model
_FEWEST = 16  # of it for large images and models
_FEWEST_IF_SLOW = 4  # of it if a pass is slow
_SHARE_OF_PASS = 1 / 40  # of the budget, for this batch forward and backward
_BACKWARD = 3  # forward and backward take this many times as long as forward
_PIXELS = 2**21  # of this batch
_PARAMETERS = 2**29  # of the model, times the samples
_SHARE_OF_READING = 0.3  # of the time left, for reading images from disk
_LAST_SHARE = 0.6  # of it, until the checks have as many images as they need
_ENOUGH = 128  # images of a split that a check needs to pass
_ENOUGH_OF_CLASS = 2  # the same for each class, on average

# The base classes are private, and torch has no public ones.
DROPOUT, BATCH_NORM = nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm

T = TypeVar("T")


class CheckContext:
    """What checks look at.

    Args:
        config: the validated config.
        splits: the data.
        found: a checkpoint with the weights of the model, or None.
        began: start of the time budget, by `time.monotonic`.

    Attributes:
        used_stats: whether `stats` was used since this was last set to False.
    """

    def __init__(self, config: Check, splits: DataModule, found: find.LoadedCheckpoint | None, began: float) -> None:
        self.config, self.splits, self.found, self.began = config, splits, found, began
        self._training: Run | None = None
        self._start: dict[str, Any] = {}
        self._cache: dict[Callable[[CheckContext], Any], tuple[Any, bool]] = {}
        self.used_stats = False

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
        shares = {name: 2 if name == "train" else 1 for name in parts}
        taken = 0.0
        for name, part in parts.items():
            taken += shares[name] / sum(shares.values())
            until, last = left * (1 - _SHARE_OF_READING * taken), left * (1 - _LAST_SHARE * taken)

            def in_time(read: int, until: float = until, last: float = last) -> bool:
                return self.left > (until if read >= self._enough else last)

            most, seed = self.config.samples, self.config.seed
            found[name] = compute_split_stats(name, part, self.sample_transforms, most, seed, in_time)
        return found

    @property
    def _enough(self) -> int:
        return max(_ENOUGH, _ENOUGH_OF_CLASS * self.classes)

    def undersampled(self) -> list[str]:
        """DataModule of which too few images were read for a check to pass, in words."""
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

    def require_classes(self) -> None:
        """Skip the check for regression."""
        if not self.classes:
            raise NotApplicable("there are no classes")

    @functools.cached_property
    def labels(self) -> dict[str, Tensor]:
        """Class numbers of each split, int64 (N,): of all samples if they are known without reading images."""
        found = {}
        for name, (dataset, indices) in self.splits.parts.items():
            known = targets_of(dataset)
            whole = known is not None and len(known) == len(dataset)  # type: ignore[arg-type]
            targets = known[indices[:]] if known is not None and whole else self.stats[name].targets
            if targets.ndim == 1 and not targets.is_floating_point():
                found[name] = targets.long()
        return found

    def read(self, split: str, indices: Sequence[int], epoch: int = 0) -> Batch:
        """Samples of a split, prepared as for an evaluation.

        Args:
            split: name of the split.
            indices: of the samples in the data set.
            epoch: number of the epoch; it matters only for random transforms.
        """
        keyed = SeededDataset(self.splits.parts[split][0], self.config.seed, self.sample_transforms)
        return self._prepared(split, keyed.__getitems__([(epoch, index) for index in indices]), indices, epoch)

    def _prepared(self, split: str, items: list[tuple[Any, Any]], indices: Sequence[int], epoch: int) -> Batch:
        read, data, device = collate(items), self.splits.eval_split(split), self.splits.example[0].device
        assert data is not None
        places = torch.tensor(list(indices), device=device)
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

    @functools.cached_property
    def batch(self) -> Batch:
        """Up to 64 training samples without augmentation, of as many classes as possible, to send through the model.

        Raises:
            NotApplicable: if there are no two readable images.
        """
        size = math.prod(self.splits.image_shape)
        parameters = sum(p.numel() for p in self._training.model.parameters()) if self._training is not None else 1
        most = min(self._batch_limit, max(_FEWEST, min(_SAMPLES, _PIXELS // size, _PARAMETERS // max(1, parameters))))
        indices = self.readable("train", most)
        if len(indices) < 2:
            raise NotApplicable("there are not two readable training images without NaN")
        return self._read_once(indices)

    def _read_once(self, indices: Sequence[int]) -> Batch:
        """Training samples as in an evaluation; those that were kept are not read again."""
        kept = self.unmarked_stats["train"].kept
        if not all(index in kept for index in indices):
            return self.read("train", indices)
        return self._prepared("train", [kept[index] for index in indices], indices, 0)

    # Model

    @functools.cached_property
    def _seconds_per_sample(self) -> float:
        """Time of one sample through the model, forward and backward; 0 if there is no model."""
        indices = self.readable("train", 2)
        if self._training is None or len(indices) < 2:
            return 0.0
        images = self._read_once(indices).images
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
        return loader if self._batch_limit >= loader.batch_size else _ShortBatches(loader, self._batch_limit)

    def affordable_steps(self) -> float:
        """An upper bound of the training steps in the time left: a sample of a large batch takes less time."""
        plan = self.training.plan
        return 2 * self.left / max(self._seconds_per_sample * plan.batch_size * plan.accumulate, 1e-9)

    @property
    def training(self) -> Run:
        """The objects of the run, in their initial state.

        Raises:
            NotApplicable: if they could not be built.
        """
        if self._training is None:
            raise NotApplicable("the model was not built")
        return self._training

    def build(self) -> None:
        """Build model, loss and optimizer.

        Raises:
            UserError: as in `train`.
        """
        plain = dataclasses.replace(self.config, compile=False)  # compiled code calls no hooks
        training = build_run(plain, data=self.splits, fresh=self.found is None)
        validate_limits(training)
        if self.found is not None:
            try:
                load_best(training, self.found.contents)
            except ValueError as error:
                raise UserError(str(self.found.path), str(error)) from error
        self._training = training
        self._start = {"state": resume.copied(training.state.state_dict()), "rng": rng.capture()}
        self._buffers = SavedBuffers(training.model)

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

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Call `restore` at the end of the block."""
        try:
            yield
        finally:
            if self._training is not None:
                self.restore()

    def restore(self) -> None:
        """Put weights, buffers, gradients, modes, optimizer and random generators back to the start."""
        training = self.training
        for parameter in training.model.parameters():
            parameter.grad = None
        self._buffers.restore()
        training.state.load_state_dict(resume.copied(self._start["state"]))
        training.state.meter.reset()
        if training.parts.guard is not None:
            training.parts.guard.start()
        training.state.train()
        rng.restore(self._start["rng"])


class _ShortBatches(Loader):
    """The first samples of each batch of a loader."""

    def __init__(self, loader: Loader, most: int) -> None:
        self._loader, self.samples, self.batch_size = loader, loader.samples, most

    def batches(self, epoch: int, start: int, stop: int) -> Iterator[Batch]:
        for images, targets, indices in self._loader.batches(epoch, start, stop):
            yield Batch(images[: self.batch_size], targets[: self.batch_size], indices[: self.batch_size])
