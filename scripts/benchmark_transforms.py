"""Images a second of every batch transform on one thread, and of the usual augmentation against torchvision's.

    python scripts/benchmark_transforms.py --repeats 9

Batches are uint8, 128 x 3 x 32 x 32 unless told otherwise. What blends samples is timed on normalised batches. All
contenders are timed in turn, again and again, by the CPU time of the process; the tables have medians. The second table is
crop with padding, mirroring and normalisation, a draw for each image: torchvision's transforms are applied image by image
and their results stacked, as a DataLoader does, the first version to PIL images and the second to tensors.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torchvision
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms import v2

from runner.data.sample_rng import SampleRNG
from runner.data.transforms.augment import (
    Pipeline,
    RandomBrightnessContrast,
    RandomErasing,
    RandomFlip,
    RandomShift,
)
from runner.data.transforms.auto_augment import RandAugment, TrivialAugment
from runner.data.transforms.color_jitter import ColorJitter
from runner.data.transforms.mixing import CutMix, Mixing, Mixup, OneOf
from runner.data.transforms.resized_crop import RandomResizedCrop

CPU = torch.device("cpu")
MEAN, STD = [0.4914, 0.4822, 0.4465], [0.247, 0.2435, 0.2616]
SHARE = 0.125
Call = Callable[[int], Any]


def transforms(images: Tensor, indices: Tensor) -> dict[str, Call]:
    """Each batch transform alone, then what options put together; the argument is the epoch."""
    alone: dict[str, Any] = {
        "RandomShift": RandomShift(SHARE),
        "RandomShift padding=reflect": RandomShift(SHARE, "reflect"),
        "RandomFlip": RandomFlip(),
        "RandomFlip alternate=true": RandomFlip(alternate=True),
        "RandomBrightnessContrast": RandomBrightnessContrast(),
        "RandomErasing": RandomErasing(),
        "RandomResizedCrop": RandomResizedCrop(),
        "ColorJitter": ColorJitter(),
        "ColorJitter hue=0.1": ColorJitter(hue=0.1),
        "RandAugment": RandAugment(),
        "TrivialAugment": TrivialAugment(),
    }
    together: dict[str, list[Any]] = {
        "none": [],
        "standard": [RandomShift(SHARE), RandomFlip()],
        "strong": [RandomShift(SHARE), RandomFlip(), RandomBrightnessContrast(), RandomErasing()],
        "resized_crop": [RandomResizedCrop((0.25, 1.0)), RandomFlip(), ColorJitter()],
    }
    targets = torch.arange(len(images)) % 10
    mixes = {
        "Mixup": Mixing(Mixup(), 0, 10),
        "CutMix": Mixing(CutMix(), 0, 10),
        "OneOf Mixup, CutMix": Mixing(OneOf([Mixup(), CutMix()]), 0, 10),
    }
    normalised = Pipeline([], MEAN, STD, 0, CPU)(images, indices, 0)
    calls: dict[str, Call] = {}
    for name, transform in alone.items():
        calls[name] = lambda epoch, made=transform: made(images, SampleRNG(0, epoch, indices))
    for name, mix in mixes.items():
        calls[name] = lambda epoch, made=mix: made(normalised, targets, indices, epoch)
    for name, steps in together.items():
        for layout, channels_last in (("", False), (" channels_last=true", True)):
            pipeline = Pipeline(steps, MEAN, STD, 0, CPU, channels_last=channels_last)
            calls[f"transform={name}{layout}"] = lambda epoch, made=pipeline: made(images, indices, epoch)
    return calls


def contenders(images: Tensor, indices: Tensor) -> dict[str, Call]:
    """Crop with padding, mirroring and normalisation in several ways."""
    size, margin = images.shape[-1], round(SHARE * images.shape[-1])
    first = torchvision.transforms.Compose(
        [
            torchvision.transforms.RandomCrop(size, padding=margin),
            torchvision.transforms.RandomHorizontalFlip(),
            torchvision.transforms.ToTensor(),
            torchvision.transforms.Normalize(MEAN, STD),
        ]
    )
    second = v2.Compose(
        [
            v2.RandomCrop(size, padding=margin),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ]
    )
    pictures = [torchvision.transforms.functional.to_pil_image(image) for image in images]
    pipeline = Pipeline([RandomShift(SHARE), RandomFlip()], MEAN, STD, 0, CPU)
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)

    def by_hand(_: int) -> Tensor:
        """What people write for a batch in memory, with torch's generator and a draw for each image."""
        padded = F.pad(images, (margin,) * 4)
        down, across = torch.randint(0, 2 * margin + 1, (2, len(images)))
        places = torch.arange(size)
        rows, columns = (down[:, None] + places)[:, :, None], (across[:, None] + places)[:, None, :]
        crops = padded[torch.arange(len(images))[:, None, None], :, rows, columns].permute(0, 3, 1, 2)
        flips = torch.rand(len(images)) < 0.5
        return (torch.where(flips[:, None, None, None], crops.flip(-1), crops).float() / 255 - mean) / std

    return {
        "transform=standard": lambda epoch: pipeline(images, indices, epoch),
        "batch code by hand": by_hand,
        "torchvision v1, PIL images": lambda _: torch.stack([first(picture) for picture in pictures]),
        "torchvision v2, tensors": lambda _: torch.stack([second(image) for image in images]),
        "torchvision v2, whole batch, one draw": lambda _: second(images),
    }


def seconds(calls: dict[str, Call], repeats: int, least: float) -> dict[str, list[float]]:
    """Seconds of a call, `repeats` times for each; every measurement takes at least `least` seconds."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            count, began = 0, time.process_time()
            while (passed := time.process_time() - began) < least or count == 0:
                call(count)
                count += 1
            if repeat:  # the first round warms up
                found[name].append(passed / count)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--least", type=float, default=0.05, help="seconds of one measurement")
    given = parser.parse_args()
    torch.set_num_threads(1)
    shape = (given.batch_size, 3, given.image_size, given.image_size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    indices = torch.arange(given.batch_size)
    print(
        f"Python {platform.python_version()}, torch {torch.__version__}, torchvision {torchvision.__version__}, ",
        end="",
    )
    print(f"{platform.machine()}, one thread, median of {given.repeats} alternating measurements, uint8 {shape}")
    for name, values in seconds(transforms(images, indices), given.repeats, given.least).items():
        print(f"{name:<40} {given.batch_size / statistics.median(values):12,.0f} images/s")
    print()
    times = seconds(contenders(images, indices), given.repeats, given.least)
    ours = times["transform=standard"]
    for name, values in times.items():
        ratio = statistics.median(theirs / mine for theirs, mine in zip(values, ours, strict=True))
        print(
            f"{name:<40} {given.batch_size / statistics.median(values):12,.0f} images/s   {ratio:5.2f} times the time"
        )


if __name__ == "__main__":
    main()
