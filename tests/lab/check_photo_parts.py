"""Models, losses, optimizers, callbacks, schedules and batch transforms with one fault each, for trainings on photographs."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from check_photos import MEAN, STD
from torch import Tensor, nn


class Net(nn.Module):
    """Two convolutions with BatchNorm and a linear head, with one fault."""

    def __init__(
        self,
        num_classes: int,
        fault: str = "",
        in_channels: int = 3,
        momentum: float = 0.1,
        dropout: float = 0.1,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.fault = fault
        self.conv = nn.Conv2d(in_channels, 12, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(12, momentum=momentum)
        self.deep = nn.Conv2d(12, 24, 3, stride=2, padding=1)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(24, num_classes)
        nn.init.normal_(self.head.weight, std=0.05)
        nn.init.zeros_(self.head.bias)
        if fault == "list":
            self.blocks = [nn.Linear(24, 24) for _ in range(2)]
        elif fault == "dict":
            self.blocks = {"first": nn.Linear(24, 24), "second": {"inner": nn.Linear(24, 24)}}
        elif fault == "plain tensor":
            self.scale = torch.ones(24, requires_grad=True)
        elif fault == "tensors in a list":
            self.scales = [torch.ones(24, requires_grad=True) for _ in range(2)]
        elif fault == "hidden in an object":
            self.kept = SimpleNamespace(layer=nn.Linear(24, 24))
        elif fault == "constant weights":
            nn.init.constant_(self.deep.weight, 0.05)
        elif fault == "zero weights":
            self.hidden = nn.Linear(24, 24)
            nn.init.zeros_(self.hidden.weight)
            nn.init.constant_(self.hidden.bias, 0.1)
            nn.init.constant_(self.head.weight, 0.05)

    def _changed(self, features: Tensor) -> Tensor:
        """Features (B, 24) as the fault changes them."""
        fault = self.fault
        if fault == "list":
            return F.relu(self.blocks[1](F.relu(self.blocks[0](features)) + features))
        if fault == "dict":
            return features + F.relu(self.blocks["first"](features)) + self.blocks["second"]["inner"](features)
        if fault == "plain tensor":
            return features * self.scale
        if fault == "tensors in a list":
            return features * self.scales[0] + self.scales[1]
        if fault == "hidden in an object":
            return self.kept.layer(features)
        if fault == "made in forward":
            return features + F.relu(nn.Linear(24, 24)(features))
        if fault == "registered in forward":
            self.late = nn.Linear(24, 24)
            return features + F.relu(self.late(features))
        if fault == "zero weights":
            return F.relu(self.hidden(features))
        return features

    def forward(self, images: Tensor) -> Tensor:
        features = F.relu(self.deep(F.relu(self.norm(self.conv(images))))).mean((2, 3))
        outputs = self.head(self.dropout(self._changed(features)))
        return LAST[self.fault](outputs) if self.fault in LAST else outputs


LAST: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "clamp": lambda x: x.clamp(-1, 1),
    "softplus": F.softplus,
    "unit length": lambda x: F.normalize(x, dim=1),
    "abs": torch.abs,
}


def _weighted(outputs: Tensor, targets: Tensor, of_class_2: float) -> Tensor:
    weight = torch.tensor([1.0, 1.0, of_class_2, 1.0])
    return (F.cross_entropy(outputs, targets, reduction="none") * weight[targets]).mean()


def _one_hot(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.one_hot(targets, outputs.shape[1]).float()


_entropy = F.cross_entropy
LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # of outputs and targets; the last four are for numbers
    "wrong sign": lambda out, y: -_entropy(out, y),
    "detached": lambda out, y: _entropy(out.detach(), y),
    "wrong axis": lambda out, y: -out.log_softmax(0).gather(1, y[:, None]).mean(),
    "sum": lambda out, y: _entropy(out, y, reduction="sum"),
    "item": lambda out, y: torch.tensor(_entropy(out, y).item(), requires_grad=True),
    "constant": lambda out, y: _entropy(out, y) * 0 + 1,
    "blind": lambda out, y: _entropy(out, torch.zeros_like(y)),
    "own answers": lambda out, y: _entropy(out, out.argmax(1)),
    "argmax": lambda out, y: (out.argmax(1) != y).float().mean().requires_grad_(),
    "wrong neighbour": lambda out, y: _entropy(out, (y + 1) % out.shape[1]),
    "rolled": lambda out, y: _entropy(out, y.roll(1)),
    "mean of the batch": lambda out, y: (out.softmax(1).mean(0) - _one_hot(out, y).mean(0)).square().sum(),
    "entropy": lambda out, y: -(out.softmax(1) * out.log_softmax(1)).sum(1).mean(),
    "first sample": lambda out, y: _entropy(out[:1], y[:1]),
    "half of the batch": lambda out, y: _entropy(out[: max(1, len(out) // 2)], y[: max(1, len(out) // 2)]),
    "ignores class 0": lambda out, y: _entropy(out, y, ignore_index=0) if bool(y.any()) else out.sum() * 0,
    "zero weight": lambda out, y: _weighted(out, y, 0.0),
    "extreme weight": lambda out, y: _weighted(out, y, 1e-4),
    "clamped": lambda out, y: _entropy(out, y).clamp(max=0.05),
    "cosine": lambda out, y: F.cosine_similarity(out, _one_hot(out, y)).mean(),
    "rounded": lambda out, y: F.mse_loss(out.softmax(1).round(), _one_hot(out, y)),
    "sorted": lambda out, y: _entropy(out, y.sort().values),
    "last class": lambda out, y: _entropy(out[:, :-1], y.clamp(max=out.shape[1] - 2)),
    "log of the mean": lambda out, y: -out.softmax(1).mean(0)[y].log().mean(),
    "every second": lambda out, y: _entropy(out[::2], y[::2]),
    "difference": lambda out, y: (out - y).mean(),
    "squared mean": lambda out, y: (out - y).mean().square(),
    "means": lambda out, y: (out.mean() - y.mean()).square(),
    "broadcast": lambda out, y: (out.squeeze(1) - y).square().mean(),
}


class Loss(nn.Module):
    """One of `LOSSES`, or cross-entropy of outputs that a tensor scales which nothing trains."""

    def __init__(self, fault: str, **unused: Any) -> None:
        super().__init__()
        self.fault, self.scale = fault, torch.ones((), requires_grad=True)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.fault == "learned scale":
            return _entropy(outputs * self.scale, targets)
        return LOSSES[self.fault](outputs, targets)


class Ascent(torch.optim.SGD):
    """Steps uphill."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                weight.data.add_(weight.grad, alpha=group["lr"])


class Forgets(torch.optim.AdamW):
    """Puts the weights back after each step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        kept = [[weight.detach().clone() for weight in group["params"]] for group in self.param_groups]
        super().step(closure)
        for group, before in zip(self.param_groups, kept, strict=True):
            for weight, old in zip(group["params"], before, strict=True):
                weight.data.lerp_(old, 0.9999)


class Shuffles(torch.optim.SGD):
    """Steps along the gradients of nobody: noise of their size."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                weight.data.add_(torch.randn_like(weight) * 0.02)


class Backwards(torch.optim.AdamW):
    """Steps with gradients of the wrong sign for matrices."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None and weight.ndim >= 2:
                    weight.grad.neg_()
        super().step(closure)


class Undoes:
    """A callback with a fault, after each step or each evaluation."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def on_start(self, loop: Any) -> None:
        self.kept = {name: tensor.clone() for name, tensor in loop.state.model.state_dict().items()}

    def on_step(self, loop: Any) -> None:
        if self.fault == "first weights after steps":
            loop.state.model.load_state_dict(self.kept)
        for group in loop.state.optimizer.param_groups if self.fault == "no rate" else ():
            group["initial_lr"] = group["lr"] = 1e-12
        with torch.no_grad():
            for weight in loop.state.model.parameters():
                if self.fault == "clamps":
                    weight.clamp_(-1e-3, 1e-3)
                elif self.fault == "noise":
                    weight.add_(torch.randn_like(weight))

    def on_evaluation(self, loop: Any, metrics: dict[str, float]) -> None:
        if self.fault == "first weights after evaluations":
            loop.state.model.load_state_dict(self.kept)
        for module in loop.state.model.modules() if self.fault == "new layers" else ():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()


class Curve:
    """A schedule of a kind."""

    def __init__(self, kind: str, total_steps: int) -> None:
        self.kind, self.total = kind, total_steps

    def factor(self, step: int) -> float:
        share = step / max(1, self.total)
        return {
            "rises": 10 ** (2 * share - 1.5),
            "gone at once": float(step < 2) + 1e-6,
            "spike": 1000.0 if 0.5 < share < 0.7 else 1.0,
            "negative": 1 - 2 * share,
            "nothing": 1e-6,
            "halved each step": 0.5**step,
            "nothing until the end": float(share >= 0.8),
        }[self.kind]

    def observe(self, metric: float) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def _floats(images: Tensor) -> Tensor:
    return images.float() / 255 if images.dtype == torch.uint8 else images


BATCHES: dict[str, Callable[[Tensor], Tensor]] = {
    "one image": lambda x: x[:1].expand_as(x).clone(),
    "pairs": lambda x: x[::2].repeat_interleave(2, 0)[: len(x)],
    "permuted": lambda x: x.flip(0),
    "upside down": lambda x: x.flip(2),
    "rolled and mirrored": lambda x: x.roll(1, 0).flip(-1),
    "neighbours swapped": lambda x: x[(torch.arange(len(x)) ^ 1).clamp(max=len(x) - 1)],
    "half repeated": lambda x: torch.cat([x[: len(x) // 2]] * 2 + [x[-1:]])[: len(x)],
    "normalised": lambda x: (_floats(x) - MEAN) / STD,
    "negative": lambda x: 1 - 3 * _floats(x),
    "tiny contrast": lambda x: 0.5 + 0.05 * (_floats(x) - 0.5),
    "dark": lambda x: _floats(x) * 0.3,
    "mostly erased": lambda x: torch.where((torch.arange(len(x)) % 3 > 0).view(-1, 1, 1, 1), 0.5, _floats(x)),
}


class Batchwise:
    """A batch transform, one of `BATCHES`."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __call__(self, images: Tensor, rng: Any) -> Tensor:
        return BATCHES[self.fault](images)
