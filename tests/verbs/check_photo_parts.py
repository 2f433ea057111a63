"""Models, losses, optimizers, callbacks, schedules and batch transforms with one fault each, for trainings on photographs."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
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
            self.kept = Holder()
        elif fault == "constant weights":
            nn.init.constant_(self.deep.weight, 0.05)
        elif fault == "zero weights":
            self.hidden = nn.Linear(24, 24)
            nn.init.zeros_(self.hidden.weight)
            nn.init.constant_(self.hidden.bias, 0.1)
            nn.init.constant_(self.head.weight, 0.05)

    def forward(self, images: Tensor) -> Tensor:
        fault = self.fault
        features = F.relu(self.norm(self.conv(images)))
        features = F.relu(self.deep(features)).mean((2, 3))
        if fault == "list":
            for block in self.blocks:
                features = F.relu(block(features)) + features
        elif fault == "dict":
            features = features + F.relu(self.blocks["first"](features)) + self.blocks["second"]["inner"](features)
        elif fault == "plain tensor":
            features = features * self.scale
        elif fault == "tensors in a list":
            features = features * self.scales[0] + self.scales[1]
        elif fault == "hidden in an object":
            features = self.kept.layer(features)
        elif fault == "made in forward":
            features = features + F.relu(nn.Linear(24, 24)(features))
        elif fault == "registered in forward":
            self.late = nn.Linear(24, 24)
            features = features + F.relu(self.late(features))
        elif fault == "zero weights":
            features = F.relu(self.hidden(features))
        if fault == "dropped":
            features = F.dropout(features, 0.97, self.training)
        outputs = self.head(self.dropout(features))
        last = {"relu": F.relu, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "clamp": lambda x: x.clamp(-1, 1)}
        last |= {
            "softplus": F.softplus,
            "unit length": lambda x: F.normalize(x, dim=1),
            "log-softmax": lambda x: x.log_softmax(1),
        }
        last |= {"abs": torch.abs, "relu6": F.relu6}
        return last[fault](outputs) if fault in last else outputs


class Holder:
    """A custom object that is not a module."""

    def __init__(self) -> None:
        self.layer = nn.Linear(24, 24)


class Loss(nn.Module):
    """Cross-entropy, or squared errors of numbers, with one fault."""

    def __init__(self, fault: str, **unused: Any) -> None:
        super().__init__()
        self.fault = fault
        self.scale = torch.ones((), requires_grad=True)  # no parameter, so nothing trains it

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        fault = self.fault
        if fault == "learned scale":
            return F.cross_entropy(outputs * self.scale, targets)
        if fault == "wrong sign":
            return -F.cross_entropy(outputs, targets)
        if fault == "detached":
            return F.cross_entropy(outputs.detach(), targets)
        if fault == "item":
            return torch.tensor(F.cross_entropy(outputs, targets).item(), requires_grad=True)
        if fault == "constant":
            return F.cross_entropy(outputs, targets) * 0 + 1
        if fault == "blind":
            return F.cross_entropy(outputs, torch.zeros_like(targets))
        if fault == "own answers":
            return F.cross_entropy(outputs, outputs.argmax(1))
        if fault == "argmax":
            return (outputs.argmax(1) != targets).float().mean().requires_grad_()
        if fault == "wrong neighbour":
            return F.cross_entropy(outputs, (targets + 1) % outputs.shape[1])
        if fault == "rolled":
            return F.cross_entropy(outputs, targets.roll(1))
        if fault == "mean of the batch":
            return (outputs.softmax(1).mean(0) - F.one_hot(targets, outputs.shape[1]).float().mean(0)).square().sum()
        if fault == "entropy":
            return -(outputs.softmax(1) * outputs.log_softmax(1)).sum(1).mean()
        if fault == "first sample":
            return F.cross_entropy(outputs[:1], targets[:1])
        if fault == "half of the batch":
            return F.cross_entropy(outputs[: max(1, len(outputs) // 2)], targets[: max(1, len(outputs) // 2)])
        if fault == "ignores class 0":
            return (
                F.cross_entropy(outputs, targets, ignore_index=0) if bool((targets != 0).any()) else outputs.sum() * 0
            )
        if fault == "zero weight":
            weight = torch.tensor([1.0, 1.0, 0.0, 1.0])
            return (F.cross_entropy(outputs, targets, reduction="none") * weight[targets]).mean()
        if fault == "extreme weight":
            weight = torch.tensor([1.0, 1.0, 1e-4, 1.0])
            return (F.cross_entropy(outputs, targets, reduction="none") * weight[targets]).mean()
        if fault == "difference":
            return (outputs - targets).mean()
        if fault == "squared mean":
            return (outputs - targets).mean().square()
        if fault == "means":
            return (outputs.mean() - targets.mean()).square()
        return F.cross_entropy(outputs, targets)


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


class PutsBack:
    """A callback that puts the first weights back, after each step or each evaluation."""

    def __init__(self, after: str) -> None:
        self.after = after

    def on_start(self, loop: Any) -> None:
        self.kept = {name: tensor.clone() for name, tensor in loop.state.model.state_dict().items()}

    def on_step(self, loop: Any) -> None:
        if self.after == "steps":
            loop.state.model.load_state_dict(self.kept)

    def on_evaluation(self, loop: Any, metrics: dict[str, float]) -> None:
        if self.after == "evaluations":
            loop.state.model.load_state_dict(self.kept)


class SlowsDown:
    """A callback that sets the rate to nothing."""

    def on_step(self, loop: Any) -> None:
        for group in loop.state.optimizer.param_groups:
            group["initial_lr"] = group["lr"] = 1e-12


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
        }[self.kind]

    def observe(self, metric: float) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Batchwise:
    """A batch transform with a fault."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __call__(self, images: Tensor, rng: Any) -> Tensor:
        floats = images.float() / 255 if images.dtype == torch.uint8 else images
        side = images.shape[-1]
        if self.fault == "one image":
            return images[:1].expand_as(images).clone()
        if self.fault == "pairs":
            return images[::2].repeat_interleave(2, 0)[: len(images)]
        if self.fault == "permuted":
            return images.flip(0)
        if self.fault == "rolled and mirrored":
            return images.roll(1, 0).flip(-1)
        if self.fault == "overflow":
            return (images.to(torch.int64) + 110).to(torch.uint8)
        if self.fault == "normalised":
            mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
            return (floats - mean.view(3, 1, 1)) / std.view(3, 1, 1)
        if self.fault == "bytes as floats":
            return images.float()
        if self.fault == "corner":
            return F.interpolate(floats[..., : side // 8, : side // 8], (side, side), mode="bilinear")
        if self.fault == "background":
            return torch.cat([floats[..., :5, :]] * 7, 2)[..., :side, :]
        if self.fault == "tiny contrast":
            return 0.5 + 0.05 * (floats - 0.5)
        if self.fault == "channels":
            return images.flip(1)
        if self.fault == "mostly erased":
            floats = floats.clone()
            floats[torch.arange(len(floats)) % 3 > 0] = 0.5
            return floats
        if self.fault == "dark":
            return floats * 0.3
        return images
