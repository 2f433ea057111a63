"""What is checked: the data, model, loss and step of a run, built as `train` builds them, and put back after each check."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from runner.build.run import Training, build_training, look_ahead
from runner.build.weight_average import load_best
from runner.checkpoint import find, resume, rng
from runner.config.errors import UserError
from runner.config.schema.check import Check
from runner.config.targets import build
from runner.data.build import DataModule
from runner.data.loaders import Batch, Loader
from runner.data.samples import SampleTransform, SeededDataset, collate
from runner.data.splits import targets_of
from runner.instrument.no_trace import evaluating
from runner.verbs.check.split_stats import SplitStats, look, spread

_SAMPLES = 64  # of the batch that models are looked at with
_FEWEST = 16  # of it for large images and models
_FEWEST_IF_SLOW = 4  # of it where a pass takes long
_SHARE_OF_PASS = 1 / 40  # of the budget, that a batch may take forward and back
_BACK = 3  # a pass forward and back takes this many times as long as one forward
_PIXELS = 2**21  # that such a batch may have
_PARAMETERS = 2**29  # that the model may have, times the samples
_SHARE_OF_LOOKING = 0.3  # of the time that is left, for reading images from disk
_LAST_SHARE = 0.6  # of it, for as many images as the checks need at least
_ENOUGH = 128  # images of a split that a check needs to say that nothing is wrong
_ENOUGH_OF_CLASS = 2  # the same of each class, on average

T = TypeVar("T")


class NotApplicable(Exception):
    """What a check needs could not be built, which is told once."""


class CheckContext:
    """Everything that checks look at.

    Args:
        config: the validated config.
        values: the same as plain containers.
        splits: the data.
        found: a checkpoint, whose weights are the model's, or None.
        began: when the budget began to run, by `time.monotonic`.

    Attributes:
        looked: whether what is seen of the splits was asked for since this was last set to False.
    """

    def __init__(
        self,
        config: Check,
        values: dict[str, Any],
        splits: DataModule,
        found: find.LoadedCheckpoint | None,
        began: float,
    ) -> None:
        self.config, self.values, self.splits, self.found, self.began = config, values, splits, found, began
        self._training: Training | None = None
        self._start: dict[str, Any] = {}
        self._buffers: list[tuple[nn.Module, str, Tensor]] = []
        self._known: dict[Callable[[CheckContext], Any], tuple[Any, bool]] = {}
        self.used_stats = False

    def cached(self, work: Callable[[CheckContext], T]) -> T:
        """What `work` gives for this context; several checks may ask, and it is worked out for the first."""
        before = self.used_stats
        if work not in self._known:
            self.used_stats = False
            self._known[work] = work(self), self.used_stats
        known: T
        known, looked = self._known[work]
        self.used_stats = before or looked
        return known

    # Time

    @property
    def left(self) -> float:
        """Seconds of the budget that are left."""
        return self.config.budget_s - (time.monotonic() - self.began)

    # Data

    @functools.cached_property
    def sample_transforms(self) -> list[SampleTransform]:
        """Transforms of one image, as for an evaluation."""
        nodes = self.config.transform.sample_eval
        return [build(f"transform.sample_eval.{index}", node) for index, node in enumerate(nodes)]

    @property
    def stats(self) -> dict[str, SplitStats]:
        """What is seen of each split."""
        self.used_stats = True
        return self.unmarked_stats

    @functools.cached_property
    def unmarked_stats(self) -> dict[str, SplitStats]:
        """The same, for what needs a few images of it only."""
        found, left, parts = {}, self.left, self.splits.parts
        shares = {name: 2 if name == "train" else 1 for name in parts}
        taken = 0.0
        for name, (dataset, indices) in parts.items():
            taken += shares[name] / sum(shares.values())
            until, last = left * (1 - _SHARE_OF_LOOKING * taken), left * (1 - _LAST_SHARE * taken)

            def in_time(read: int, until: float = until, last: float = last) -> bool:
                return self.left > (until if read >= self.enough else last)

            found[name] = look(
                name, dataset, indices, self.sample_transforms, self.config.samples, self.config.seed, in_time
            )
        return found

    @property
    def enough(self) -> int:
        """How many images of a split a check needs to say that nothing is wrong."""
        return max(_ENOUGH, _ENOUGH_OF_CLASS * self.classes)

    def too_few(self) -> list[str]:
        """Splits of which too little was seen, in words."""
        return [
            f"{seen.read:,} of {seen.samples:,} images of {name}"
            for name, seen in self.unmarked_stats.items()
            if seen.read < min(seen.asked, self.enough)
        ]

    @property
    def train_stats(self) -> SplitStats:
        """What is seen of the training split."""
        return self.stats["train"]

    @property
    def held_out_stats(self) -> list[SplitStats]:
        """The same of the others."""
        return [seen for name, seen in self.stats.items() if name != "train"]

    @property
    def classes(self) -> int:
        """Number of classes; 0 where there are none."""
        return len(self.splits.classes)

    @functools.cached_property
    def labels(self) -> dict[str, Tensor]:
        """Class numbers of each split, int64 (N,): of all samples where they are known without reading."""
        found = {}
        for name, (dataset, indices) in self.splits.parts.items():
            known = targets_of(dataset)
            whole = known is not None and len(known) == len(dataset)  # type: ignore[arg-type]
            if known is not None and whole:
                targets = known[indices[:]]
            else:
                targets = self.stats[name].targets
            if targets.ndim == 1 and not targets.is_floating_point():
                found[name] = targets.long()
        return found

    def read(self, split: str, indices: Sequence[int], epoch: int = 0) -> Batch:
        """Samples of a split as a model is given them in an evaluation.

        Args:
            split: name of the split.
            indices: identities of the samples.
            epoch: number of the epoch, which makes a difference only to what is random.
        """
        keyed = SeededDataset(self.splits.parts[split][0], self.config.seed, self.sample_transforms)
        return self._prepared(split, keyed.__getitems__([(epoch, index) for index in indices]), indices, epoch)

    def _prepared(self, split: str, items: list[tuple[Any, Any]], indices: Sequence[int], epoch: int) -> Batch:
        read = collate(items)
        data = self.splits.eval_split(split)
        assert data is not None
        device = self.splits.example[0].device
        places = torch.tensor(list(indices), device=device)
        images = data.prepare(read.images.to(device), places, epoch)
        return Batch(images, torch.from_numpy(read.targets).to(device), places)

    def readable(self, split: str, count: int) -> list[int]:
        """Identities of samples that could be read and are finite, drawn at random but the same at each call."""
        seen = self.unmarked_stats[split]
        good = seen.indices[seen.finite]
        if seen.kept:  # they were read in a random order
            return [int(index) for index in good[:count].tolist()]
        order = torch.randperm(len(good), generator=torch.Generator().manual_seed(0))
        return [int(index) for index in good[order[:count]].tolist()]

    @functools.cached_property
    def batch(self) -> Batch:
        """Training samples that models are looked at with, without augmentation: up to 64, of as many classes as there are.

        Raises:
            NotApplicable: if there is no image to be looked at.
        """
        size = self.splits.channels * self.splits.image_size[0] * self.splits.image_size[1]
        parameters = sum(p.numel() for p in self._training.model.parameters()) if self._training is not None else 1
        most = min(self.affordable, max(_FEWEST, min(_SAMPLES, _PIXELS // size, _PARAMETERS // max(1, parameters))))
        indices = self.readable("train", most)
        if len(indices) < 2:
            raise NotApplicable("there are not two readable training images without NaN")
        return self._plain(indices)

    def _plain(self, indices: Sequence[int]) -> Batch:
        """Training samples as in an evaluation, read again only if they were not kept."""
        kept = self.unmarked_stats["train"].kept
        if not all(index in kept for index in indices):
            return self.read("train", indices)
        return self._prepared("train", [kept[index] for index in indices], indices, 0)

    # Model

    @functools.cached_property
    def seconds_a_sample(self) -> float:
        """How long one sample takes through the model, forward and back; 0 if there is no model."""
        indices = self.readable("train", 2)
        if self._training is None or len(indices) < 2:
            return 0.0
        images = self._plain(indices).images
        taken = float("inf")
        with evaluating(self.model):
            for _ in range(2):  # the first call may prepare kernels
                start = time.monotonic()
                self.model(images).sum().item()
                taken = min(taken, time.monotonic() - start)
        return _BACK * taken / len(images)

    @property
    def affordable(self) -> int:
        """How many samples a batch may have that goes through the model a few times."""
        share = _SHARE_OF_PASS * self.config.budget_s
        return max(_FEWEST_IF_SLOW, int(share / max(self.seconds_a_sample, 1e-9)))

    def shortened(self, loader: Loader) -> Loader:
        """A loader whose batches are as small as the budget makes necessary, for checks that any batch will do for."""
        return loader if self.affordable >= loader.batch_size else _ShortBatches(loader, self.affordable)

    def steps_in_time(self) -> float:
        """How many steps of the run fit into the time that is left, at most: large batches take less time a sample."""
        plan = self.training.plan
        return 2 * self.left / max(self.seconds_a_sample * plan.batch_size * plan.accumulate, 1e-9)

    @property
    def training(self) -> Training:
        """What would be trained, in its first state.

        Raises:
            NotApplicable: if it could not be built.
        """
        if self._training is None:
            raise NotApplicable("the model was not built")
        return self._training

    def build(self) -> None:
        """Build model, loss and optimizer.

        Raises:
            UserError: as `train` would.
        """
        # Compiled code cannot be looked into.
        plain = dataclasses.replace(self.config, compile=False)
        training = build_training(plain, self.values, splits=self.splits, fresh=self.found is None)
        look_ahead(plain, training)
        if self.found is not None:
            try:
                load_best(training, self.found.contents)
            except ValueError as error:
                raise UserError(f"{self.found.path}: {error}") from error
        self._training = training
        self._start = {"state": resume.copied(training.state.state_dict()), "rng": rng.capture()}
        self._buffers = [
            (module, name, buffer.clone())
            for module in training.model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    @property
    def model(self) -> nn.Module:
        """What would be trained."""
        return self.training.model

    def targets(self, batch: Batch) -> Tensor:
        """Targets of a batch as the loss takes them."""
        return self.training.task.targets(batch.targets)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Afterwards weights, buffers, gradients, modes, optimizer and random generators are those of the start."""
        if self._training is None:
            yield
            return
        try:
            yield
        finally:
            self.restore()

    def restore(self) -> None:
        """Go back to the start."""
        training = self.training
        for parameter in training.model.parameters():
            parameter.grad = None
        with torch.no_grad():
            for module, name, before in self._buffers:
                buffer = module._buffers[name]
                module._buffers[name] = before.clone() if buffer is None else buffer.detach().copy_(before)
        training.state.load_state_dict(resume.copied(self._start["state"]))
        training.state.meter.reset()
        if training.parts.guard is not None:
            training.parts.guard.start()
        training.state.train()
        rng.restore(self._start["rng"])


class _ShortBatches:
    """Another loader's batches without their later samples."""

    def __init__(self, loader: Loader, most: int) -> None:
        self._loader, self.samples, self.batch_size = loader, loader.samples, most

    def batches(self, epoch: int, start: int, stop: int) -> Iterator[Batch]:
        for images, targets, indices in self._loader.batches(epoch, start, stop):
            yield Batch(images[: self.batch_size], targets[: self.batch_size], indices[: self.batch_size])

    def close(self) -> None:
        """The other one is closed by who made it."""


def few(looks: Sequence[SplitStats], count: int) -> dict[str, list[int]]:
    """A few identities of samples of each split that could be read."""
    return {seen.name: seen.indices[spread(len(seen.indices), count)].tolist() for seen in looks}
