"""What checks look at: the data, model, loss and step of a run, built as `train` builds them and restored after each check."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from runner.build.batch_size import auto_batch_size
from runner.build.evaluation import load_best
from runner.build.run import Run
from runner.build.validate import validate_limits
from runner.checkpoint import find, resume, rng
from runner.config.errors import UserError
from runner.config.schema.verbs import Check
from runner.config.targets import build
from runner.data.build import DataModule, build_data
from runner.data.loaders import Batch
from runner.data.samples import SampleTransform, SeededDataset, as_target, as_tensor, collate
from runner.instrument.no_trace import SavedBuffers, evaluating
from runner.runtime.device import choose_device, prepare_repeating
from runner.train import build_run
from runner.verbs.check.result import NotApplicable, need
from runner.verbs.check.split_stats import SplitStats, compute_split_stats, is_classes, known_targets

_SAMPLES, _EVALUATED = 64, 16  # of the batch that goes through the model, and of one of an evaluation
_FEWEST, _FEWEST_ON_CPU = 16, 4  # of it for large images and models
_PIXELS = 2**21  # of this batch
_FLOPS = 2**34  # of the model for this batch
_SHARE_OF_READING = 0.4  # of the time left, for reading images from disk
_MOST_SAMPLES = 256  # of a split in full size
_VALUES = 2**24  # pixels and channels of these samples together
_ENOUGH, _ENOUGH_OF_CLASS = 128, 2  # images of a split, and of each class on average, that a check needs to pass

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
        self._cache: dict[Callable[[CheckContext], Any], tuple[Any, BaseException | None, bool]] = {}
        self.used_stats = False

    def build(self) -> None:
        """Build data, model, loss and optimizer.

        Raises:
            UserError: as in `train`.
        """
        self.config, _ = auto_batch_size(self.config, functools.partial(build_run, make_cache=False))
        config = self.config
        # The check `readable` counts unreadable images.
        data = dataclasses.replace(config.data, on_error="skip", max_skipped=1.0)
        size = min(config.evaluate.batch_size, _EVALUATED)
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
        rates = [group["initial_lr"] for group in state.optimizer.param_groups]
        self._start = resume.copied(state.state_dict()), rng.capture(), SavedBuffers(training.model), state.meter, rates
        self._training = training

    def close(self) -> None:
        """Close the data."""
        if self._splits is not None:
            self._splits.close()

    def cached(self, compute: Callable[[CheckContext], T]) -> T:
        """`compute(self)`, computed for the first check that asks for it; what that raises, others raise at once."""
        before = self.used_stats
        if compute not in self._cache:
            self.used_stats, value, raised = False, None, None
            try:
                value = compute(self)
            except BaseException as error:  # also for lack of time: it would take as long again
                raised = error
            self._cache[compute] = value, raised, self.used_stats
        found: T
        found, raised, used = self._cache[compute]
        self.used_stats = before or used
        if raised is not None:
            raise raised
        return found

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
        for place, (name, part) in enumerate(parts.items(), 1):
            until = left * (1 - _SHARE_OF_READING * place / len(parts))
            most, seed = self.config.samples, self.config.seed
            in_time = functools.partial(lambda until: self.left > until, until)
            found[name] = compute_split_stats(name, part, self.sample_transforms, most, seed, in_time)
        return found

    def undersampled(self) -> list[str]:
        """Splits of which too few images were read for a check to pass, in words."""
        enough = max(_ENOUGH, _ENOUGH_OF_CLASS * self.classes)
        return [
            f"{stats.read:,} of {stats.samples:,} images of {name}"
            for name, stats in self.unmarked_stats.items()
            if stats.read < min(stats.asked, enough)
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
        return list(map(int, good[:count]))

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
            seeded = SeededDataset(dataset, self.config.seed, self.sample_transforms)
            kept = self.unmarked_stats[name].kept
            pairs: list[tuple[Tensor, Tensor]] = []
            # It takes long to read images again.
            for index in (each for each in self.readable(name, self.most_samples) if not kept or each in kept):
                image, target = kept[index] if kept else seeded[0, index]
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
        fewest = _FEWEST_ON_CPU if self.device.type == "cpu" else _FEWEST
        most = max(fewest, min(_SAMPLES, _PIXELS // math.prod(self.splits.image_shape), _FLOPS // max(1, self._flops)))
        indices = self.readable("train", most)
        need(len(indices) >= 2, "there are not two readable training images without NaN")
        return self.read("train", indices, again=False)

    @property
    def noise(self) -> Tensor:
        """Two random images as the model takes them, for what needs no image of the data."""
        made = torch.rand(2, *self.splits.image_shape, generator=torch.Generator().manual_seed(0))
        return made.to(self.splits.example[0].device, getattr(torch, self.config.dtype))

    # Model

    @property
    def _flops(self) -> int:
        """Operations of the model for one sample; 0 if there is no model."""
        if self._training is None:
            return 0
        with evaluating(self.model), FlopCounterMode(display=False) as counter:
            self.model(self.noise[:1])
        return int(counter.get_total_flops())

    def shortened(self, batch: Batch) -> Batch:
        """At most as many samples as `batch` has, for checks that work with any batch size."""
        return Batch(*(part[: len(self.batch.images)] for part in batch))

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
        start, generators, buffers, state.meter, rates = self._start
        buffers.restore()
        state.load_state_dict(resume.copied(start))
        for group, rate in zip(state.optimizer.param_groups, rates, strict=True):
            group["initial_lr"] = rate
        state.meter.reset()
        if guard is not None:
            guard.start()
        state.train()
        rng.restore(generators)
