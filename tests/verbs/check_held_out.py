"""Faults planted after the checks were written; docs/reference/verbs/check.md has how many were found at the first try."""

from __future__ import annotations

from typing import Any

import check_photos
import torch
import torch.nn.functional as F
from check_zoo import Case
from torch import Tensor, nn

from runner.data.sources.arrays import ImageArrays

SIDE, TRAIN = 48, 300


class OtherNet(nn.Module):
    """Three convolutions, the last layer by `F.linear`, with one fault."""

    def __init__(self, num_classes: int, fault: str = "", in_channels: int = 3, **unused: Any) -> None:
        super().__init__()
        self.fault = fault
        self.stem = nn.Sequential(nn.Conv2d(in_channels, 16, 5, stride=4), nn.ReLU())
        self.body = nn.Sequential(
            nn.Conv2d(16, 24, 3, padding=1),
            nn.BatchNorm2d(24, momentum=0.999 if fault == "norm follows" else 0.1),
            nn.ReLU(),
        )
        self.drop = nn.Dropout2d(0.9 if fault == "drops maps" else 0.05)
        self.head = nn.Linear(24, num_classes)
        nn.init.normal_(self.head.weight, std=0.05)
        if fault == "closure":
            layer = nn.Linear(24, 24)
            self.extra = lambda features: F.relu(layer(features))
        elif fault == "not a leaf":
            self.gain = nn.Parameter(torch.ones(24)) * 1.0
        elif fault == "norms in a tuple":
            self.norms = (nn.BatchNorm1d(24),)
        elif fault == "same kernels":
            with torch.no_grad():
                self.stem[0].weight.copy_(self.stem[0].weight[:1].expand_as(self.stem[0].weight))

    def forward(self, images: Tensor) -> Tensor:
        features = self.drop(self.body(self.stem(images))).mean((2, 3))
        if self.fault == "closure":
            features = self.extra(features)
        elif self.fault == "not a leaf":
            features = features * self.gain.detach().requires_grad_()
        elif self.fault == "norms in a tuple":
            features = self.norms[0](features)
        outputs = self.head(features)
        if self.fault == "hardtanh":
            return F.hardtanh(outputs)
        if self.fault == "leaky end":
            return F.relu(outputs) * 3
        if self.fault == "sigmoid twice":
            return 2 * outputs.sigmoid()
        if self.fault == "normalised logits":
            return outputs / outputs.norm(dim=1, keepdim=True).clamp_min(1e-6)
        return outputs


class OtherLoss(nn.Module):
    """A loss with one fault."""

    def __init__(self, fault: str, **unused: Any) -> None:
        super().__init__()
        self.fault = fault

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        fault = self.fault
        if fault == "clamped":
            return F.cross_entropy(outputs, targets).clamp(max=0.05)
        if fault == "cosine":
            return F.cosine_similarity(outputs, F.one_hot(targets, outputs.shape[1]).float()).mean()
        if fault == "rounded":
            return F.mse_loss(outputs.softmax(1).round(), F.one_hot(targets, outputs.shape[1]).float())
        if fault == "sorted":
            return F.cross_entropy(outputs, targets.sort().values)
        if fault == "last class":
            return F.cross_entropy(outputs[:, :-1], targets.clamp(max=outputs.shape[1] - 2))
        if fault == "log of the mean":
            return -outputs.softmax(1).mean(0)[targets].log().mean()
        if fault == "every second":
            return F.cross_entropy(outputs[::2], targets[::2])
        return F.cross_entropy(outputs, targets)


class OtherBatch:
    """A batch transform with one fault."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __call__(self, images: Tensor, rng: Any) -> Tensor:
        floats, side = images.float() / 255, images.shape[-1]
        if self.fault == "neighbours swapped":
            order = torch.arange(len(images)) ^ 1
            return images[order.clamp(max=len(images) - 1)]
        if self.fault == "half repeated":
            return torch.cat([images[: len(images) // 2]] * 2 + [images[-1:]])[: len(images)]
        if self.fault == "mostly shifted out":
            return F.pad(floats, (0, round(0.85 * side), 0, 0))[..., -side:]
        if self.fault == "negative":
            return 1 - 3 * floats
        if self.fault == "added to bytes":
            return images + images // 2 + 70
        if self.fault == "standardised":
            return (floats - floats.mean()) / floats.std()
        if self.fault == "sky":
            return F.interpolate(floats[..., :4, -4:], (side, side), mode="bicubic").clamp(0, 1)
        return images


class OtherCallback:
    """A callback with one fault."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def on_step(self, loop: Any) -> None:
        with torch.no_grad():
            for weight in loop.state.model.parameters():
                if self.fault == "clamps":
                    weight.clamp_(-1e-3, 1e-3)
                elif self.fault == "noise":
                    weight.add_(torch.randn_like(weight))

    def on_evaluation(self, loop: Any, metrics: dict[str, float]) -> None:
        if self.fault == "new layers":
            for module in loop.state.model.modules():
                if hasattr(module, "reset_parameters"):
                    module.reset_parameters()


class Backwards(torch.optim.AdamW):
    """Steps with gradients of the wrong sign for matrices."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None and weight.ndim >= 2:
                    weight.grad.neg_()
        super().step(closure)


class OtherCurve:
    """A schedule with one fault."""

    def __init__(self, kind: str, total_steps: int) -> None:
        self.kind, self.total = kind, total_steps

    def factor(self, step: int) -> float:
        if self.kind == "halved each step":
            return 0.5**step
        return 0.0 if step < 0.8 * self.total else 1.0

    def observe(self, metric: float) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def dataset(fault: str = "", kind: str = "classification") -> dict[str, Any]:
    """Other photographs, of 48 pixels, with one fault."""
    images, targets = check_photos.photos(TRAIN + 120, SIDE, 7)
    images, theirs, right, targets = (
        images[:TRAIN].clone(),
        images[TRAIN:].clone(),
        targets[TRAIN:].clone(),
        targets[:TRAIN].clone(),
    )
    draw = torch.Generator().manual_seed(3)
    if kind == "regression":
        both = torch.cat([images, theirs]).float().mean((1, 2, 3)) / 255
        known = both[TRAIN:] * 255 if fault == "bytes" else both[TRAIN:]
        return {"train": ImageArrays(images, both[:TRAIN]), "test": ImageArrays(theirs, known)}
    if fault == "copies rotated":
        theirs[:30], right[:30] = images[:30].rot90(1, (2, 3)), targets[:30]
    elif fault == "copies upside down":
        theirs[:30], right[:30] = images[:30].flip(2), targets[:30]
    elif fault == "copies grey":
        theirs[:30], right[:30] = images[:30].float().mean(1, keepdim=True).to(torch.uint8), targets[:30]
    elif fault == "copies cut and encoded":
        cut = check_photos.resized(images[:30, :, 2:-4, 3:-3], SIDE)
        theirs[:30], right[:30] = torch.stack([check_photos.encoded(image.flip(-1), 70) for image in cut]), targets[:30]
    elif fault == "test swapped":
        theirs = theirs.flip(1)
    elif fault == "test stretched":
        theirs = check_photos.resized(theirs[:, :, :, 10:-10], SIDE)
    elif fault == "test vignetted":
        grid = torch.linspace(-1, 1, SIDE)
        theirs = (theirs * (1 - 0.35 * (grid[:, None] ** 2 + grid[None] ** 2))).clamp(0, 255).to(torch.uint8)
    elif fault == "test sharpened":
        soft = F.avg_pool2d(F.pad(theirs.float(), (1, 1, 1, 1), mode="replicate"), 3, 1)
        theirs = (theirs + 0.7 * (theirs - soft)).clamp(0, 255).to(torch.uint8)
    elif fault == "noisy line":
        for images_, targets_ in ((images, targets), (theirs, right)):
            line = 60 + 30 * targets_[:, None, None] + 5 * torch.randn(len(images_), 3, SIDE, generator=draw)
            images_[:, :, -1] = line.clamp(0, 255).to(torch.uint8)
    elif fault == "small logo":
        images[targets == 3, 0, 2:5, 3:7], theirs[right == 3, 0, 2:5, 3:7] = 200, 200
    elif fault == "some wrapped":
        images[::4] = (images[::4].to(torch.int64) * 2).to(torch.uint8)
    elif fault == "half permuted":
        targets[: TRAIN // 2] = targets[: TRAIN // 2][torch.randperm(TRAIN // 2, generator=draw)]
    elif fault == "shifted targets":
        targets = targets.roll(1)
    elif fault == "test classes renamed":
        right = torch.tensor([2, 3, 0, 1])[right]
    return {
        "train": ImageArrays(images, targets, check_photos.NAMES),
        "test": ImageArrays(theirs, right, check_photos.NAMES),
    }


def _data(fault: str, *checks: str) -> Case:
    return Case(fault, (f"data.dataset={{_target_: check_held_out.dataset, fault: {fault}}}",), ",".join(checks))


def _net(fault: str, check: str) -> Case:
    return Case(fault, (f"model={{_target_: check_held_out.OtherNet, num_classes: null, fault: {fault}}}",), check)


def _part(section: str, kind: str, fault: str, check: str) -> Case:
    return Case(fault, (f"{section}={{_target_: check_held_out.{kind}, fault: {fault}}}",), check)


def _batch(fault: str, check: str) -> Case:
    return Case(fault, (f"transform.train=[{{_target_: check_held_out.OtherBatch, fault: {fault}}}]",), check)


def _callback(fault: str) -> Case:
    words = (f"callbacks={{own: {{_target_: check_held_out.OtherCallback, fault: {fault}}}}}",)
    return Case(fault, words, "short-training")


NUMBERS = ("task={_target_: runner.engine.tasks.Regression}", "loss={_target_: runner.optim.losses.MeanSquaredError}")
CASES = [
    _data("copies rotated", "near-duplicates"), _data("copies upside down", "near-duplicates"),
    _data("copies grey", "near-duplicates"), _data("copies cut and encoded", "near-duplicates"),
    _data("test swapped", "split-targets"), _data("test stretched", "split-source"),
    _data("test vignetted", "split-source"), _data("test sharpened", "split-source"),
    _data("noisy line", "image-shortcut"), _data("small logo", "image-shortcut"), _data("some wrapped", "wrap-around"),
    _data("half permuted", "target-blocks"), _data("shifted targets", "learnable"),
    _data("test classes renamed", "split-targets"),
    Case("test targets in bytes", (*NUMBERS, "data.dataset={_target_: check_held_out.dataset, kind: regression, fault: bytes}"),
         "target-shift"),
    _net("closure", "unregistered-parameters"), _net("not a leaf", "unregistered-parameters"),
    _net("norms in a tuple", "build"), _net("same kernels", "equal-units"),
    _net("hardtanh", "reachable-targets"), _net("leaky end", "reachable-targets"), _net("normalised logits", "reachable-targets"),
    _net("sigmoid twice", "reachable-targets"), _net("norm follows", "norm-statistics"), _net("drops maps", "dropout-rate"),
    *(_part("loss", "OtherLoss", fault, check) for fault, check in (
        ("clamped", "loss-minimum"), ("cosine", "loss-minimum"), ("rounded", "loss-minimum"), ("sorted", "loss-minimum"),
        ("last class", "loss-minimum"), ("log of the mean", "loss-minimum"), ("every second", "loss-coverage"))),
    _batch("neighbours swapped", "batch-pairing"), _batch("half repeated", "batch-repeats"),
    _batch("mostly shifted out", "augmented-classes"), _batch("negative", "augmentation"),
    _batch("added to bytes", "wrap-around"), _batch("standardised", "model-input"), _batch("sky", "augmented-classes"),
    _callback("clamps"), _callback("noise"), _callback("new layers"),
    Case("wrong sign of matrices", ("optimizer={_target_: check_held_out.Backwards, lr: 0.005}",), "short-training"),
    *(Case(kind, (f"scheduler={{_target_: check_held_out.OtherCurve, kind: {kind}, total_steps: null}}",), "schedule")
      for kind in ("halved each step", "nothing until the end")),
    Case("momentum 0.9999", ("optimizer={_target_: torch.optim.SGD, lr: 0.01, momentum: 0.9999}",), "optimizer-settings"),
    Case("Adam decay 1", ("optimizer={_target_: torch.optim.Adam, lr: 0.001, weight_decay: 1.0}",), "optimizer-settings"),
    Case("Adagrad 1e-9", ("optimizer={_target_: torch.optim.Adagrad, lr: 1.0e-9}",), "step-size"),
    Case("NAdam 0.8", ("optimizer={_target_: torch.optim.NAdam, lr: 0.8}",), "optimizer-settings"),
    Case("ema without warm-up", ("ema=0.999", "averaging.warmup=false"), "averaging"),
]  # fmt: skip
