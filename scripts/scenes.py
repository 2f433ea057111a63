"""Do detection and segmentation learn? Both train on scenes of garments of Fashion-MNIST.

    python scripts/scenes.py FOLDER --data-root path/to/data

draws scenes into FOLDER, as COCO's JSON, images and masks, and trains a small FCOS and a small U-Net on them. A scene has one to
four grey garments on a background with a colour and noise; at most a tenth of a garment's box lies in those drawn before it. The
classes are four kinds, as shirts, coats and pullovers are hard to tell apart; `*_ten.json` has the ten classes. Test scenes are
drawn from test images.
Exit status 1 if the mean average precision at IoU 0.5, or the mean IoU, of the test scenes is below 0.9.
"""

from __future__ import annotations

import argparse
import colorsys
import json
import os
import random
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection import FCOS
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.fcos import FCOSHead

from runner.data.sources.torchvision_sets import fashion_mnist

HERE = Path(__file__).resolve().parent
SIDE = 64  # of a scene, in pixels
DARK = 15  # grey level up to which a pixel of Fashion-MNIST is background
OVERLAP = 0.1  # share of a box that may lie in earlier ones
BAR = 0.9
KINDS = ["background", "top or dress", "trouser", "shoe", "bag"]
KIND_OF = [1, 2, 1, 1, 1, 3, 1, 3, 4, 3]  # of each of the ten classes
ENDS = (("images", "/images"), ("annotations", ".json"))
RUNS: dict[str, tuple[list[str], str]] = {
    "detection": (["experiment=detection", "model=fcos", "optimizer.lr=0.002", "epochs=2"], "map_50"),
    "segmentation": (["experiment=segmentation", "model=unet", "optimizer.lr=0.005", "epochs=4"], "miou"),
}


def block(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """Two convolutions, of which the first may halve the resolution."""
    layers: list[nn.Module] = []
    for channels, step in ((inputs, stride), (outputs, 1)):
        layers += [nn.Conv2d(channels, outputs, 3, step, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class SmallFCOS(FCOS):  # type: ignore[misc]  # torchvision has no types
    """FCOS on one map of features of an eighth of the resolution."""

    def __init__(self, num_classes: int, width: int = 16, side: int = SIDE) -> None:
        backbone = nn.Sequential(block(3, width, 2), block(width, 2 * width, 2), block(2 * width, 4 * width, 2))
        backbone.out_channels = 4 * width  # type: ignore[assignment]
        anchors = AnchorGenerator(sizes=((8,),), aspect_ratios=((1.0,),))
        sizes = {"min_size": side, "max_size": side}
        head = FCOSHead(4 * width, 1, num_classes, num_convs=2)
        super().__init__(backbone, num_classes, anchor_generator=anchors, head=head, score_thresh=0.02, **sizes)


class UNet(nn.Module):
    """A U-Net that works on 2x2 pixels at a time, with three resolutions."""

    def __init__(self, num_classes: int, width: int = 16) -> None:
        super().__init__()
        self.first, self.second, self.third = (
            block(12, width),
            block(width, 2 * width, 2),
            block(2 * width, 4 * width, 2),
        )
        self.fourth, self.fifth = block(6 * width, 2 * width), block(3 * width, width)
        self.head = nn.Conv2d(width, 4 * num_classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, num_classes, H, W)."""
        fine = self.first(F.pixel_unshuffle(images, 2))
        middle = self.second(fine)
        coarse = F.interpolate(self.third(middle), scale_factor=2)
        middle = F.interpolate(self.fourth(torch.cat([coarse, middle], 1)), scale_factor=2)
        return F.pixel_shuffle(self.head(self.fifth(torch.cat([middle, fine], 1))), 2)


def draw(folder: Path, images: Tensor, labels: Tensor, count: int, seed: int, classes: tuple[str, ...]) -> None:
    """Write `count` scenes of one to four garments, of which no image is in two."""
    rng, noise = random.Random(seed), np.random.default_rng(seed)
    order = rng.sample(range(len(images)), len(images))
    listed: list[dict[str, Any]] = []
    objects: list[dict[str, Any]] = []
    for kind in ("images", "masks"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    for number in range(count):
        colour = colorsys.hsv_to_rgb(rng.random(), rng.uniform(0.4, 1), rng.uniform(60, 200))
        canvas = noise.normal(colour, 8, (SIDE, SIDE, 3)).clip(0, 255).astype(np.uint8)
        mask, taken = np.zeros((SIDE, SIDE), np.uint8), np.zeros((SIDE, SIDE), bool)
        for _ in range(rng.randint(1, 4)):
            index, size = order.pop(), rng.randint(20, 28)
            garment = np.asarray(
                Image.fromarray(images[index, 0].numpy()).resize((size, size), Image.Resampling.BILINEAR)
            )
            rows, columns = (np.flatnonzero((garment > DARK).any(axis)) for axis in (1, 0))
            garment = garment[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
            height, width = garment.shape
            for _ in range(20):
                y, x = rng.randint(0, SIDE - height), rng.randint(0, SIDE - width)
                place = np.s_[y : y + height, x : x + width]
                if taken[place].mean() < OVERLAP:
                    break
            else:
                continue
            shown, label = garment > DARK, int(labels[index])
            canvas[place][shown], mask[place][shown], taken[place] = garment[shown, None], KIND_OF[label], True
            entry = {"id": len(objects) + 1, "image_id": number, "category_id": label + 1, "iscrowd": 0}
            objects.append({**entry, "bbox": [x, y, width, height], "area": int(shown.sum())})
        name = f"{number:05}.png"
        Image.fromarray(canvas).save(folder / "images" / name)
        Image.fromarray(mask).save(folder / "masks" / name)
        listed.append({"id": number, "file_name": name, "width": SIDE, "height": SIDE})
    kinds = [{**each, "category_id": KIND_OF[each["category_id"] - 1]} for each in objects]
    for name, names, listing in (("", KINDS[1:], kinds), ("_ten", classes, objects)):
        categories = [{"id": place, "name": each} for place, each in enumerate(names, 1)]
        contents = {"images": listed, "annotations": listing, "categories": categories}
        Path(f"{folder}{name}.json").write_text(json.dumps(contents))


def trained(folder: Path, words: list[str]) -> dict[str, float]:
    """Results of a run on the scenes of test images."""
    common = [
        f"data.root={folder}",
        f"output_root={folder}/runs",
        "optimizer=adamw",
        "data.num_workers=0",
        "logger=none",
    ]
    command = [sys.executable, "-m", "runner", "train", f"--config-dir={HERE}/scenes_conf", *words, *common]
    print(shlex.join(["python", *command[1:]]), flush=True)
    paths = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    directory = Path(done.stdout.strip().splitlines()[-1])
    results: dict[str, float] = json.loads((directory / "summary.json").read_text())["test"]
    return results


def main() -> int:
    """Run everything; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where scenes and runs are written")
    parser.add_argument("--data-root", default="data", help="folder that holds FashionMNIST/raw")
    parser.add_argument("--only", choices=list(RUNS), help="one of the tasks")
    parser.add_argument("words", nargs="*", help="overrides of the runs")
    options = parser.parse_intermixed_args()
    folder = options.folder.resolve()
    if not (folder / "classes.txt").is_file():
        source = fashion_mnist(options.data_root, download=False)
        kept, classes = source["train"], source["train"].classes
        parts = [("train", kept.images[5000:], kept.targets[5000:], 8000)]
        parts += [("val", kept.images[:5000], kept.targets[:5000], 200)]
        parts += [("test", source["test"].images, source["test"].targets, 1000)]
        for seed, (split, images, labels, count) in enumerate(parts):
            draw(folder / split, images, labels, count, seed, classes)
        (folder / "classes.txt").write_text("\n".join(KINDS))
    low = False
    splits = ("train", "val", "test")
    files = [f"data.dataset.{each}_{key}={each}{end}" for each in splits for key, end in ENDS]
    for name in [options.only] if options.only else RUNS:
        words, metric = RUNS[name]
        words = [*words, *(files if name == "detection" else [])]
        results = trained(folder, [*words, "transform=none", "data.batch_size=16", *options.words])
        print(f"{name}: {metric} {results[metric]:.4f} of {results}", flush=True)
        low |= results[metric] < BAR
    return int(low)


if __name__ == "__main__":
    sys.exit(main())
