"""One class per sample, learnt from the outputs of a trained model as well."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn import functional as F

from runner.tasks.classification import Classification


class Distillation(Classification):
    """A student that learns from a teacher (Hinton et al., arXiv:1503.02531), on any data of classes.

    The loss is `weight` times the divergence of the softened outputs, times `temperature` squared, and 1 - `weight` times the
    loss of the config. Layers in `features` are compared by where in the image they are active (Zagoruyko and Komodakis,
    arXiv:1612.03928), so student and teacher may have other numbers of channels and other resolutions.

    Args:
        num_classes: number of classes.
        teacher: takes the same images as the student and gives as many logits. It stays in evaluation mode.
        temperature: divides the logits of both.
        weight: share of the teacher's outputs in the loss, from 0 to 1.
        features: names of layers of the student, each with a layer of the teacher; their outputs are (B, C, H, W).
        features_weight: factor of their loss, which is added.

    Raises:
        ValueError: a number is out of range, or a layer does not exist.
    """

    def __init__(
        self,
        num_classes: int,
        teacher: Module,
        *,
        temperature: float = 4.0,
        weight: float = 0.9,
        features: dict[str, str] | None = None,
        features_weight: float = 1000.0,
    ) -> None:
        super().__init__(num_classes)
        if temperature <= 0 or not 0 <= weight <= 1:
            raise ValueError(f"temperature must be above 0 and weight from 0 to 1, got {temperature} and {weight}")
        self._teacher, self._temperature, self._share = teacher.requires_grad_(False).eval(), temperature, weight
        self._features, self._features_weight = dict(features or {}), features_weight
        self._seen: dict[str, dict[str, Tensor]] = {"model": {}, "teacher": {}}

    def modules(self, model: Module, loss: Module) -> dict[str, Module]:
        """The teacher, which is saved with the student."""
        layers = {"model": (model, list(self._features)), "teacher": (self._teacher, list(self._features.values()))}
        for owner, (module, names) in layers.items():
            for name in names:
                if name not in dict(module.named_modules()):
                    raise ValueError(f"features: the {owner.replace('model', 'student')} has no layer '{name}'")
                module.get_submodule(name).register_forward_hook(self._keeper(owner, name))
        return {"teacher": self._teacher}

    def _keeper(self, owner: str, name: str) -> Any:
        def keep(module: Module, inputs: Any, output: Tensor) -> None:
            self._seen[owner][name] = output

        return keep

    def training_step(self, modules: Mapping[str, Module], batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        """The loss, and what it consists of."""
        images, targets = batch
        with torch.no_grad():
            told = modules["teacher"](images)
        logits = modules["model"](images)
        classes = modules["loss"](logits, self.targets(targets))
        own, soft = ((each / self._temperature).log_softmax(1) for each in (logits, told))
        outputs = F.kl_div(own, soft, reduction="batchmean", log_target=True) * self._temperature**2
        terms = {"outputs": outputs, "classes": classes}
        loss = self._share * outputs + (1 - self._share) * classes
        if self._features:
            seen, taught = self._seen["model"], self._seen["teacher"]
            gaps = [_gap(seen[own], taught[other]) for own, other in self._features.items()]
            terms["features"] = torch.stack(gaps).mean()
            loss = loss + self._features_weight * terms["features"]
        return {"loss": loss, **terms}


def _gap(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean square of the difference between two maps of activity, from features (B, C, H, W)."""
    height, width = student.shape[-2:]
    taught = F.adaptive_avg_pool2d(teacher, (height, width))
    one, other = (F.normalize(each.square().mean(1).flatten(1)) for each in (student, taught))
    return (one - other).square().mean()
