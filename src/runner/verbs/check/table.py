"""All checks: the group of each, the order in which they are reported, and the order in which they run."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

from runner.verbs.check import (
    baselines,
    batches,
    data,
    labels,
    loop,
    loss,
    model,
    outputs,
    settings,
    shortcuts,
    splits,
    targets,
    training,
)
from runner.verbs.check.context import CheckContext
from runner.verbs.check.result import Result, passed


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        group: in `only` and `skip` it stands for all its checks.
        turn: checks of a lower turn run earlier; those of one turn in the order of the table.
        run: the function.
    """

    group: str
    turn: int
    run: Callable[[CheckContext], Result]

    @property
    def name(self) -> str:
        """The name for `only` and `skip`: that of the function."""
        return self.run.__name__.replace("_", "-")

    @property
    def finds(self) -> str:
        """What the check finds: the first line of the docstring."""
        return (inspect.getdoc(self.run) or "").splitlines()[0].rstrip(".")


def build(context: CheckContext) -> Result:
    """Data, model, loss and optimizer that do not fit together."""
    return passed("data, model, loss and optimizer fit together")


BUILD = Check("config", 0, build)

# The turns: first the checks that need no model, then those with a pass or two through it, then a few steps, then many.
CHECKS = (
    Check("data", 0, data.readable),
    Check("data", 0, data.image_shapes),
    Check("data", 0, data.finite_images),
    Check("data", 0, data.constant_images),
    Check("data", 0, data.outlier_images),
    Check("data", 0, data.image_range),
    Check("data", 0, data.normalization),
    Check("data", 0, data.channel_order),
    Check("data", 0, data.splits_alike),
    Check("data", 0, data.evaluation_transform),
    Check("data", 0, data.augmentation),
    Check("labels", 0, labels.target_range),
    Check("labels", 0, labels.missing_classes),
    Check("labels", 0, labels.class_balance),
    Check("labels", 0, labels.class_order),
    Check("labels", 0, labels.duplicates),
    Check("labels", 0, labels.conflicting_labels),
    Check("labels", 0, labels.leakage),
    Check("labels", 0, labels.near_duplicates),
    Check("labels", 0, labels.target_scale),
    Check("model", 10, model.frozen_parameters),
    Check("model", 10, model.optimizer_parameters),
    Check("model", 10, model.detached_parameters),
    Check("model", 10, model.unused_parameters),
    Check("model", 10, model.shared_weights),
    Check("model", 10, model.bias_before_norm),
    Check("model", 10, model.dead_units),
    Check("model", 10, model.activation_scale),
    Check("model", 10, model.gradient_scale),
    Check("outputs", 6, outputs.logits),
    Check("outputs", 6, outputs.sample_mixing),
    Check("outputs", 6, outputs.modes),
    Check("outputs", 6, outputs.repeatable_evaluation),
    Check("loss", 7, loss.initial_loss),
    Check("loss", 1, loss.loss_of_samples),
    Check("loss", 2, loss.loss_axis),
    Check("loss", 3, loss.loss_broadcast),
    Check("loss", 7, loss.accumulation),
    Check("loop", 15, loop.overfit),
    Check("loop", 18, loop.zero_input),
    Check("loop", 11, loop.stale_gradients),
    Check("loop", 12, loop.mode_in_training),
    Check("loop", 13, loop.evaluation_leaves_state),
    Check("loop", 19, loop.repeatability),
    Check("loop", 16, training.learning_rate),
    Check("loop", 17, training.training),
    Check("baselines", 4, baselines.learnable),
    Check("baselines", 5, baselines.class_meaning),
    Check("baselines", 20, baselines.beats_baselines),
    Check("batches", 0, batches.batch_repeats),
    Check("batches", 0, batches.batch_pairing),
    Check("batches", 0, batches.shuffling),
    Check("batches", 0, batches.model_input),
    Check("batches", 0, batches.wrap_around),
    Check("batches", 0, batches.augmented_classes),
    Check("splits", 0, splits.split_source),
    Check("splits", 0, splits.split_targets),
    Check("splits", 0, splits.target_blocks),
    Check("splits", 0, splits.target_shift),
    Check("shortcuts", 0, shortcuts.image_shortcut),
    Check("shortcuts", 0, shortcuts.file_shortcut),
    Check("reach", 8, model.unregistered_parameters),
    Check("reach", 8, model.equal_units),
    Check("reach", 8, targets.reachable_targets),
    Check("objective", 9, targets.loss_minimum),
    Check("objective", 9, targets.loss_coverage),
    Check("settings", 0, settings.optimizer_settings),
    Check("settings", 0, settings.schedule),
    Check("settings", 0, settings.step_size),
    Check("settings", 0, settings.averaging),
    Check("settings", 0, settings.norm_statistics),
    Check("settings", 0, settings.dropout_rate),
    Check("settings", 0, settings.epoch_length),
    Check("steps", 14, training.short_training),
)
