"""Models and losses of the user's that cannot be trained are refused before training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from runner.run.probe import _training

PARTS = """
import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self, in_channels, image_size, num_classes, kind=""):
        super().__init__()
        self.kind = kind
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(image_size[0] * image_size[1], 8), nn.BatchNorm1d(8))
        self.head = nn.Linear(8, num_classes)
        if kind == "frozen":
            self.requires_grad_(False)

    def forward(self, images):
        if self.kind == "large" and self.training and len(images) < 4:
            raise RuntimeError("needs four images")
        logits = self.head(self.body(images))
        if self.kind == "detached" or (self.kind == "detached while evaluating" and not self.training):
            return logits.detach()
        if self.kind == "dropping" and len(images) > 1 and self.training:
            return logits[:-1]
        if self.kind == "no derivative":
            return logits.exp().add_(1) * logits.relu_()
        if self.kind == "keeping":
            self.last = logits
        return logits


def mean_loss(logits, targets, **unused):
    return F.cross_entropy(logits, targets)


LOSSES = {
    "": torch.mean,
    "one element": lambda losses: losses.mean()[None],
    "samples": lambda losses: losses,
    "squeezed": torch.squeeze,
    "detached": lambda losses: losses.mean().detach(),
    "none": lambda losses: None,
    "float": lambda losses: float(losses.mean()),
}


class Loss(nn.Module):
    def __init__(self, kind="", **unused):
        super().__init__()
        self.kind = kind

    def forward(self, logits, targets):
        return LOSSES[self.kind](F.cross_entropy(logits, targets, reduction="none"))
"""
WORDS = (
    "threads=1", "logger=none", "log.progress=false", "log.curves=false", "device=cpu", "data=digits", "data.num_workers=0",
    "epochs=1", "max_steps=2", "data.batch_size=8", "transform=none", "evaluate.test=false", "trust=[unfit_parts]",
    "model=mlp", "~model.hidden", "~model.dropout", "model._target_=unfit_parts.Net",
    "loss._target_=unfit_parts.Loss",
)  # fmt: skip


@pytest.fixture
def start(workdir: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., Any]) -> Callable[..., Any]:
    (workdir / "unfit_parts.py").write_text(PARTS)
    monkeypatch.syspath_prepend(str(workdir))
    return lambda *words: run("train", *WORDS, *words)


REFUSED = {
    "detached outputs": (("+model.kind=detached",), "model: its result has no gradient"),
    "detached loss": (("+loss.kind=detached",), "loss: its result has no gradient"),
    "sample dropped": (("+model.kind=dropping",), "model: gives (1, 10) in training for a batch of 2"),
    "loss of each sample": (("+loss.kind=samples",), "loss: gives a tensor of shape (1,) as the loss"),
    "loss of each sample, squeezed": (("+loss.kind=squeezed",), "loss: gives a tensor of shape (2,) as the loss"),
    "no derivative": (("+model.kind=no derivative",), "model: its gradients cannot be computed: "),
    "loss with one element": (("+loss.kind=one element",), "loss: gives a tensor of shape (1,) as the loss"),
    "loss as a function": (("loss._target_=unfit_parts.mean_loss", "+loss._partial_=true"), "loss: is a partial"),
    "no loss": (("+loss.kind=none",), "loss: gives a NoneType as the loss"),
    "loss as a float": (("+loss.kind=float",), "loss: gives a float as the loss"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_trained_is_refused_before_training(name: str, start: Any) -> None:
    words, message = REFUSED[name]
    result = start(*words)
    assert message in result.err, result.err[-3000:] + result.out
    assert result.status == 2
    assert "    allowed: " in result.err
    assert "Traceback" not in result.err


FINE = [(), ("+model.kind=detached while evaluating",), ("+model.kind=large",), ("+model.kind=keeping", "ema=0.9")]


@pytest.mark.parametrize("words", FINE, ids=str)
def test_what_can_be_trained_is_not_refused(words: tuple[str, ...], start: Any) -> None:
    result = start(*words)
    assert result.status == 0, result.err


def test_the_check_leaves_model_and_generators_as_they_were() -> None:
    (model, loss), drawn = (_Watched(), nn.CrossEntropyLoss()), torch.get_rng_state()
    model[1].eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with _training(model, loss):
        assert model[1].training
        assert model(torch.randn(2, 4)).requires_grad
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (model.training, model[1].training, model.calls) == (True, False, 0)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(weight.grad is None for weight in model.parameters())


class _Watched(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
        self.calls = 0

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        outputs: torch.Tensor = super().forward(images)
        return outputs
