"""Do detection and segmentation learn? Both train on scenes of garments of Fashion-MNIST, or overfit photographs.

    python scripts/scenes.py FOLDER --data-root path/to/data
    python scripts/scenes.py FOLDER --data-root path/to/data --compare budget=12m
    python scripts/scenes.py FOLDER --coco128 COCO128

draws scenes into FOLDER, as COCO's JSON, images and masks, and trains a small FCOS and a small U-Net on them. A scene has one to
four grey garments on a background with a colour and noise; at most a tenth of a garment's box lies in those drawn before it. The
classes are four kinds, as shirts, coats and pullovers are hard to tell apart; `*_ten.json` has the ten classes. Test scenes are
drawn from test images. With --compare, RT-DETRv2 and Faster R-CNN train on them from random weights. COCO128 has the data of
https://github.com/lightly-ai/coco128_yolo, of which all images, or 32 for segmentation, are both the training and the test images
of models with random weights.
Exit status 1 if the mean average precision at IoU 0.5, or the mean IoU, is below 0.9, or 0.5 for photographs.
"""

from __future__ import annotations

import argparse
import colorsys
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models.detection import FCOS
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.fcos import FCOSHead

from runner.data.sources.torchvision_sets import fashion_mnist

HERE = Path(__file__).resolve().parent
SIDE = 64  # of a scene, in pixels
PHOTOGRAPH = 192  # longest side of a photograph, in pixels
DARK = 15  # grey level up to which a pixel of Fashion-MNIST is background
OVERLAP = 0.1  # share of a box that may lie in earlier ones
KINDS = ["background", "top or dress", "trouser", "shoe", "bag"]
KIND_OF = [1, 2, 1, 1, 1, 3, 1, 3, 4, 3]  # of each of the ten classes
ENDS = (("images", "/images"), ("annotations", ".json"))
METRICS = {"detection": "map_50", "segmentation": "miou"}
SCENES = {
    "detection": [
        "experiment=detection_torchvision",
        "transform=detection_ssd",
        "model=fcos",
        "optimizer.lr=0.002",
        "epochs=2",
    ],
    "segmentation": ["experiment=segmentation", "model=unet", "optimizer.lr=0.005", "epochs=4"],
}
COMPARED = {  # each with 128 pixels and as few candidates as scenes need
    "rtdetr": [
        "experiment=detection", "scheduler=onecycle", "scheduler.warmup=0.1", "transform.close_epochs=0",
        "model.size=128", "model.options.num_queries=50", "model.options.num_denoising=20",
        "+model.options.initializer_bias_prior_prob=0.01", "optimizer.lr=0.0005", "optimizer.lr_mult=null",
    ],
    "faster_rcnn": [
        "experiment=detection_torchvision", "model.name=fasterrcnn_mobilenet_v3_large_320_fpn", "optimizer.lr=0.001",
        "model.options={min_size: 128, max_size: 128, box_batch_size_per_image: 64, rpn_pre_nms_top_n_train: 500,"
        "rpn_post_nms_top_n_train: 200}",
    ],
}  # fmt: skip
PHOTOGRAPHS = {
    "detection": [
        "experiment=detection_torchvision",
        "transform=detection_ssd",
        "data=yolo",
        "model=fcos",
        f"model.side={PHOTOGRAPH}",
        "epochs=60",
    ],
    "segmentation": ["experiment=segmentation", "model=unet", "model.width=32", "data.image_size=64", "epochs=120"],
}
OVERFITTING = (
    "data.batch_size=4", "optimizer.lr=0.003", "evaluate.every_epochs=20",
    "transform.sample_train=${transform.sample_eval}",
)  # fmt: skip


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
        nn.init.constant_(self.head.regression_head.bbox_reg.bias, 2)  # at 0, the ReLU behind it may stay 0


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


def copy_photographs(folder: Path, out: Path) -> None:
    """Copy photographs: all, small, with boxes in YOLO's format, and the first 32 that have masks, with these."""
    boxes, semantic = folder / "object_detection", folder / "semantic_segmentation"
    splits, photographs = ("train", "val", "test"), folder / "images" / "train2017"
    shutil.copytree(boxes / "labels" / "train2017", out / "labels")
    (out / "images").mkdir()
    for file in photographs.iterdir():
        small = ImageOps.contain(Image.open(file).convert("RGB"), (PHOTOGRAPH, PHOTOGRAPH), Image.Resampling.BILINEAR)
        small.save(out / "images" / file.name, quality=95)
    masks = sorted((semantic / "masks" / "train2017").iterdir())[:32]
    for split in splits:
        for kind, files in (("images", [photographs / f"{mask.stem}.jpg" for mask in masks]), ("masks", masks)):
            (out / split / kind).mkdir(parents=True)
            for file in files:
                shutil.copy(file, out / split / kind)
    names = yaml.safe_load((boxes / "config.yaml").read_text())["names"]
    (out / "data.yaml").write_text(yaml.safe_dump({"names": names, **dict.fromkeys(splits, "images")}))
    classes = yaml.safe_load((semantic / "config.yaml").read_text())["classes"]
    shown = sorted({int(value) for mask in masks for value in np.unique(np.asarray(Image.open(mask)))})
    (out / "classes.txt").write_text("\n".join(classes[value] for value in shown))
    (out / "values.txt").write_text(",".join(map(str, shown)))


def draw_scenes(folder: Path, data_root: str) -> None:
    """Draw the scenes of all splits."""
    source = fashion_mnist(data_root, download=False)
    kept, classes = source["train"], source["train"].classes
    parts = [("train", kept.images[5000:], kept.targets[5000:], 8000)]
    parts += [("val", kept.images[:5000], kept.targets[:5000], 200)]
    parts += [("test", source["test"].images, source["test"].targets, 1000)]
    for seed, (split, images, labels, count) in enumerate(parts):
        draw(folder / split, images, labels, count, seed, classes)
    (folder / "classes.txt").write_text("\n".join(KINDS))


def main() -> int:
    """Run everything; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where images and runs are written")
    parser.add_argument("--data-root", default="data", help="folder that holds FashionMNIST/raw")
    parser.add_argument("--coco128", type=Path, help="folder with photographs, instead of scenes")
    parser.add_argument("--compare", action="store_true", help="two detectors on scenes, instead of the tasks")
    parser.add_argument("--only", choices=[*METRICS, *COMPARED], help="one of the tasks, or detectors")
    parser.add_argument("words", nargs="*", help="overrides of the runs")
    options = parser.parse_intermixed_args()
    folder, photographs = options.folder.resolve(), options.coco128 is not None
    if not (folder / "classes.txt").is_file():
        if photographs:
            copy_photographs(options.coco128, folder)
        else:
            draw_scenes(folder, options.data_root)
    low = False
    for name in [options.only] if options.only else COMPARED if options.compare else METRICS:
        metric = METRICS.get(name, "map_50")
        if photographs:
            words = [*PHOTOGRAPHS[name], *OVERFITTING]
            if name == "segmentation":
                words.append(f"data.dataset.values=[{(folder / 'values.txt').read_text()}]")
        else:
            words = [*(SCENES | COMPARED)[name], "transform=none", f"data.batch_size={8 if name in COMPARED else 16}"]
            if name != "segmentation":
                places = [(split, *end) for split in ("train", "val", "test") for end in ENDS]
                words += [f"data.dataset.{split}_{key}={split}{end}" for split, key, end in places]
        results = trained(folder, [*words, *options.words])
        print(f"{name}: {metric} {results[metric]:.4f} of {results}", flush=True)
        low |= name in METRICS and results[metric] < (0.5 if photographs else 0.9)
    return int(low)


if __name__ == "__main__":
    sys.exit(main())
