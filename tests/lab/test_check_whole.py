"""`check` on samples with masks and boxes: nothing is found in healthy data, and each fault in data that have it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from extended import some

MODULE = '''
import torch
from torch import nn
from torch.nn import functional as F
from torchvision import tv_tensors

SIDE = 32


def drawn(index):
    """A bright rectangle on a dark, noisy background, its class, and its place."""
    generator = torch.Generator().manual_seed(index)
    left, top = (int(torch.randint(2, 12, (), generator=generator)) for _ in range(2))
    width, height = (int(torch.randint(6, 16, (), generator=generator)) for _ in range(2))
    kind = 1 + index % 2
    image = torch.randint(0, 60, (3, SIDE, SIDE), generator=generator)
    image[kind, top : top + height, left : left + width] += 150
    return image.to(torch.uint8), kind, (left, top, left + width, top + height)


class Masks(torch.utils.data.Dataset):
    """Image and mask of classes; `fault` breaks them."""

    def __init__(self, samples=48, fault=""):
        self.samples, self.fault = samples, fault

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        image, kind, (left, top, right, bottom) = drawn(index)
        mask = torch.zeros(SIDE, SIDE, dtype=torch.uint8)
        mask[top:bottom, left:right] = kind
        mask[:2] = 255
        if self.fault == "colors":
            mask = torch.where(mask == 2, 200, mask)
        elif self.fault == "from one":
            mask = torch.where(mask == 255, 255, mask + 1)
        elif self.fault == "size":
            mask = mask[:, : SIDE // 2]
        elif self.fault == "unreadable" and index == 7:
            raise OSError("broken")
        elif self.fault == "copies":
            image = drawn(0)[0]
        elif self.fault == "draws":
            image[:] = torch.randint(0, 60, image.shape)
        elif self.fault == "rolls":
            place = int(torch.randint(SIDE, ()))
            image, mask = image.roll(place, -1), mask.roll(place, -1)
        return tv_tensors.Image(image), tv_tensors.Mask(mask)


class Boxes(Masks):
    """Image, and boxes with labels."""

    def __getitem__(self, index):
        image, kind, (left, top, right, bottom) = drawn(index)
        boxes = torch.tensor([[left, top, right, bottom]]).float()
        if self.fault == "xywh as xyxy":
            boxes = torch.tensor([[left + 10, top, right - left, bottom - top]]).float()
        elif self.fault == "xyxy as xywh":
            boxes[:, 2:] += boxes[:, :2]
        elif self.fault == "shares":
            boxes /= SIDE
        labels = torch.tensor([kind - (self.fault == "from zero") + 7 * (self.fault == "beyond")])
        boxes = tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(SIDE, SIDE))
        return tv_tensors.Image(image), {"boxes": boxes, "labels": labels, "name": f"{index}"}


class Named(Boxes):
    classes = ("first", "second")


class Repeats:
    """One picture for all samples."""

    def __call__(self, sample):
        return tv_tensors.Image(torch.full((3, SIDE, SIDE), 7, dtype=torch.uint8)), tv_tensors.Mask(torch.zeros(SIDE, SIDE).long())


class Rarely:
    """A transform that fails for one draw in twenty."""

    def __call__(self, sample):
        if torch.rand(()) < 0.05:
            raise ValueError("there is no box left")
        return sample


class Small(nn.Module):
    def __init__(self, outputs=3, fault=""):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, outputs, 3, padding=1)
        self.norm = nn.BatchNorm2d(8) if fault == "norm twice" else nn.Identity()
        if fault == "unused":
            self.unused = nn.Conv2d(8, outputs, 1)
        elif fault == "frozen":
            self.first.requires_grad_(False)

    def forward(self, images):
        return self.second(F.relu(self.norm(self.norm(self.first(images)))))


class Segment:
    ignore_index = 255

    def __init__(self, num_classes=3, fault=""):
        self.num_classes, self.fault, self.scale = num_classes, fault, torch.ones((), requires_grad=True)

    def training_step(self, modules, batch):
        images, masks = batch
        logits = modules["model"](images)
        if self.fault == "detached":
            logits = logits * 0
        elif self.fault == "learned scale":
            logits = logits * self.scale
        elif self.fault == "infinite":
            logits = logits * float("inf")
        masks = torch.where((masks == 255) | (masks >= 3), 255, masks).long()
        return F.cross_entropy(logits, masks, ignore_index=255)

    def evaluation_step(self, modules, batch):
        if self.fault == "evaluation":
            modules["model"].first.bias.data += 1
        return {"loss": self.training_step(modules, batch)}


class Detect:
    num_classes = 2

    @staticmethod
    def collate(samples):
        images, targets = zip(*samples)
        return torch.stack(images), list(targets)

    def training_step(self, modules, batch):
        images, targets = batch
        maps = modules["model"](images)
        wanted = torch.zeros_like(maps)
        for row, target in enumerate(targets):
            for (left, top, right, bottom), label in zip(target["boxes"].tolist(), target["labels"].tolist()):
                wanted[row, int(label) % 3, int(top) : int(bottom), int(left) : int(right)] = 1
        return F.binary_cross_entropy_with_logits(maps, wanted)

    def evaluation_step(self, modules, batch):
        return {"loss": self.training_step(modules, batch)}
'''
COMMON = (
    "threads=1", "device=cpu", "transform=none", "~model.dropout", "~model.width", "epochs=20",
    "data.batch_size=8", "data.num_workers=0", "loss=none", "data.images=['0']", "model._target_=whole.Small",
    "optimizer.lr=0.003", "data.normalize.mean=[0.15]", "data.normalize.std=[0.1]",
)  # fmt: skip
JOINT = (
    "transform.sample_train=[{_target_: torchvision.transforms.v2.RandomHorizontalFlip},"
    "{_target_: torchvision.transforms.v2.RandomVerticalFlip},"
    "{_target_: torchvision.transforms.v2.RandomResizedCrop, size: 32, scale: [0.5, 1.0]},"
    "{_target_: torchvision.transforms.v2.RandomRotation, degrees: 15},"
    "{_target_: torchvision.transforms.v2.ColorJitter, brightness: 0.3, contrast: 0.3},"
    "{_target_: torchvision.transforms.v2.RandomInvert}]"
)
MASKS = (*COMMON, "data.dataset._target_=whole.Masks", "task._target_=whole.Segment", "task.num_classes=3")
BOXES = (*COMMON, "data.dataset._target_=whole.Boxes", "task._target_=whole.Detect")


@pytest.fixture(autouse=True)
def module(own_module: Callable[..., Path]) -> None:
    own_module("whole", MODULE)


def bad(checks: dict[str, Any]) -> dict[str, str]:
    return {name: each["evidence"] for name, each in checks.items() if each["status"] in ("fail", "warn")}


def test_no_class_counts_are_made_up_for_boxes(run: Callable[..., Any]) -> None:
    shown = run("check", *BOXES, "data.dataset._target_=whole.Named", "only=[class-ids]").out
    assert "samples of train\n" in shown
    assert "first 0" not in shown


@pytest.mark.parametrize("words", some([MASKS, BOXES], 1), ids=["masks", "boxes"])
@pytest.mark.parametrize("transforms", [(), (JOINT,)], ids=["plain", "augmented"])
def test_nothing_is_found_in_healthy_data(
    composed_check: Callable[..., Any], words: tuple[str, ...], transforms: tuple[str, ...]
) -> None:
    checks = composed_check(words, *transforms)
    assert bad(checks) == {}
    passed = {name for name, each in checks.items() if each["status"] == "pass"}
    assert passed >= {"readable", "finite-images", "duplicates", "leakage", "step-size", "gradient-scale",
                      "batch-repeats", "initial-loss", "missing-gradients", "class-ids",
                      "evaluation-transform", "stale-gradients"}  # fmt: skip
    assert passed >= ({"mask-size"} if words is MASKS else {"box-format"})
    assert checks["initial-loss"]["evidence"]
    assert "pairs of image and target" in checks["normalization"]["evidence"]


# What is faulty, the fault, the checks that are made (all without any), the one that finds it, and what it says
FAULTS = [
    (MASKS, "data.dataset.fault=colors", "", "class-ids", "200 belong to no class"),
    (MASKS, "data.dataset.fault=from one", "", "class-ids", "values 1, 2, 3"),
    (MASKS, "data.dataset.fault=size", "samples", "mask-size", "sample"),
    (BOXES, "data.dataset.fault=xywh as xyxy", "", "box-format", "no positive size"),
    (BOXES, "data.dataset.fault=xyxy as xywh", "", "box-format", "reach beyond"),
    (BOXES, "data.dataset.fault=shares", "", "box-format", "from 0 to 1"),
    (BOXES, "data.dataset.fault=from zero", "", "class-ids", "from 0 to 1"),
    (BOXES, "data.dataset.fault=beyond", "", "class-ids", "from 8 to 9"),
    (MASKS, "data.dataset.fault=unreadable", "data", "readable", "broken"),
    (MASKS, "data.dataset.fault=copies", "labels", "duplicates", "exact copies"),
    (MASKS, "data.dataset.fault=draws", "evaluation-transform", "evaluation-transform", "the data set itself"),
    (MASKS, "transform.sample_train=[{_target_: whole.Repeats}]", "batches", "batch-repeats", "100%"),
    (MASKS, "model.fault=unused", "", "missing-gradients", "unused.weight"),
    (MASKS, "task.fault=infinite", "loss", "initial-loss", "nan"),
    (MASKS, "task.fault=learned scale", "", "unregistered-parameters", "task.scale"),
    (MASKS, "task.fault=evaluation", "evaluation-leaves-state", "evaluation-leaves-state", "first.bias"),
    (MASKS, "task.fault=detached", "model", "gradient-scale", "0 of second.weight"),
    (MASKS, "data.dataset.fault=rolls", "evaluation-transform", "evaluation-transform", "the data set itself"),
    (MASKS, "model.fault=norm twice", "repeated-norms", "repeated-norms", "pass: norm"),
    (MASKS, "model.fault=frozen", "frozen-parameters", "frozen-parameters", "first.weight"),
    (BOXES, "transform.sample_train=[{_target_: whole.Rarely}]", "data", "readable", "there is no box left"),
]


@pytest.mark.parametrize(
    ("base", "word", "only", "name", "reason"), some(FAULTS, 0, 1, 2, 3, 6, 9, 12, 14, *range(16, 21), several=True)
)
def test_each_fault_is_found_by_its_check(
    composed_check: Any, base: tuple[str, ...], word: str, only: str, name: str, reason: str
) -> None:
    checks = composed_check(base, word, *([f"only=[{only}]"] if only else []))
    assert reason in bad(checks)[name]
    if not only:  # nothing else is wrong
        assert bad(checks).keys() == {name} | ({"leakage", "duplicates"} & bad(checks).keys())


def test_digests_are_of_contents() -> None:
    from runner.lab.check.sample import digest_of

    class Plain:
        def __init__(self, value: int) -> None:
            self.value = torch.tensor([value], dtype=torch.bfloat16)

    assert digest_of({"a": Plain(1)}) == digest_of({"a": Plain(1)}) != digest_of({"a": Plain(2)})
