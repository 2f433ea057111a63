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


def dataset(fault: str = "", kind: str = "classification") -> dict[str, Any]:
    """Other photographs, of 48 pixels, with one fault."""
    images, targets = (each.clone() for each in check_photos.photos(TRAIN + 120, SIDE, 7))
    images, theirs, targets, right = images[:TRAIN], images[TRAIN:], targets[:TRAIN], targets[TRAIN:]
    if kind == "regression":
        ours, known = images.float().mean((1, 2, 3)) / 255, theirs.float().mean((1, 2, 3))
        return {"train": ImageArrays(images, ours), "test": ImageArrays(theirs, known)}
    few = images[:30]
    copies = {
        "copies rotated": few.rot90(1, (2, 3)),
        "copies upside down": few.flip(2),
        "copies grey": few.float().mean(1, keepdim=True).to(torch.uint8),
    }
    if fault in copies:
        theirs[:30], right[:30] = copies[fault], targets[:30]
    elif fault == "test swapped":
        theirs = theirs.flip(1)
    elif fault == "shifted targets":
        targets = targets.roll(1)
    elif fault == "test classes renamed":
        right = torch.tensor([2, 3, 0, 1])[right]
    names = check_photos.NAMES
    return {"train": ImageArrays(images, targets, names), "test": ImageArrays(theirs, right, names)}


def _data(fault: str, *checks: str) -> Case:
    return Case(fault, (f"data.dataset={{_target_: check_held_out.dataset, fault: {fault}}}",), ",".join(checks))


def _net(fault: str, check: str) -> Case:
    return Case(fault, (f"model={{_target_: check_held_out.OtherNet, num_classes: null, fault: {fault}}}",), check)


def _part(fault: str, check: str, key: str, kind: str) -> Case:
    return Case(fault, (key.format(f"{{_target_: check_photo_parts.{kind}, fault: {fault}}}"),), check)


NUMBERS = (
    "task={_target_: runner.tasks.regression.Regression}",
    "loss={_target_: runner.optim.losses.MeanSquaredError}",
)
_CASES = [
    _data("copies rotated", "near-duplicates"), _data("copies upside down", "near-duplicates"),
    _data("copies grey", "near-duplicates"),
    _data("test swapped", "split-targets"), _data("shifted targets", "learnable"),
    _data("test classes renamed", "split-targets"),
    _net("closure", "unregistered-parameters"), _net("not a leaf", "unregistered-parameters"),
    _net("norms in a tuple", "build"), _net("same kernels", "equal-units"),
    _net("hardtanh", "reachable-targets"), _net("leaky end", "reachable-targets"), _net("normalised logits", "reachable-targets"),
    _net("sigmoid twice", "reachable-targets"), _net("norm follows", "norm-statistics"), _net("drops maps", "dropout-rate"),
    *(_part(fault, "loss-minimum", "loss={}", "Loss")
      for fault in ("clamped", "cosine", "rounded", "sorted", "last class", "log of the mean")),
    _part("every second", "loss-of-samples", "loss={}", "Loss"),
    *(_part(fault, check, "transform.train=[{}]", "Batchwise") for fault, check in (
        ("neighbours swapped", "batch-pairing"), ("half repeated", "batch-repeats"), ("negative", "augmentation"))),
    *(_part(fault, "callbacks-effect", "callbacks={{own: {}}}", "Undoes") for fault in ("clamps", "noise", "new layers")),
    Case("wrong sign of matrices", ("optimizer={_target_: check_photo_parts.Backwards, lr: 0.005}",), "step-direction"),
    Case("test targets in bytes", (*NUMBERS, "data.dataset={_target_: check_held_out.dataset, kind: regression, fault: bytes}"),
         "target-scale"),
    *(Case(kind, (f"scheduler={{_target_: check_photo_parts.Curve, kind: {kind}, total_steps: null}}",), "schedule")
      for kind in ("halved each step", "nothing until the end")),
    Case("momentum 0.9999", ("optimizer={_target_: torch.optim.SGD, lr: 0.01, momentum: 0.9999}",), "optimizer-settings"),
    Case("Adam decay 1", ("optimizer={_target_: torch.optim.Adam, lr: 0.001, weight_decay: 1.0}",), "optimizer-settings"),
    Case("Adagrad 1e-9", ("optimizer={_target_: torch.optim.Adagrad, lr: 1.0e-9}",), "step-size"),
    Case("NAdam 0.8", ("optimizer={_target_: torch.optim.NAdam, lr: 0.8}",), "optimizer-settings"),
    Case("ema without warm-up", ("ema=0.999", "averaging.warmup=false"), "averaging"),
]  # fmt: skip
CASES = [
    case if any(word.startswith("data.dataset") for word in case.words)
    else case._replace(words=("data.dataset={_target_: check_held_out.dataset}", *case.words))
    for case in _CASES
]  # fmt: skip
