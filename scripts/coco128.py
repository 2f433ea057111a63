"""Do detection and segmentation overfit? 32 photographs of COCO128, on which both are trained and evaluated.

    python scripts/coco128.py FOLDER OUT

FOLDER has the data of https://github.com/lightly-ai/coco128_yolo, OUT gets 32 images of them and the runs. The models are those of
`scripts/scenes.py` with random weights. Exit status 1 if the mean average precision at IoU 0.5, or the mean IoU, is below 0.5.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import numpy as np
import yaml
from PIL import Image

from scenes import trained

COUNT, BAR = 32, 0.5
RUNS = {
    "detection": (["experiment=detection", "data=yolo", "model=fcos", "model.side=128", "epochs=80"], "map_50"),
    "segmentation": (
        ["experiment=segmentation", "model=unet", "model.width=32", "data.image_size=64", "epochs=120"],
        "miou",
    ),
}
STEPS = [
    "data.batch_size=4",
    "optimizer.lr=0.003",
    "evaluate.every_epochs=20",
    "transform.sample_train=${transform.sample_eval}",
]


def prepare(folder: Path, out: Path) -> None:
    """Copy the first images that have masks, with boxes in YOLO's format, as data for both tasks."""
    boxes, semantic = folder / "object_detection", folder / "semantic_segmentation"
    masks = sorted((semantic / "masks" / "train2017").iterdir())[:COUNT]
    for split in ("train", "val", "test"):
        places = [out / split / kind for kind in ("images", "masks", "labels")]
        for place in places:
            place.mkdir(parents=True)
        for mask in masks:
            photograph = folder / "images" / "train2017" / f"{mask.stem}.jpg"
            label = boxes / "labels" / "train2017" / f"{mask.stem}.txt"
            for file, place in zip((photograph, mask, label), places, strict=True):
                shutil.copy(file, place)
    names = yaml.safe_load((boxes / "config.yaml").read_text())["names"]
    splits = {split: f"{split}/images" for split in ("train", "val", "test")}
    (out / "data.yaml").write_text(yaml.safe_dump({"names": names, **splits}))
    classes = yaml.safe_load((semantic / "config.yaml").read_text())["classes"]
    shown = sorted({int(value) for mask in masks for value in np.unique(np.asarray(Image.open(mask)))})
    (out / "classes.txt").write_text("\n".join(classes[value] for value in shown))
    (out / "values.txt").write_text(",".join(map(str, shown)))


def main() -> int:
    """Run everything; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the data")
    parser.add_argument("out", type=Path, help="where images and runs are written")
    parser.add_argument("--only", choices=list(RUNS), help="one of the tasks")
    parser.add_argument("words", nargs="*", help="more overrides of the runs")
    options = parser.parse_intermixed_args()
    out = options.out.resolve()
    if not out.is_dir():
        prepare(options.folder, out)
    values = f"data.dataset.values=[{(out / 'values.txt').read_text()}]"
    low = False
    for name in [options.only] if options.only else RUNS:
        words, metric = RUNS[name]
        results = trained(out, [*words, *([values] if name == "segmentation" else []), *STEPS, *options.words])
        print(f"{name}: {metric} {results[metric]:.4f} of {results}", flush=True)
        low |= results[metric] < BAR
    return int(low)


if __name__ == "__main__":
    sys.exit(main())
