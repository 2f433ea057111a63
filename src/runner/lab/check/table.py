"""All checks, by group, in the order in which they run."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

from runner.lab.check import (
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
    training,
)
from runner.lab.check.context import CheckContext
from runner.lab.check.result import Result, passed


@dataclass(frozen=True)
class Check:
    """One check."""

    group: str  # in `only` and `skip` it stands for all its checks
    run: Callable[[CheckContext], Result]

    @property
    def name(self) -> str:
        """The name for `only` and `skip`: that of the function."""
        return self.run.__name__.replace("_", "-")

    @property
    def finds(self) -> str:
        """The fault that the check finds: the first line of the docstring."""
        return (inspect.getdoc(self.run) or "").splitlines()[0].rstrip(".")


def build(context: CheckContext) -> Result:
    """Data, model, loss and optimizer that do not fit together."""
    context.build()
    return passed("data, model, loss and optimizer fit together")


BUILD = Check("config", build)

# fmt: off
_GROUPS: dict[str, tuple[Callable[[CheckContext], Result], ...]] = {
    "data": (
        data.readable, data.image_shapes, data.finite_images, data.constant_images, data.outlier_images,
        data.image_range, data.normalization, data.channel_order, data.splits_alike, data.evaluation_transform,
        data.augmentation, data.input_size, data.constant_areas, data.colorless_class,
    ),
    "labels": (
        labels.target_range, labels.missing_classes, labels.class_balance, labels.class_order, labels.duplicates,
        labels.conflicting_labels, labels.leakage, labels.near_duplicates, labels.target_scale,
    ),
    "outputs": (
        outputs.logits, outputs.sample_mixing, outputs.modes, outputs.repeatable_evaluation,
        outputs.output_scale,
    ),
    "model": (
        model.frozen_parameters, model.optimizer_parameters, model.detached_parameters, model.unused_parameters,
        model.shared_weights, model.bias_before_norm, model.dead_units, model.activation_scale, model.gradient_scale,
        model.repeated_norms, model.trainable_set,
    ),
    "loss": (loss.initial_loss, loss.loss_of_samples, loss.loss_axis, loss.loss_broadcast, loss.accumulation),
    "loop": (
        loop.overfit, loop.zero_input, loop.stale_gradients, loop.mode_in_training, loop.evaluation_leaves_state,
        loop.repeatability, training.learning_rate, training.training,
    ),
    "baselines": (baselines.learnable, baselines.class_meaning, baselines.beats_baselines),
    "batches": (
        batches.batch_repeats, batches.batch_pairing, batches.shuffling, batches.model_input, batches.wrap_around,
        batches.augmented_classes,
    ),
    "splits": (splits.split_source, splits.split_targets, splits.target_blocks, splits.target_shift),
    "shortcuts": (shortcuts.image_shortcut, shortcuts.file_shortcut),
    "reach": (model.unregistered_parameters, model.equal_units, outputs.reachable_targets),
    "objective": (loss.loss_minimum, loss.loss_coverage),
    "settings": (
        settings.optimizer_settings, settings.schedule, settings.step_size, settings.averaging,
        settings.norm_statistics, settings.dropout_rate, settings.epoch_length,
        settings.metric_direction, settings.class_weights, settings.frozen_start,
    ),
    "steps": (training.short_training,),
}
# fmt: on
CHECKS = tuple(Check(group, run) for group, checks in _GROUPS.items() for run in checks)
