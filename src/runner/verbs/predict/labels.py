"""Predictions as labels: a data set in the pixels of the files, which `data=coco`, `yolo` or `segmentation_folder` reads."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from torch.nn.functional import pad

from runner.base.errors import UserError
from runner.base.files import write_atomically, writing
from runner.config.schema.verbs import Predict
from runner.data.samples import SampleTransform, SeededDataset
from runner.data.sources.detection import labels_of
from runner.data.sources.image_io import upright_size
from runner.verbs.predict.rows import Row, encodable, write_picture


@dataclass
class Labels:
    """Makes labels of what a task gives for a sample, and writes them as `config.format`.

    Raises `UserError` for a sample without a file, and for files that would share their labels.
    """

    config: Predict
    transforms: Sequence[SampleTransform]  # of `transform.sample_eval`
    files: Sequence[Any]  # of all samples
    classes: Sequence[str]
    ignored: int  # value of pixels of a mask that do not count

    def __post_init__(self) -> None:
        if None in self.files:
            raise UserError("input", "has samples without a file, as its data set has no path(index)", "image files")
        self._root = os.path.commonpath([os.path.abspath(f"{file}/..") for file in self.files])  # noqa: PTH100
        ((label, count),) = Counter(map(self._label, self.files)).most_common(1)
        if count > 1:
            allowed = "images whose paths differ in more than the ending"
            raise UserError("input", f"has {count} images whose labels would be {label}", allowed)

    def _label(self, file: str) -> Path:
        """Where the labels of an image are, below the folder; for COCO the link to the image."""
        link = Path("images", name := os.path.relpath(file, self._root))
        return {"coco": link, "yolo": labels_of(link)}.get(self.config.format, Path("masks", name).with_suffix(".png"))

    def of(self, index: int, seen: Tensor, row: Row) -> Row:
        """The labels of a sample, in pixels of its file, from a row in those of the image (C, H, W) that the model saw."""
        size, threshold = upright_size(row["path"], self.config.data.max_pixels), self.config.threshold
        start, factor = self._moved(index, seen, row, size)
        if "mask" in row:
            mask = pad(row["mask"], (1, 1, 1, 1), value=self.ignored)  # for what a crop has cut off
            for axis, side in enumerate(size):  # the nearest pixels
                place = (torch.arange(side) + 0.5) * factor[1 - axis] + start[1 - axis] + 1
                mask = mask.index_select(axis, place.floor().long().clamp(0, mask.shape[axis] - 1))
            return {"path": row["path"], "mask": mask}
        sides = torch.tensor([*reversed(size)] * 2)
        boxes = ((row["boxes"].double() - start) / factor).clamp(min=0).minimum(sides)
        boxes[:, 2:] -= boxes[:, :2]
        kept = (boxes[:, 2:] > 0).all(1) & (row["scores"] >= (0.5 if threshold is None else threshold))
        columns = (each[kept].tolist() for each in (boxes, row["labels"], row["scores"]))
        return {"path": row["path"], "size": size, "objects": [*zip(*columns, strict=True)]}

    def _moved(self, index: int, seen: Tensor, row: Row, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """How transforms shift and scale x, y, x and y of a sample: two boxes get them. A `UserError` if they do anything else."""
        from torchvision import tv_tensors  # takes a second, and most commands do not need it

        whole = torch.tensor([[0, 0, 1, 1], [0, 0, 0.5, 0.5]]) * torch.tensor([*reversed(size)] * 2).double()
        # Clamped boxes would not tell how far a crop shifts
        boxes: Any = tv_tensors.BoundingBoxes(whole, format="XYXY", canvas_size=size, clamping_mode=None)
        target = boxes if "mask" in row else {"boxes": boxes, "labels": torch.ones(2, dtype=torch.int64)}
        given: Any = {index: (tv_tensors.Image(torch.zeros(len(seen), *size, dtype=torch.uint8)), target)}
        ((_, target),) = SeededDataset(given, self.config.seed, self.transforms, pairs=False).items([(0, index)])
        boxes = target if "mask" in row else target["boxes"]
        if getattr(boxes, "canvas_size", None) == (*seen.shape[1:],) and len(boxes) == 2:
            start = boxes[0, [0, 1, 0, 1]]
            factor = (boxes[0, [2, 3, 2, 3]] - start) / whole[0, [2, 3, 2, 3]]
            if torch.allclose(boxes, whole * factor + start, atol=1e-3):
                return start, factor
        allowed = "transforms of torchvision.transforms.v2 that resize, pad or crop; or format=table"
        raise UserError("transform.sample_eval", f"cannot be undone for {row['path']}", allowed)

    @contextlib.contextmanager
    def open(self, folder: Path) -> Iterator[Callable[[Sequence[Row]], list[Row]]]:
        """A data set in an empty folder with links to the images, as a function that adds labels and returns what is shown."""
        if any(folder.iterdir()):
            raise UserError("output", f"{folder} is not empty", "a new folder")
        names = [*self.classes]
        coco: dict[str, Any] = {"images": [], "annotations": []}
        coco["categories"] = [{"id": number, "name": name} for number, name in enumerate(names, 1)]

        def write(rows: Sequence[Row]) -> list[Row]:
            for row in rows:
                label, name = folder / self._label(row["path"]), os.path.relpath(row["path"], self._root)
                with writing(label, "output"):
                    for each in (label, link := folder / "images" / name):
                        each.parent.mkdir(parents=True, exist_ok=True)
                    link.symlink_to(Path(row["path"]).absolute())
                if "mask" in row:
                    write_picture(row["mask"], label)
                    continue
                (height, width), number, lines = row["size"], len(coco["images"]) + 1, ""
                coco["images"].append({"id": number, "file_name": name, "width": width, "height": height})
                for (x, y, w, h), kind, score in row["objects"]:
                    lines += f"{kind - 1} {(x + w / 2) / width} {(y + h / 2) / height} {w / width} {h / height}\n"
                    entry = {
                        "id": len(coco["annotations"]) + 1,
                        "image_id": number,
                        "category_id": kind,
                        "score": score,
                    }
                    coco["annotations"].append(entry | {"bbox": [x, y, w, h], "area": w * h, "iscrowd": 0})
                if label != link:
                    with writing(label, "output"):
                        label.write_text(lines)
            return [{"path": encodable(row["path"])} for row in rows]

        yield write
        name, content = {
            "coco": ("annotations.json", json.dumps(coco)),
            "yolo": ("data.yaml", yaml.safe_dump({"train": "images", "names": names}, allow_unicode=True)),
            "masks": ("classes.txt", "\n".join(names)),
        }[self.config.format]
        write_atomically(folder / name, content.encode())
