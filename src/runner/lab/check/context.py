"""The subject of all checks: data, model, loss and step of a run, built as `train` does and restored after each check."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from runner.checkpoint import find, resume, rng
from runner.config.rules import never_evaluates
from runner.config.schema.verbs import Check
from runner.config.targets import build
from runner.data.build import read_data
from runner.data.loaders import Batch
from runner.data.module import DataModule, SplitData
from runner.data.samples import SampleTransform, SeededDataset
from runner.data.sources.arrays import ImageArrays
from runner.engine.step import Supervised
from runner.instrument.no_trace import SavedBuffers
from runner.lab.check.result import LIMITS, NotApplicable, need
from runner.lab.check.sample import SplitStats, is_classes, known_targets, measure_split
from runner.run.from_checkpoint import load_weights_of
from runner.run.run import Run, validate_limits
from runner.run.trial import auto_batch_size
from runner.runtime.device import choose_device, prepare_repeating
from runner.train import build_run

_EVALUATED = 16  # images of a batch of an evaluation
_POINTS = 2000  # of a schedule
ADAM = ("adam", "adamw", "nadam", "radam", "adamax", "lion", "lamb", "adan", "adopt", "adabelief")
"""Optimizers whose first steps have the size of the learning rate."""

# The base classes are private, and torch has no public ones.
DROPOUT, BATCH_NORM = nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm

OF_DATA = ("data", "labels", "samples", "batches", "baselines")
"""Groups that look at samples."""

T = TypeVar("T")


class CheckContext:
    """The subject of all checks; `found` is a checkpoint with the weights of the model."""

    splits: DataModule  # the data, once they are read

    def __init__(self, config: Check, found: find.LoadedCheckpoint | None) -> None:
        self.config, self.found = config, found
        prepare_repeating(config.deterministic)
        self.device, _ = choose_device(config.device)
        self.built: Run | None = None  # the objects of the run
        self.measured: dict[Callable[..., Any], Any] = {}  # see `shared`

    def build(self) -> None:
        """Build data, model, loss and optimizer."""
        self.config, _ = auto_batch_size(self.config, functools.partial(build_run, make_cache=False))
        config = self.config
        # The check `readable` counts unreadable images.
        data = dataclasses.replace(config.data, on_error="skip", max_skipped=1.0)
        size = min(config.evaluate.batch_size, _EVALUATED)
        evaluate = dataclasses.replace(config.evaluate, batch_size=size)
        reading = dataclasses.replace(config, data=data, evaluate=evaluate)
        self.splits = read_data(reading, self.device, dtype=getattr(torch, config.dtype))
        plain = dataclasses.replace(config, compile=False)  # compiled code calls no hooks
        training = build_run(plain, data=self.splits, fresh=self.found is None)
        validate_limits(training)
        # With a checkpoint, the checks look at its weights
        if self.found is not None:
            load_weights_of(self.found, training.config, training.model, loss=training.loss, task=training.task)
        state = training.state
        rates = [group["initial_lr"] for group in state.optimizer.param_groups]
        # Everything that a check may change is kept, see `restore`
        self._start = resume.copied(state.state_dict()), rng.capture(), SavedBuffers(training.model), state.meter, rates
        self.built = training

    def close(self) -> None:
        """Close the data."""
        if "splits" in vars(self):
            self.splits.close()

    # Data

    @property
    def whole(self) -> bool:
        """True if samples are not pairs of image and target."""
        return not self.splits.pairs

    @property
    def supervised(self) -> bool:
        """True if the loss is that of outputs of the model for images, and targets."""
        return not self.whole and isinstance(self.training.steps, Supervised)

    @functools.cached_property
    def sample_transforms(self) -> list[SampleTransform]:
        """Transforms of one image, as for an evaluation."""
        nodes = self.config.transform.sample_eval
        return [build(f"transform.sample_eval.{index}", node) for index, node in enumerate(nodes)]

    @functools.cached_property
    def stats(self) -> dict[str, SplitStats]:
        """Statistics of each split."""
        parts, transforms, pairs = self.splits.parts, self.sample_transforms, not self.whole
        return {name: measure_split(name, part, transforms, self.config, pairs) for name, part in parts.items()}

    @property
    def train_stats(self) -> SplitStats:
        """Statistics of the training split."""
        return self.stats["train"]

    @property
    def held_out_stats(self) -> list[SplitStats]:
        """Statistics of the other splits."""
        return [stats for name, stats in self.stats.items() if name != "train"]

    @property
    def held_out(self) -> SplitData:
        """The validation split, or the training split as it is evaluated."""
        return self.splits.val or self.splits.train_for_eval

    @property
    def classes(self) -> int:
        """Number of classes; 0 for regression."""
        return len(self.splits.classes)

    @functools.cached_property
    def labels(self) -> dict[str, Tensor]:
        """Class numbers of each split, int64 (N,): of all samples if they are known without reading images."""
        known = {name: known_targets(*part) for name, part in self.splits.parts.items()}
        found = {name: self.stats[name].targets if each is None else each for name, each in known.items()}
        return {name: targets.long() for name, targets in found.items() if is_classes(targets)}

    def read(self, split: str, indices: Sequence[int], epoch: int = 0) -> Batch:
        """Samples of a split by their indices in the data set, prepared as for an evaluation; random transforms draw by epoch."""
        data, dataset = self.splits.eval_split(split), self.splits.parts[split][0]
        assert data is not None
        seeded = SeededDataset(dataset, self.config.seed, self.sample_transforms, pairs=not self.whole)
        items = seeded.items([(epoch, index) for index in indices])
        return data.batch(items, torch.tensor(list(indices)), epoch)

    def readable(self, split: str, count: int) -> list[int]:
        """Indices of random samples that are readable and finite, the first ones without shuffling; the same at each call."""
        stats = self.stats[split]
        good = stats.indices[stats.finite]
        # A batch of any others might never occur, such as one of texts of different lengths
        if self.whole and not self.config.data.shuffle:
            good = good.sort().values
        if isinstance(stats.dataset, ImageArrays):
            # A split in memory is measured whole: a plain random sample shows how frequent its classes are.
            good = good.sort().values[torch.randperm(len(good), generator=torch.Generator().manual_seed(0))]
        return list(map(int, good[:count]))

    def fitting(self, most: int, values: int) -> int:
        """At most so many images, of so many values in all; but enough to say something."""
        return max(LIMITS.fewest, min(most, values // math.prod(self.splits.image_shape)))

    @functools.cached_property
    def batch(self) -> Batch:
        """Training samples without augmentation, of as many classes as possible, to send through the model."""
        own = max(2, min(_EVALUATED, self.splits.train.loader.batch_size)) if self.whole else None
        indices = self.readable("train", own or self.fitting(LIMITS.batch, LIMITS.batch_values))
        # The whole data may be one sample, such as a graph
        need(len(indices) >= (1 if self.whole else 2), "there are not two readable training images without NaN")
        return self.read("train", indices)

    def shortened(self, batch: Batch) -> Batch:
        """At most as many samples as `batch` has, for checks that work with any batch size."""
        return batch.first(len(self.batch.indices))

    # Model

    @property
    def training(self) -> Run:
        """The objects of the run, in their initial state; of data alone, what needs them is skipped."""
        if self.built is None:
            raise NotApplicable("the model was not built")
        return self.built

    @property
    def model(self) -> nn.Module:
        """The model of the run."""
        return self.training.model

    @functools.cached_property
    def factors(self) -> list[float]:
        """The factors of the schedule at evenly spread steps of the run."""
        total, schedule = self.training.total_steps, self.training.state.schedule
        count = min(total, _POINTS)
        return [float(schedule.factor(place * total // count)) for place in range(count)]

    def targets(self, batch: Batch) -> Tensor:
        """Targets of a batch as the loss takes them."""
        targets: Tensor = self.training.task.targets(batch.targets)
        return targets

    @property
    def evaluates(self) -> bool:
        """False if the task has no evaluation step, and the run is never evaluated."""
        own = isinstance(self.training.steps, Supervised) or hasattr(self.training.task, "evaluation_step")
        return own or not never_evaluates(self.config) or self.config.evaluate.test

    def evaluated(self, data: Any) -> Any:
        """What the task evaluates of a batch; skips the check if it cannot, and the run is never evaluated."""
        need(self.evaluates, "the task has no evaluation_step, and the run has no evaluations")
        return self.training.steps.evaluated(data)

    def disable_dropout(self) -> None:
        """Training mode, but for dropout layers: their noise would hide signals and differences."""
        self.training.state.train()
        for module in self.model.modules():
            if isinstance(module, DROPOUT):
                module.eval()

    def disable_noise(self) -> None:
        """Evaluation mode, which turns off custom dropout too, but for modules that need training mode."""
        self.training.state.train()
        # BatchNorm takes its statistics from the batch; cuDNN runs recurrent layers backward only in training mode.
        kept = [each for each in self.model.modules() if isinstance(each, BATCH_NORM | nn.RNNBase) and each.training]
        self.model.eval()
        for module in kept:
            module.train()

    def restore(self) -> None:
        """Put weights, buffers, gradients, modes, optimizer and random generators back to the start."""
        if self.built is None:
            return
        state, guard = self.built.state, self.built.step.guard
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


def shared(compute: Callable[[CheckContext], T]) -> Callable[[CheckContext], T]:
    """Decorate what several checks read: it is computed for the first one, and what it raises, it raises for the others too.

    It begins and ends with the state that the run starts with.
    """

    @functools.wraps(compute)
    def read(context: CheckContext) -> T:
        if compute not in context.measured:
            context.restore()
            try:
                context.measured[compute] = compute(context)
            except Exception as error:
                context.measured[compute] = error
            context.restore()
        found: T | Exception = context.measured[compute]
        if isinstance(found, Exception):
            raise found
        return found

    return read
