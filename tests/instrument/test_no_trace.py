"""What runs a model on the side leaves no trace in it: buffers, modes, gradients, hooks and random generators."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from runner.config.load import resolve_config
from runner.config.schema import Train
from runner.engine.diagnosis import diagnose
from runner.engine.evaluation import evaluate
from runner.engine.plan import Position
from runner.lab.inspect.numbers import pass_through as watched
from runner.run.evaluation import _feed
from runner.run.run import Run, training_flops
from runner.run.trial import probe
from runner.runtime.activation import _try_backward
from runner.train import build_run


class Assigning(nn.Module):
    """Changes buffers in every way that there is, in training and in evaluation."""

    def __init__(self, in_channels: int, num_classes: int, image_size: tuple[int, int]) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(in_channels)
        self.layer = nn.Linear(in_channels * image_size[0] * image_size[1], num_classes)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("mean", torch.zeros(()))  # assigned, as in `self.mean = ...`
        self.register_buffer("count", torch.zeros(()), persistent=False)  # written to
        self.register_buffer("late", None)  # a tensor once the model has run
        self.register_buffer("wide", torch.ones(1).expand(3))  # cannot be written to
        self.alias = self.count.view(1)

    def forward(self, images: Tensor) -> Tensor:
        flat = self.norm(images).flatten(1)
        self.mean = 0.9 * self.mean + 0.1 * flat.detach().mean()
        self.alias.add_(1)
        self.late = flat.detach().mean()
        if not hasattr(self, "new"):
            self.register_buffer("new", torch.ones(()))
        random.random()
        np.random.rand()
        return self.drop(self.layer(flat)) * (1 + self.mean)  # type: ignore[no-any-return]


class Remembering(nn.Module):
    """A loss with a buffer that it assigns."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(logits, targets)
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss + 0 * self.mean


def traces(training: Run) -> dict[str, Any]:
    """All that running the model could change."""
    found: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state().tolist()}
    found["numpy"] = [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()]
    for root in (training.model, training.loss):
        for name, module in root.named_modules():
            at = f"{type(root).__name__}.{name}"
            for own, buffer in module._buffers.items():
                found[f"{at}.{own}"] = None if buffer is None else (id(buffer), buffer.tolist(), buffer.is_inference())
            found[f"{at} mode"] = module.training
            found[f"{at} hooks"] = (len(module._forward_hooks), len(module._forward_pre_hooks))
        for name, parameter in root.named_parameters():
            gradient = None if parameter.grad is None else parameter.grad.tolist()
            found[f"{name} weight"] = (parameter.tolist(), gradient, parameter.requires_grad)
    return found


def _diagnose(training: Run) -> None:
    batches = list(training.data.train.loader.batches(0, 0, 1))
    diagnose(training.step, batches, 1, 1)


def _average(training: Run) -> None:
    averaged = training.state.averaged
    assert averaged is not None
    with averaged.applied():
        averaged.recalibrate(lambda: _feed(training, lambda: False))


def _evaluate(training: Run) -> None:
    loader = training.data.train_for_eval.loader
    evaluate(training.model, loader, training.steps.evaluated, loss=training.loss, metrics={})


def _watch(training: Run) -> None:
    watched(training, next(iter(training.data.train.loader.batches(0, 0, 1))), [])


def _trial(training: Run) -> None:
    image = next(iter(training.data.train_for_eval.loader.batches(0, 0, 1))).images[:1]
    send = lambda samples: training.model(image.repeat(samples, 1, 1, 1))  # noqa: E731
    _try_backward(training.model, send, contextlib.nullcontext)


RUNS: dict[str, Callable[[Run], object]] = {
    "counting operations": training_flops,
    "counting operations with parts frozen": lambda training: training_flops(training, Position()),
    "evaluation": _evaluate,
    "the probe": lambda training: probe(training.steps, training.task, training.model, training.loss, training.data),
    "diagnosis": _diagnose,
    "average": _average,
    "inspection": _watch,
    "trial of blocks": _trial,
}


@pytest.fixture
def make(compose: Callable[..., Any]) -> Callable[[], Run]:
    composition = compose(
        "data=synthetic", "data.dataset.samples=24", "data.image_size=4", "data.batch_size=8", "epochs=2", "swa=1",
        "threads=1",
    )  # fmt: skip
    values = composition.values
    facts = dict.fromkeys(("in_channels", "num_classes", "image_size"))
    values["model"] = {"_target_": f"{__name__}.Assigning", **facts}
    values["loss"] = {"_target_": f"{__name__}.Remembering"}
    return lambda: build_run(resolve_config(composition, Train))


@pytest.mark.parametrize("name", RUNS)
def test_a_run_on_the_side_leaves_no_trace(make: Callable[[], Run], name: str) -> None:
    training = make()
    training.state.train()
    training.model.norm.eval()
    for parameter in training.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = traces(training)
    RUNS[name](training)
    assert traces(training) == before


def test_counting_and_evaluating_do_not_change_the_training_of_a_model_that_assigns_its_buffers(
    make: Callable[[], Run],
) -> None:
    ends = []
    for aside in (False, True):
        training = make()
        for batch in training.data.train.loader.batches(0, 0, 3):
            training.state.train()
            training.step(batch, 1.0, len(batch.targets), update=True)
            if aside:
                training_flops(training)
                _evaluate(training)
        ends.append({name: tensor.tolist() for name, tensor in training.model.state_dict().items()})
    assert ends[0] == ends[1]
