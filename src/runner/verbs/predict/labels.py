"""Predictions in the pixels of the files, with pictures; as labels, for `data=coco`, `yolo` or `segmentation_folder`."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image
from torch import Tensor
from torch.nn.functional import pad

from runner.base.errors import UserError
from runner.base.files import write_atomically, writing
from runner.config.schema.verbs import Predict
from runner.data.samples import SampleTransform, SeededDataset
from runner.data.sources.detection import labels_of
from runner.data.sources.image_io import Decoding, upright_size
from runner.instrument.nested import tensors_moved
from runner.run.evaluation import drawn, pixels_of
from runner.tasks.detection import run_lengths
from runner.tracking.plots import Tile, image_grid
from runner.verbs.predict.rows import Row, encodable


@dataclass
class FilePixels:
    """Brings what a task finds in an image to the pixels of its file, and completes the pictures."""

    config: Predict
    transforms: Sequence[SampleTransform]  # of `transform.sample_eval`
    classes: Sequence[str]
    task: Any
    problem: str = ""  # why rows of a table are left in the pixels that the model saw

    def of(self, place: int, index: int, data: Any, row: Row) -> Row:
        """The row of sample `index`, at a `place` in the data of its batch, in the pixels of its file.

        `mask` (H, W), `boxes` (N, 4) and `masks` (N, H, W) refer to the image (C, H, W) that the model saw; `masks` become run
        lengths. A `picture`, and one of the `truth`, are drawn over the image of the file, unless it has the same pixels. Raises
        `UserError` if transforms do anything but scale and shift, such as a flip, unless a table is written.
        """
        formats, as_table = getattr(self.task, "formats", ()), self.config.format == "table"
        if "path" in row and formats:
            field = (self.config.data.images or ["0"])[0]
            target = tensors_moved(data[1][place], "cpu") if "truth" in row else None
            try:
                row = self._moved(index, data[field if isinstance(data, Mapping) else int(field)][place], row, target)
            except UserError as error:
                if not as_table:
                    raise
                self.problem = self.problem or error.problems[0].lines()[0]
        if "coco" in formats and isinstance(row.get("masks"), Tensor):
            row["masks"] = [each | {"counts": each["counts"].decode()} for each in run_lengths(row["masks"])]
        return row | self._page(row) if "picture" in row and as_table else row

    def _moved(self, index: int, seen: Tensor, row: Row, target: Any) -> Row:
        """Two boxes get the transforms of the sample, and tell how these scale and shift."""
        from torchvision import tv_tensors  # takes a second, and most commands do not need it
        from torchvision.transforms.v2.functional import to_dtype

        data, of_pixels = self.config.data, "mask" in row
        size = upright_size(row["path"], data.max_pixels)
        sides = torch.tensor([*reversed(size)] * 2).double()
        whole = torch.tensor([[0, 0, 1, 1], [0, 0, 0.5, 0.5]]) * sides
        # Clamped boxes would not tell how far a crop shifts
        probe: Any = tv_tensors.BoundingBoxes(whole, format="XYXY", canvas_size=size, clamping_mode=None)
        given: Any = probe if of_pixels else {"boxes": probe, "labels": torch.ones(2, dtype=torch.int64)}
        given = {index: (tv_tensors.Image(torch.zeros(len(seen), *size, dtype=torch.uint8)), given)}
        ((_, given),) = SeededDataset(given, self.config.seed, self.transforms, pairs=False).items([(0, index)])
        probe = given if of_pixels else given["boxes"]
        start, end = probe[:1, [0, 1, 0, 1]], probe[:1, [2, 3, 2, 3]]
        factor = (end - start) / sides
        fits = getattr(probe, "canvas_size", None) == (*seen.shape[1:],) and len(probe) == 2
        if not fits or not torch.allclose(probe, whole * factor + start, atol=1e-3):
            allowed = "transforms of torchvision.transforms.v2 that resize, pad or crop; or format=table"
            raise UserError("transform.sample_eval", f"cannot be undone for {row['path']}", allowed)
        if torch.equal(probe, whole) and size == (*seen.shape[1:],):
            return row

        def moved(values: Mapping[str, Any]) -> Row:
            made = {name: each for name, each in values.items() if isinstance(each, Tensor)}
            for name in {"mask", "masks"} & made.keys():
                fill = getattr(self.task, "ignore_index", 255) if name == "mask" else 0
                mask = pad(made[name], (1, 1, 1, 1), value=fill)  # for what a crop has cut off
                for axis, side in enumerate(size, -2):  # the nearest pixels
                    place = (torch.arange(side) + 0.5) * factor[0, axis + 1] + start[0, axis + 1] + 1
                    mask = mask.index_select(axis, place.floor().long().clamp(0, mask.shape[axis] - 1))
                made[name] = mask
            if "boxes" in made:
                made["boxes"] = ((made["boxes"].double() - start) / factor).clamp(min=0).minimum(sides)
            return {**values, **made}

        made = moved(row)
        if "picture" in row:
            image = Decoding(None, data.dataset.get("channels", 3), max_pixels=data.max_pixels).read(row["path"])
            image = to_dtype(image, torch.uint8, scale=True)[: 3 if len(image) > 2 else 1].expand(3, -1, -1)
            shown = {"picture": made} | ({"truth": moved(self.task.shown(target))} if "truth" in row else {})
            made |= {name: drawn(self.task, (image[None], 0), each, self.classes) for name, each in shown.items()}
        return made

    def _page(self, row: Row) -> Row:
        """A `page` for a row that had a `truth`, or a task with a legend: truth and prediction beside each other."""
        truth, found = row.pop("truth", None), row["picture"]
        legend = [*self.task.legend(self.classes).items()] if hasattr(self.task, "legend") else []
        if truth is None and not legend:
            return {}
        pictures = pixels_of([found] if truth is None else [truth, found])
        tiles, file = [*map(Tile, pictures, (["truth"], ["prediction"])[-len(pictures) :])], io.BytesIO()
        image_grid(tiles, file, Path(row.get("path", "")).name, legend=legend)
        return {"page": torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1)}


@dataclass
class Labels:
    """Makes labels of what a task gives for a sample, and writes them as `config.format`.

    Raises `UserError` for a sample without a file, and for files that would share their labels.
    """

    config: Predict
    files: Sequence[Any]  # of all samples
    classes: Sequence[str]
    pixels: FilePixels

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

    def of(self, place: int, index: int, data: Any, row: Row) -> Row:
        """The labels of a sample, for which see `FilePixels.of`."""
        size, of_pixels = upright_size(row["path"], self.config.data.max_pixels), self.config.format == "masks"
        made_of = [row.get(name) for name in (["mask"] if of_pixels else ["boxes", "labels", "scores"])]
        if not all(isinstance(each, Tensor) and (each.dtype == torch.uint8 or not of_pixels) for each in made_of):
            needed = "mask, uint8 (B, H, W)" if of_pixels else "boxes, labels and scores, each a list of tensors"
            names = sorted(row.keys() - {"path", "sample", "picture"})
            raise UserError("task", f"its predict_step gives {', '.join(names)}", f"{needed}; or format=table")
        row, made = self.pixels.of(place, index, data, row), {"path": row["path"], "size": size, "objects": []}
        if of_pixels:
            return made | {name: row[name] for name in ("mask", "picture") if name in row}
        boxes = row["boxes"].double().clamp(min=0).minimum(torch.tensor([*reversed(size)] * 2).double())
        boxes[:, 2:] -= boxes[:, :2]
        least = 0.5 if self.config.threshold is None else self.config.threshold
        kept = (boxes[:, 2:] > 0).all(1) & (row["scores"] >= least)
        columns = [each.tolist() for each in (boxes, row["labels"], row["scores"])]
        found = [*zip(*columns, row.get("masks") or [None] * len(boxes), strict=True)]
        return made | {"objects": [each for each, wanted in zip(found, kept.tolist(), strict=True) if wanted]}

    @contextlib.contextmanager
    def open(self, folder: Path) -> Iterator[Callable[[Sequence[Row]], list[Row]]]:
        """A data set in an empty folder with links to the images, as a function that adds labels and returns what is shown."""
        if any(folder.iterdir()):
            raise UserError("output", f"{folder} is not empty", "a new folder")
        images, found, names = list[Row](), list[Row](), [*self.classes]

        def write(rows: Sequence[Row]) -> list[Row]:
            for row in rows:
                (height, width), lines, name = row["size"], "", os.path.relpath(row["path"], self._root)
                images.append({"id": len(images) + 1, "file_name": name, "width": width, "height": height})
                for (x, y, w, h), number, score, outline in row["objects"]:
                    lines += f"{number - 1} {(x + w / 2) / width} {(y + h / 2) / height} {w / width} {h / height}\n"
                    entry = {"id": len(found) + 1, "image_id": len(images), "category_id": number, "bbox": [x, y, w, h]}
                    entry |= {"area": w * h, "iscrowd": 0, "score": score}
                    if outline is not None:
                        from faster_coco_eval.core.mask import area  # of an extra, which a task with masks needs

                        entry |= {"segmentation": outline, "area": int(area(outline))}
                    if entry["area"]:  # not a mask without a pixel
                        found.append(entry)
                label = folder / self._label(row["path"])
                with writing(label, "output"):
                    for each in (label, link := folder / "images" / name):
                        each.parent.mkdir(parents=True, exist_ok=True)
                    link.symlink_to(Path(row["path"]).absolute())
                    if "mask" in row:  # not of other formats, where a label may be the link to the image
                        Image.fromarray(row["mask"].numpy()).save(label)
                    elif label != link:
                        label.write_text(lines)
                    if "picture" in row:
                        picture = folder / "pictures" / label.relative_to(folder / "masks")
                        picture.parent.mkdir(parents=True, exist_ok=True)
                        Image.fromarray(row["picture"].permute(1, 2, 0).numpy()).save(picture)
            counts = [{} if "mask" in row else {"boxes": len(row["objects"])} for row in rows]
            return [{"path": encodable(row["path"]), **count} for row, count in zip(rows, counts, strict=True)]

        yield write
        coco = {"images": images, "annotations": found}
        coco["categories"] = [{"id": number, "name": name} for number, name in enumerate(names, 1)]
        name, content = {
            "coco": ("annotations.json", json.dumps(coco)),
            "yolo": ("data.yaml", yaml.safe_dump({"train": "images", "names": names}, allow_unicode=True)),
            "masks": ("classes.txt", "\n".join(names)),
        }[self.config.format]
        write_atomically(folder / name, content.encode())
