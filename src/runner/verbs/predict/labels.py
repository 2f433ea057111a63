"""Predictions as labels: a data set in the pixels of the files, which `data=coco`, `yolo` or `segmentation_folder` reads."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from PIL import Image
from torch import Tensor

from runner.base.errors import UserError
from runner.base.files import write_atomically, writing
from runner.config.schema.verbs import Predict
from runner.data.samples import SampleTransform, SeededDataset
from runner.data.sources.detection import labels_of
from runner.data.sources.image_io import upright_size
from runner.verbs.predict.rows import PALETTE, Row


@dataclass
class Labels:
    """Makes labels of what a task gives for a sample, and writes them as `config.format`."""

    config: Predict
    transforms: Sequence[SampleTransform]  # of `transform.sample_eval`
    classes: Sequence[str]
    ignored: int  # value of pixels of a mask that do not count

    def of(self, index: int, seen: Tensor, row: Row) -> Row:
        """The labels of a sample, in pixels of its file, from a row in those of the image (C, H, W) that the model saw.

        Two boxes get the transforms of the sample, and tell how these scale and shift. Raises `UserError` if they do anything
        else, such as a flip.
        """
        from torchvision import tv_tensors  # takes a second, and most commands do not need it

        size, masks = upright_size(row["path"], self.config.data.max_pixels), self.config.format == "masks"
        sides = torch.tensor([*reversed(size)] * 2, dtype=torch.float64)
        whole = torch.tensor([[0, 0, 1, 1], [0, 0, 0.5, 0.5]]) * sides
        # Clamped boxes would not tell how far a crop shifts
        probe: Any = tv_tensors.BoundingBoxes(whole, format="XYXY", canvas_size=size, clamping_mode=None)
        target = probe if masks else {"boxes": probe, "labels": torch.ones(2, dtype=torch.int64)}
        given: Any = {index: (tv_tensors.Image(torch.zeros(len(seen), *size, dtype=torch.uint8)), target)}
        ((_, target),) = SeededDataset(given, self.config.seed, self.transforms, pairs=False).items([(0, index)])
        probe = target if masks else target["boxes"]
        start, factor = probe[:1, :2].repeat(1, 2), (probe[:1, 2:] - probe[:1, :2]).repeat(1, 2) / sides
        fits = getattr(probe, "canvas_size", None) == (*seen.shape[1:],) and len(probe) == 2
        if not fits or not torch.allclose(probe, whole * factor + start, atol=1e-3):
            allowed = "transforms of torchvision.transforms.v2 that resize, pad or crop; or format=table"
            raise UserError("transform.sample_eval", f"cannot be undone for {row['path']}", allowed)
        if not masks:
            boxes = ((row["boxes"].double() - start) / factor).clamp(min=0).minimum(sides)
            boxes[:, 2:] -= boxes[:, :2]
            kept = (boxes[:, 2:] > 0).all(1) & (row["scores"] >= self.config.threshold)
            columns = (each[kept].tolist() for each in (boxes, row["labels"], row["scores"]))
            return {"path": row["path"], "size": size, "objects": [*zip(*columns, strict=True)]}
        mask, png = row["mask"], io.BytesIO()
        for axis, side in enumerate(size):  # the nearest pixels
            place = ((torch.arange(side) + 0.5) * factor[0, 1 - axis] + start[0, 1 - axis]).floor().long()
            cut_off = ((place < 0) | (place >= mask.shape[axis])).nonzero()[:, 0]
            mask = mask.index_select(axis, place.clamp(0, mask.shape[axis] - 1)).index_fill(axis, cut_off, self.ignored)
        image = Image.fromarray(mask.numpy())
        image.putpalette(PALETTE)
        image.save(png, "png")
        return {"path": row["path"], "size": size, "objects": [], "png": png.getvalue()}

    @contextlib.contextmanager
    def open(self, folder: Path, paths: Sequence[Any]) -> Iterator[Callable[[Sequence[Row]], list[Row]]]:
        """A data set in an empty folder, as a function that adds labels and returns what is shown of them.

        `paths` are the files of all images, to which `images/` gets links, so that the folder can be read as it is.
        """
        if None in paths:
            raise UserError(
                "input", "is a split without path(index), and labels have the names of files", "image files"
            )
        if any(folder.iterdir()):
            raise UserError("output", f"{folder} is not empty", "a new folder")
        root = os.path.commonpath([Path(os.path.abspath(path)).parent for path in paths])  # noqa: PTH100
        images, found, names = list[Row](), list[Row](), [*self.classes]

        def write(rows: Sequence[Row]) -> list[Row]:
            for row in rows:
                path, (height, width), lines = Path(os.path.abspath(row["path"])), row["size"], ""  # noqa: PTH100
                name = path.relative_to(root)
                link, png = folder / "images" / name, folder / "masks" / name.with_suffix(".png")
                label = {"coco": link, "yolo": labels_of(link), "masks": png}[self.config.format]
                images.append({"id": len(images) + 1, "file_name": str(name), "width": width, "height": height})
                for (x, y, w, h), number, score in row["objects"]:
                    lines += f"{number - 1} {(x + w / 2) / width} {(y + h / 2) / height} {w / width} {h / height}\n"
                    entry = {"id": len(found) + 1, "image_id": len(images), "category_id": number, "bbox": [x, y, w, h]}
                    found.append(entry | {"area": w * h, "iscrowd": 0, "score": score})
                with writing(label, "output", "images whose paths differ in more than the ending"):
                    for each in (link, label):
                        each.parent.mkdir(parents=True, exist_ok=True)
                    link.symlink_to(path)
                    if label != link:
                        with label.open("xb") as file:
                            file.write(row.get("png", lines.encode()))
            return [{"path": row["path"]} for row in rows]

        yield write
        categories = [{"id": number, "name": name} for number, name in enumerate(names, 1)]
        coco = {"images": images, "annotations": found, "categories": categories}
        name, content = {
            "coco": ("annotations.json", json.dumps(coco)),
            "yolo": ("data.yaml", yaml.safe_dump({"train": "images", "names": names}, allow_unicode=True)),
            "masks": ("classes.txt", "\n".join(names)),
        }[self.config.format]
        write_atomically(folder / name, content.encode())
