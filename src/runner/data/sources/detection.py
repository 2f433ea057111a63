"""Images with boxes, and instance masks if there are any: COCO's JSON and YOLO's text files."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import os
import zlib
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from runner.base.errors import UserError
from runner.base.reading import LARGEST_DATA, bounded, digits, read_regular, read_text, read_yaml
from runner.config.schema.sections import Data
from runner.data.sources.annotated import Annotated, refuse_shares
from runner.data.sources.folders import ImageFolder
from runner.data.sources.image_io import Decoding, read_image
from runner.data.sources.listing import absent, check_names, existing, images_below, is_inside, unread_warnings, written

OnError = Literal["raise", "skip"]

_LARGEST = 2**28  # bytes of a label file
_SPLITS = ("train", "val", "test")


class DetectionImages(ImageFolder):
    """Image files with objects; item i is (image, target).

    The image is uint8 (3, H, W). The target is a dict of `boxes`, float32 (N, 4) as left, top, right, bottom in pixels,
    `labels`, int64 (N,) from 1 on, `iscrowd`, int64 (N,), `image_id`, int, and with `masks` of `masks`, uint8 (N, H, W).
    Image, boxes and masks are `torchvision.tv_tensors`. The first of `classes` has label 1.

    Raises:
        UserError: if an image cannot be used; with `on_error=skip` only when it is read.
    """

    def __init__(
        self,
        images: Sequence[Annotated],
        classes: Sequence[str],
        masks: bool = False,
        max_pixels: int = Data.max_pixels,
        on_error: OnError = "raise",
    ) -> None:
        if masks and importlib.util.find_spec("faster_coco_eval") is None:
            problem = "is true, which needs faster-coco-eval, which is not installed"
            raise UserError("data.dataset.masks", problem, "pip install 'runner[detection]'")
        for image in images:
            image.problem = image.problem or ((gone := absent(image.path)) and f"{gone} does not exist")
            if image.problem and on_error == "raise":
                allowed = "corrected files, or data.on_error=skip, which reads other images instead"
                raise UserError("data.dataset", image.problem, allowed)
        refuse_shares(images, "data.dataset", "numbers in pixels; data=yolo reads fractions of width and height")
        # Text instead of objects, as reading these in worker processes would copy their pages one after the other
        texts = [json.dumps({**vars(image), "path": ""}).encode() for image in images]
        self._texts, self._masks, self._bounds = b"".join(texts), masks, torch.tensor([0, *map(len, texts)]).cumsum(0)
        self.has_encodings = b'"counts"' in self._texts  # run-length encodings, which cannot be resized
        # Numbers that change with the annotations, so that other ones are known as other data
        digests = torch.tensor([zlib.crc32(text) for text in texts], dtype=torch.float64)
        super().__init__([image.path for image in images], digests, classes, Decoding(max_pixels=max_pixels))
        self.warnings: list[str] = []
        objects = ({(*box, label) for box, label in zip(each.boxes, each.labels, strict=True)} for each in images)
        if twice := [image for image, of in zip(images, objects, strict=True) if len(of) < len(image.boxes)]:
            self.warnings.append(
                f"images with two objects of one box and class: {len(twice):,}, such as {twice[0].path}"
            )

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        """Read one image; raises `UserError`, which names the file, if it or its annotations cannot be used."""
        said = self._said(index)
        return with_objects(read_image(said.path, None, 3, max_pixels=self.decoding.max_pixels), said, self._masks)

    def _said(self, index: int) -> Annotated:
        index = range(len(self))[index]
        begin, end = self._bounds[index : index + 2].tolist()
        said = Annotated(**{**json.loads(self._texts[begin:end]), "path": self.path(index)})
        if said.problem:
            raise UserError(f"{said.problem}.")
        return said

    def json_of(self, index: int, resized: bool) -> bytes:
        """The objects of item `index` as `objects_of` reads them, for an image of another size if it is `resized`."""
        said, names = self._said(index), ["image_id", "size", "boxes", "labels", "crowd", "outlines"]
        kept = {name: getattr(said, name) for name in names[: None if self._masks else -1]}
        if resized and (sides := said.size) is not None:
            share = lambda points: [number / sides[axis % 2] for axis, number in enumerate(points)]  # noqa: E731
            kept |= {"size": None, "boxes": [*map(share, said.boxes)]}
            if self._masks:
                kept["outlines"] = [[*map(share, outline)] for outline in said.outlines]
        return json.dumps(kept).encode()


def objects_of(text: bytes, place: str, number: int = 0) -> tuple[Annotated, bool]:
    """The objects of an image from JSON of `data=shards`, and whether they have outlines; `number` is its id if there is none.

    Raises `UserError`, which names `place`, if they cannot be used.
    """
    try:
        said = json.loads(text)
        size = None if said["size"] is None else (int(said["size"][0]), int(said["size"][1]))
        image = Annotated(Path(place), int(said.get("image_id", number)), size)
        count, masks = len(said["boxes"]), "outlines" in said
        others = said.get("crowd", [False] * count), said.get("outlines", [None] * count)
        for row, (box, label, crowd, outline) in enumerate(zip(said["boxes"], said["labels"], *others, strict=True)):
            right = type(label) is int and 1 <= label < 2**31 and crowd in (0, 1)
            if not right or (masks and outline is None):
                raise ValueError(f"object {row} has no label from 1 on, no outline, or no crowd of true or false")
            image.add(f"object {row}", box, label, bool(crowd), outline)
        if image.problem:
            raise ValueError(image.problem)
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError, RecursionError) as error:
        problem = f"the objects of {place} cannot be used: {reason_of(error)}"
        raise UserError("data.root", problem, "JSON with size, boxes and labels, as the documentation says") from error
    return image, masks


def with_objects(image: Tensor, said: Annotated, masks: bool) -> tuple[Tensor, Any]:
    """A sample of `DetectionImages`; raises `UserError` if the annotations do not fit the image (3, H, W)."""
    from torchvision import tv_tensors

    height, width = image.shape[1:]
    if said.size is not None and (*said.size,) != (width, height):
        stated = "x".join(map(str, said.size))
        raise UserError(f"{said.path} has {width}x{height} pixels, and its annotations say {stated}.")
    boxes = torch.tensor(said.boxes, dtype=torch.float32).reshape(-1, 4)
    if said.size is None:
        boxes *= torch.tensor([width, height, width, height])
    target: dict[str, Any] = {
        "boxes": tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=(height, width)),
        "labels": torch.tensor(said.labels, dtype=torch.int64),
        "iscrowd": torch.tensor(said.crowd, dtype=torch.int64),
        "image_id": said.image_id,
    }
    if masks:
        scale = (width, height) if said.size is None else (1, 1)
        planes = [_filled(outline, scale, height, width, said.path) for outline in said.outlines]
        target["masks"] = tv_tensors.Mask(torch.stack([torch.zeros(height, width, dtype=torch.uint8), *planes])[1:])
    return tv_tensors.Image(image), target


def _filled(outline: Any, scale: tuple[int, int], height: int, width: int, path: Path) -> Tensor:
    """The mask (H, W) of an object."""
    from faster_coco_eval.core import mask

    try:
        if isinstance(outline, dict) and [*outline["size"]] != [height, width]:  # before memory is reserved for it
            raise ValueError(f"its run-length encoding has the size {outline['size']}, and the image {[height, width]}")
        if isinstance(outline, list):
            outline = [(np.reshape(points, (-1, 2)) * scale).ravel().tolist() for points in outline]
        filled = torch.from_numpy(mask.decode(mask.segmToRle(outline, width, height))).view(height, width)
        if not filled.any():
            raise ValueError("it covers no pixel")
        return filled
    except (RuntimeError, ValueError, TypeError, LookupError) as error:
        raise UserError(f"{path} has an object whose outline cannot be used: {error}.") from error


def coco(
    root: str,
    train_images: str,
    train_annotations: str,
    val_images: str | None = None,
    val_annotations: str | None = None,
    *,
    test_images: str | None = None,
    test_annotations: str | None = None,
    masks: bool = False,
    max_pixels: int = Data.max_pixels,
    on_error: OnError = "raise",
) -> dict[str, DetectionImages]:
    """Data sets of COCO's JSON: for each split a folder of images and a file of annotations, relative to `root`.

    The classes are those of the files, in the order of their ids. For the other arguments see `DetectionImages`.

    Raises:
        UserError: if a file is missing, cut short or of another format; it names the file and the place in it.
    """
    base, made, names = existing(root), {}, dict[int, str]()
    if base.is_file():
        raise UserError("data.root", f"{base} is a file", "a folder; data=yolo takes the YAML file of a data set")
    folders, files = (train_images, val_images, test_images), (train_annotations, val_annotations, test_annotations)
    for split, folder, file in zip(_SPLITS, folders, files, strict=True):
        if file is None:
            continue
        if not (base / file).exists():
            there = sorted(str(path.relative_to(base)) for depth in ("*.json", "*/*.json") for path in base.glob(depth))
            found = f"the JSON files {', '.join(there[:5])}" if there else "no JSON file"
            words = "data.dataset.train_images=FOLDER data.dataset.val_annotations=null"
            one = f"; one file is split with data.dataset.train_annotations={there[0]} {words}" if there else ""
            allowed = f"{base} has {found}{one}"
            raise UserError(f"data.dataset.{split}_annotations", f"there is no file {base / file}", allowed)
        images, theirs, empty = _read_coco(base / file, base / (folder or ""), base, masks)
        if images and absent(images[0].path) and not (base / (folder or "")).is_dir():
            problem = f"there is no folder {base / (folder or '')}, and {base / file} names {images[0].path.name} in it"
            raise UserError(f"data.dataset.{split}_images", problem, "the folder of the images, relative to data.root")
        names = names or theirs
        check_names("data.dataset", base / file, list(theirs.values()))
        if differing := sorted(theirs.items() ^ names.items()):
            problem = f"{base / file} has other categories than {train_annotations}, such as {differing[0]}"
            raise UserError("data.dataset", problem, "the same ids and names in every file")
        made[split] = DetectionImages(images, tuple(names.values()), masks, max_pixels, on_error)
        if empty:
            made[split].warnings.append(f"{base / file}: {empty:,} boxes of zero width or height are dropped")
    return made


def _read_coco(path: Path, folder: Path, root: Path, masks: bool) -> tuple[list[Annotated], dict[int, str], int]:
    """The images with their objects, the names of the categories by id, and how many boxes were dropped as they are empty."""
    section, place, empty = "file", None, 0
    try:
        contents = json.loads(read_regular(path, LARGEST_DATA))
        names, images = dict[int, str](), dict[int, Annotated]()
        section, place = "categories", None
        for place, entry in enumerate(contents[section]):  # noqa: B007
            names[_new(entry["id"], names)] = str(entry["name"])
        section, place, labels = "images", None, {number: label for label, number in enumerate(sorted(names), 1)}
        for place, entry in enumerate(contents[section]):
            if not is_inside(entry["file_name"], folder, root):
                problem = f"{section}[{place}] of {path} names a file outside of {root}: {entry['file_name']}"
                raise UserError("data.dataset", problem, "data.root=FOLDER with a folder above all images")
            size = int(entry["width"]), int(entry["height"])
            images[_new(entry["id"], images)] = Annotated(written(folder / entry["file_name"]), int(entry["id"]), size)
        section, place = "annotations", None
        for place, entry in enumerate(contents[section]):
            (x, y, width, height), outline = entry["bbox"], entry["segmentation"] or [] if masks else None
            for name, known in (("image_id", images), ("category_id", labels)):
                if entry[name] not in known:
                    raise ValueError(f"{name} is {entry[name]!r}, and the ids are such as {next(iter(known), None)!r}")
            if width == 0 or height == 0:  # such as two of COCO's own
                empty += 1
                continue
            if (crowd := entry.get("iscrowd") or 0) not in (0, 1):
                raise ValueError(f"iscrowd is {crowd!r}, and is 0 or 1")
            box = (x, y, x + width, y + height)
            label, image = labels[entry["category_id"]], images[entry["image_id"]]
            image.add(f"{section}[{place}] of {path}", box, label, bool(crowd), outline)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UserError("data.dataset", f"{path} cannot be read: {reason}") from error
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError, RecursionError) as error:
        where = f"{section}{'' if place is None else f'[{place}]'} of {path}"
        where = where if section != "file" else f"{path}, which is not JSON or cut short,"
        problem = f"{where} cannot be used: {reason_of(error)}"
        raise UserError("data.dataset", problem, "a file of COCO's format, as docs/howto/detection.md shows") from error
    return list(images.values()), dict(sorted(names.items())), empty


def reason_of(error: Exception) -> str:
    """What is wrong with what was read from JSON."""
    return f"there is no {error}" if isinstance(error, KeyError) else str(error)


def _new(number: int, known: Container[int]) -> int:
    """An id; raises `ValueError` if it is known."""
    if number in known:
        raise ValueError(f"another one has the id {number}")
    return number


def yolo(
    root: str,
    description: str = "data.yaml",
    masks: bool = False,
    max_pixels: int = Data.max_pixels,
    on_error: OnError = "raise",
) -> dict[str, DetectionImages]:
    """Data sets of YOLO's text files: `images/train/a.jpg` has the objects of `labels/train/a.txt`, none without that file.

    A line is a class number from 0 on, and centre, width and height of a box, or the points of a polygon; all in shares of
    the sides. `description` is a YAML file with `names`, and the folders of images as `train`, `val` and `test`, relative to
    `root`. Without it, they are `images/train`, `images/val` and `images/test`, and `classes.txt` has the names. With
    `kpt_shape` in it, the numbers of key points follow a box, and are not used. `masks` makes masks of polygons.

    Raises:
        UserError: if a file is missing or a line is wrong; it names both.
    """
    base, made = existing(root), {}
    if base.is_file():  # as Ultralytics' users name it
        base, description = base.parent, base.name
    path, plain = base / description, base / "classes.txt"
    try:
        said = read_yaml(path, plain=True) if path.exists() else {}
        names = said["names"] if path.exists() else read_text(plain).rstrip().splitlines()
        # Numbers that a mapping or an empty line skips, as those of COCO do, are classes whose name is the number
        numbered = names.items() if isinstance(names, dict) else enumerate(names)
        known = {int(digits(str(place))): name for place, name in numbered}
        count = bounded(max(known) + 1, 10 * len(known) + 1000, f"numbers of classes for {len(known):,} names")
        names = tuple(str(known.get(place, "")).strip() or str(place) for place in range(count))
        points = math.prod(int(digits(each)) for each in said["kpt_shape"]) if said.get("kpt_shape") else 0
    except (OSError, LookupError, TypeError, ValueError) as error:
        what = f"neither {path} nor {plain.name} gives the names of the classes: {type(error).__name__}: {error}"
        raise UserError("data.dataset", " ".join(what.split()), "names: in the YAML file, or a name a line") from error
    check_names("data.dataset", path if path.is_file() else plain, names)
    below = functools.cache(lambda folder: {each.name.lower(): each for each in folder.glob("*")})
    for split in _SPLITS:
        # Paths of Roboflow begin with ../, and mean the folder of the description
        name = str(said.get(split) or f"images/{split}").removeprefix("../")
        folder = base / name
        if not is_inside(name, base):
            problem = f"'{split}' of {path} is a folder outside of {base}: {name}"
            raise UserError("data.dataset", problem, "data.root=FOLDER with a folder above all images")
        if folder.is_dir():
            files = sorted(images_below(folder, unread := list[Path]()))
            images = [Annotated(file, number, None) for number, file in enumerate(files)]
            for image in images:
                text = image.path.with_suffix(".txt")  # beside the image where there is no folder `images`
                head, found, tail = f"/{text.as_posix()}".rpartition("/images/")
                text = written(Path(f"{head}/labels/{tail}"[1:]) if found else text)
                image.problem = _add_lines(image, text, len(names), masks, points)
                if not os.path.lexists(text) and (other := below(text.parent).get(text.name.lower())):
                    image.problem = f"{other} must be named {text.name}, as its image is {image.path.name}"
            if images and not any(image.boxes or image.problem for image in images):
                where = f"that of the last one would be in {text}"
                where = where if text.parent.is_dir() else f"there is no folder {text.parent}"
                allowed = "text files there, or another data.dataset.description"
                raise UserError("data.dataset", f"no image of '{split}' has an object: {where}", allowed)
            made[split] = DetectionImages(images, names, masks, max_pixels, on_error)
            made[split].warnings = [*made[split].warnings, *unread_warnings(folder, len(unread))]
        elif split == "train" or said.get(split):
            problem = f"the images of '{split}', {folder}, are not a folder"
            raise UserError("data.dataset", problem, "a folder of images")
    return made


def _add_lines(image: Annotated, path: Path, classes: int, masks: bool, points: int) -> str:
    """Add the objects of a file, with `points` numbers of key points each; returns what is wrong with it, or nothing."""
    try:
        content = read_regular(path, _LARGEST) if os.path.lexists(path) else b""
    except OSError as error:
        return f"{path} cannot be read: {(error.strerror or str(error)).lower()}"
    for line, text in enumerate(content.decode("utf-8-sig", "replace").splitlines(), 1):
        if not text.strip():
            continue
        place = f"line {line} of {path}"
        try:
            label, *numbers = map(float, digits(text).split())
            if points and len(numbers) != 4 + points:
                return f"{place} is not a class number, a box and the {points} numbers of kpt_shape: {text[:60]}"
            outline = np.array(numbers[: 4 if points else None]).reshape(-1, 2)
        except ValueError:
            return f"{place} is not a class number and pairs of numbers: {text[:60]}"
        if label not in range(classes):
            return f"{place} has class {label:g}, but the classes are 0 to {classes - 1}"
        if len(outline) < (3 if masks else 2):
            return f"{place} has no {'polygon, which data.dataset.masks=true needs' if masks else 'box'}: {text[:60]}"
        low, high = outline.min(0), outline.max(0)
        if len(outline) == 2:  # which of a negative side are the wrong way round
            low, high = outline[0] - outline[1] / 2, outline[0] + outline[1] / 2
        image.add(place, [*low.tolist(), *high.tolist()], int(label) + 1, outline=[numbers] if masks else None)
    return image.problem
