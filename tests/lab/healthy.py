"""Trainings with nothing wrong, of many kinds, in which `check` has nothing to find."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from photographs import photo
from torch import Tensor, nn

from runner.data.sources.arrays import ImageArrays

KINDS = 4


@functools.cache
def _drawn(samples: int, side: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = np.random.default_rng(seed)
    images = [np.array(photo(number % KINDS, KINDS, side, generator)) for number in range(samples)]
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous(), torch.arange(samples) % KINDS


def photos(samples: int = 320, side: int = 32, numbers: bool = False, **unused: Any) -> dict[str, ImageArrays]:
    """Images that resemble photographs, to classify, or to tell the brightness of."""
    found = {}
    for seed, (split, count) in enumerate({"train": samples, "val": samples // 4, "test": samples // 4}.items()):
        images, targets = _drawn(count, side, seed)
        names = tuple(f"kind{number}" for number in range(KINDS))
        if numbers:
            targets, names = (images.float().mean((1, 2, 3)) / 255 - 0.5) * 8, ()
        found[split] = ImageArrays(images.clone(), targets.clone(), names)
    return found


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
        """Logits (B, num_classes) of images (B, 3, H, W)."""
        features = self.stem(images)
        for first, second in zip(self.first, self.second, strict=True):
            features = features + second(F.relu(first(F.relu(features))))
        return self.head(F.dropout(F.relu(features).mean((2, 3)), self.dropout, self.training))


WORDS = (
    *("threads=1", "device=cpu", "data=digits", "data.dataset={_target_: healthy.photos}", "data.batch_size=32"),
    *("data.normalize={mean: null, std: null}", "epochs=12", "data.hflip=0.5"),
)
NUMBERS = ("task=regression", "loss=mse", "data.dataset={_target_: healthy.photos, numbers: true}")
RESNET = ("model=resnet18_cifar", "model.width=8")
VIT = ("model=vit_tiny", "model.dim=48", "model.depth=3")
CNN = ("model=small_cnn", "model.width=16")
ZOO = ("model=torchvision", "optimizer.lr=0.001")

TRAININGS: dict[str, tuple[str, ...]] = {
    "small_cnn": CNN,
    "strong augmentation, sgd": (*CNN, "transform=strong", "optimizer=sgd", "optimizer.lr=0.02", "scheduler=cosine"),
    "mlp, adam": ("model=mlp", "model.hidden=[64,64]", "optimizer=adam", "scheduler=constant", "transform=none"),
    "resnet, zero gamma, sgd": (*RESNET, "init=zero_gamma", "optimizer=sgd", "optimizer.lr=0.05"),
    "resnet, drop path, mixing": (*RESNET, "model.drop_path=0.2", "transform=mix"),
    "vision transformer": (*VIT, "optimizer.lr=0.001"),
    "vision transformer, clipping": (
        *VIT,
        "model.drop_path=0.1",
        "optimizer.lr=0.001",
        "grad_clip.norm=1.0",
        "ema=0.99",
    ),
    "residual blocks that start at zero": ("model={_target_: healthy.Residual, num_classes: null, width: 16}",),
    "muon": (*CNN, "optimizer=muon"),
    "rmsprop, steps": (*CNN, "optimizer=rmsprop", "optimizer.lr=0.001", "scheduler=step"),
    "focal loss, smoothed averages": (*CNN, "loss=focal", "ema=0.98"),
    "binary cross-entropy": (*CNN, "loss=bce"),
    "label smoothing, accumulation": (*CNN, "loss.label_smoothing=0.1", "accumulate=2", "data.batch_size=16"),
    "numbers, small_cnn": (*CNN, *NUMBERS),
    "numbers, vision transformer": (*VIT, *NUMBERS, "optimizer.lr=0.001"),
    "stochastic weight averaging": (*CNN, "swa=0.75", "scheduler=wsd"),
    "random augmentation": (*CNN, "transform=randaugment", "init=prior_bias"),
    "trivial augmentation, adaptive clipping": (*RESNET, "transform=trivialaugment", "grad_clip.agc=0.05"),
    "augmix": (*CNN, "transform=augmix", "loss.class_weights=balanced"),
    "efficientnet_b0": (*ZOO, "model.name=efficientnet_b0"),
    # Its BatchNorm has a momentum of 0.0003, which needs a long training.
    "mnasnet0_5": (*ZOO, "model.name=mnasnet0_5", "transform=resized_crop", "epochs=2000"),
    "mobilenet_v3_small": (*ZOO, "model.name=mobilenet_v3_small", "transform=none"),
}
# Those that every check is made of in the suite; for the others the checks that need many steps take too long there.
WHOLE = ("mlp, adam", "residual blocks that start at zero", "random augmentation", "numbers, small_cnn")
