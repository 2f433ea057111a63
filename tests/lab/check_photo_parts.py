"""Models, losses, optimizers, callbacks, schedules and batch transforms with one fault each, for trainings on photographs."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from check_photos import MEAN, STD
from torch import Tensor, nn


def _layers(count: int) -> list[nn.Linear]:
    return [nn.Linear(24, 24) for _ in range(count)]


def _in_a_closure(net: Net) -> None:
    (layer,) = _layers(1)
    net.extra = lambda features: F.relu(layer(features))


def _zero_weights(net: Net) -> None:
    (net.hidden,) = _layers(1)
    nn.init.zeros_(net.hidden.weight)
    nn.init.constant_(net.hidden.bias, 0.1)
    nn.init.constant_(net.head.weight, 0.05)


PREPARED: dict[str, Callable[[Net], object]] = {  # faults of the layers and of their initial weights
    "list": lambda net: setattr(net, "blocks", _layers(2)),
    "dict": lambda net: setattr(net, "blocks", {"first": _layers(1)[0], "second": {"inner": _layers(1)[0]}}),
    "plain tensor": lambda net: setattr(net, "scale", torch.ones(24, requires_grad=True)),
    "tensors in a list": lambda net: setattr(net, "scales", [torch.ones(24, requires_grad=True) for _ in range(2)]),
    "hidden in an object": lambda net: setattr(net, "kept", SimpleNamespace(layer=_layers(1)[0])),
    "closure": _in_a_closure,
    "not a leaf": lambda net: setattr(net, "gain", nn.Parameter(torch.ones(24)) * 1.0),
    "norms in a tuple": lambda net: setattr(net, "norms", (nn.BatchNorm1d(24),)),
    "drops maps": lambda net: setattr(net, "norm", nn.Sequential(net.norm, nn.Dropout2d(0.9))),
    "constant weights": lambda net: nn.init.constant_(net.deep.weight, 0.05),
    "same kernels": lambda net: net.conv.weight.data.copy_(net.conv.weight[:1].expand_as(net.conv.weight)),
    "zero weights": _zero_weights,
}
FEATURES: dict[str, Callable[[Net, Tensor], Tensor]] = {  # what the faults make of features (B, 24)
    "list": lambda net, x: F.relu(net.blocks[1](F.relu(net.blocks[0](x)) + x)),
    "dict": lambda net, x: x + F.relu(net.blocks["first"](x)) + net.blocks["second"]["inner"](x),
    "plain tensor": lambda net, x: x * net.scale,
    "tensors in a list": lambda net, x: x * net.scales[0] + net.scales[1],
    "hidden in an object": lambda net, x: net.kept.layer(x),
    "made in forward": lambda net, x: x + F.relu(nn.Linear(24, 24)(x)),
    "registered in forward": lambda net, x: x + F.relu(setattr(net, "late", _layers(1)[0]) or net.late(x)),
    "closure": lambda net, x: net.extra(x),
    "not a leaf": lambda net, x: x * net.gain.detach().requires_grad_(),
    "norms in a tuple": lambda net, x: net.norms[0](x),
    "zero weights": lambda net, x: F.relu(net.hidden(x)),
}
LAST: dict[str, Callable[[Tensor], Tensor]] = {  # and of outputs
    "relu": F.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "clamp": lambda x: x.clamp(-1, 1),
    "softplus": F.softplus,
    "unit length": lambda x: F.normalize(x, dim=1),
    "abs": torch.abs,
    "hardtanh": F.hardtanh,
    "leaky end": lambda x: F.relu(x) * 3,
    "sigmoid twice": lambda x: 2 * x.sigmoid(),
}


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
        PREPARED.get(fault, id)(self)

    def forward(self, images: Tensor) -> Tensor:
        features = F.relu(self.deep(F.relu(self.norm(self.conv(images))))).mean((2, 3))
        features = FEATURES.get(self.fault, lambda net, x: x)(self, features)
        return LAST.get(self.fault, nn.Identity())(self.head(self.dropout(features)))


class Residual(nn.Module):
    """Blocks of which the last layer starts at zero, so that each block passes on what it is given."""

    def __init__(self, num_classes: int, width: int = 16, depth: int = 4, dropout: float = 0.1, **unused: Any) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, stride=4)
        self.first = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(depth))
        self.second = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(depth))
        for layer in self.second:
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        self.dropout, self.head = dropout, nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.stem(images)
        for first, second in zip(self.first, self.second, strict=True):
            features = features + second(F.relu(first(F.relu(features))))
        return self.head(F.dropout(F.relu(features).mean((2, 3)), self.dropout, self.training))


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
