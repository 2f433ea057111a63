"""What a task gives for each sample of a batch (`predict_step`), and the picture that it draws of one (`draw`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from runner.base.errors import UserError
from runner.config.schema.train import Train
from runner.data.loaders import Batch, Fields
from runner.instrument.nested import parts_of_rows, tensors_moved
from runner.run.finetune import explaining
from runner.run.model import modules_of


class Predictions(nn.Module):
    """What a task gives for each sample of a batch, by name, on the CPU; with `draws` also a `picture`, uint8 (3, H, W).

    `modules` are what `build_modules` returned. Raises `UserError` if the task lacks a method, or one gives something else.
    """

    def __init__(self, config: Train, task: Any, modules: nn.Module, draws: bool = False) -> None:
        super().__init__()
        for name in ("predict_step(modules, batch)", "draw(sample, outputs)")[: 1 + draws]:
            if not hasattr(task, name.partition("(")[0]):
                key = "pictures" if draws else "task"
                raise UserError(key, f"{type(task).__name__} has no {name}", "a task that has it")
        self._task, self._modules_of_task, self._data, self._draws = task, modules, config.data, draws

    def forward(self, batch: Batch) -> list[dict[str, Any]]:
        """A dict for each sample of a batch."""
        count = len(batch.indices)
        modules = modules_of(self._modules_of_task, nn.Identity())
        del modules["loss"]  # is not built where a model is only used
        with explaining("task", "its predict_step cannot take a batch: "):
            found = self._task.predict_step(modules, batch.data)
        fields = tensors_moved(dict(found), "cpu") if isinstance(found, Mapping) else {"": found}
        for name, values in fields.items():
            shape = values.shape if isinstance(values, Tensor) else [len(values)] if isinstance(values, list) else []
            if not name or list(shape[:1]) != [count]:
                problem = f"its predict_step gives a {type(values).__name__} {tuple(shape)} {name and f'as {name}'}"
                raise UserError("task", problem, f"a dict of tensors ({count}, ...) and lists of {count} items")
        rows = [{name: values[place] for name, values in fields.items()} for place in range(count)]
        if self._draws:
            samples = parts_of_rows(self._with_pixels(tensors_moved(batch.data, "cpu")), count, count)
            for sample, row in zip(samples, rows, strict=True):
                with explaining("task", "its draw cannot take a sample: "):
                    row["picture"] = picture = self._task.draw(sample, dict(row))
                if not isinstance(picture, Tensor) or picture.dtype != torch.uint8 or picture.shape[:-2] != (3,):
                    allowed = "a tensor, uint8 (3, H, W)"
                    raise UserError("task", f"its draw gives no image, but {str(picture)[:80]}", allowed)
        return rows

    def _with_pixels(self, data: Any) -> Any:
        """The data of a batch with images as RGB, uint8 (B, 3, H, W), without normalisation; of others the first channel."""
        normalize, names = self._data.normalize, self._data.images
        mean, std = (torch.tensor(each).view(-1, 1, 1) for each in (normalize.mean or [0.0], normalize.std or [1.0]))

        def undone(images: Tensor, *_: Any) -> Tensor:
            pixels = (images.float() * std + mean).mul(255).round().clamp(0, 255).to(torch.uint8)
            return pixels if pixels.shape[1] == 3 else pixels[:, :1].expand(-1, 3, -1, -1)

        return Fields(["0"] if names is None else names, undone)(data, torch.empty(0), 0)  # type: ignore[arg-type]
