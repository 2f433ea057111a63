"""Metrics of exported models on a split, beside those of the model, and the images that int8 is calibrated on."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from runner.config.schema.verbs import Export
from runner.engine.evaluation import evaluate
from runner.lab.export.formats import OUTPUT, images_of, outputs_of
from runner.run.finetune import Modules
from runner.run.from_checkpoint import ResolvedCheckpoint, split_of
from runner.run.metrics import build_metrics
from runner.run.model import build_task_model_loss, modules_of
from runner.run.step import steps_of
from runner.tracking.verb_report import Report

_CPU = torch.device("cpu")
_LARGEST_BATCH = 32
_CALIBRATION = 512  # images; the ranges of activations change little with more


class _OfNormalized(nn.Module):
    """An exported model for the images of a split."""

    def __init__(self, exported: nn.Module, taken: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        # In a tuple, as programs of torch.export refuse the modes that an evaluation sets on submodules
        self._exported, self._taken = (exported,), taken

    def forward(self, images: Tensor) -> Any:
        outputs = outputs_of(self._exported[0](self._taken(images)), len(images))
        return outputs[OUTPUT] if [*outputs] == [OUTPUT] else outputs


class Accuracy:
    """Evaluates models on a split as `eval` does, in float32 on the CPU, and reads images for calibration. To be closed.

    Args:
        resolved: the checkpoint of a model that takes one field of images.
        name: the split.
        report: gets warnings.

    Raises:
        UserError: if there is no such split.
    """

    def __init__(self, resolved: ResolvedCheckpoint[Export], name: str, report: Report) -> None:
        size = min(resolved.config.evaluate.batch_size, _LARGEST_BATCH)
        evaluation = dataclasses.replace(resolved.config.evaluate, batch_size=size)
        self._config = config = dataclasses.replace(resolved.config, dtype="float32", evaluate=evaluation)
        self._included = resolved.input_pipeline(_CPU).of_bytes if config.include_preprocessing else None
        self._splits = dataclasses.replace(resolved, config=config).data(_CPU)
        self._splits.bad_samples.open(report.warn)
        try:
            self._split = split_of(self._splits, name)
            _, self._task, modules, self._loss = build_task_model_loss(config, self._splits, fetch_weights=False)
            resolved.load_weights(modules, self._task, self._loss)
            self._modules = modules_of(modules)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End worker processes."""
        self._splits.close()

    def _taken(self, images: Tensor) -> Tensor:
        """Images of the split, float32 and normalised, as the exported model takes them."""
        if self._included is None:
            return images
        scale, shift = self._included
        return ((images + shift) / scale).round().clamp(0, 255).to(torch.uint8)

    def metrics(self, exported: nn.Module) -> dict[str, float]:
        """Loss and metrics of a model that takes what is exported takes."""
        model = _OfNormalized(exported, self._taken)
        # As `build_modules` gives them
        modules = Modules({**self._modules, "model": model}) if len(self._modules) > 1 else model
        evaluated = steps_of(self._task, modules, self._loss, 1).evaluated
        metrics, limit = build_metrics(self._config, self._task, _CPU), self._config.limit.eval_batches
        return evaluate(modules, self._split.loader, evaluated, loss=self._loss, metrics=metrics, limit=limit)

    def calibration(self) -> Iterator[Tensor]:
        """At most 512 training images as the model takes them, without augmentation: batches (B, C, H, W)."""
        loader = split_of(self._splits, "train").loader
        # From everywhere in the split, as the images of a class may lie side by side
        batches, wanted = len(loader), math.ceil(_CALIBRATION / loader.batch_size)
        for batch in loader.batches(0, 0, batches, math.ceil(batches / wanted)):
            yield self._taken(images_of(batch.data, self._config.data.images))
