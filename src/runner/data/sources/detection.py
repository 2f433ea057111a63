"""Images with boxes, and instance masks if there are any: COCO's JSON and YOLO's text files, with the same checks."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import zlib
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from runner.base.errors import UserError, require
from runner.base.reading import LARGEST_DATA, bounded, digits, read_regular, read_text, read_yaml
from runner.config.schema.sections import Data
from runner.data.bad_samples import Place
from runner.data.sources import listing
from runner.data.sources.bands import Channels
from runner.data.sources.folders import ImageFolder
from runner.data.sources.image_io import Decoding

OnError = Literal["raise", "skip"]

_LARGEST = 2**28  # bytes of a label file
_OUTSIDE = 0.01  # of a side, by which a box may lie outside of the image, as annotation tools round; it is cut off
_SPLITS = ("train", "val", "test")


@dataclass
class Annotated:
    """An image file and its objects, while the annotations are read; lists have an item for each object."""

    path: Path
    image_id: int
    size: tuple[int, int] | None  # width and height in pixels that boxes refer to; None for fractions of them
    problem: str = ""  # why it cannot be used
    boxes: list[list[float]] = field(default_factory=list)  # left, top, right, bottom
    labels: list[int] = field(default_factory=list)  # 1 to the number of classes
    crowd: list[bool] = field(default_factory=list)  # whether a box is around many objects, which are not told apart
    outlines: list[Any] = field(default_factory=list)  # polygons or a run-length encoding, if masks are read

    def __post_init__(self) -> None:
        if not -(2**63) <= self.image_id < 2**63:
            raise ValueError(f"the id {self.image_id} has more than 64 bits")

    def add(self, place: str, box: Sequence[float], label: int, crowd: bool = False, outline: Any = None) -> None:
        """Add an object; `place` says where it stands."""
        inside, wrong = clipped(box, self.size)
        self.problem = self.problem or (wrong and f"the box in {place} {wrong}")
        if reason := _wrong_outline(outline, (self.size or (1, 1)) * 2, max(box)):
            self.problem = self.problem or f"the polygon of {place} {reason}"
        self.boxes.append(inside)
        self.labels.append(label)
        self.crowd.append(crowd)
        self.outlines.append(outline)


def clipped(box: Sequence[float], size: tuple[int, int] | None) -> tuple[list[float], str]:
    """The part of a box within its image, and what is wrong with it, or nothing; for `size` see `Annotated`."""
    sides = (size or (1, 1)) * 2
    inside = [min(max(number, 0), side) for number, side in zip(box, sides, strict=True)]
    near = all(abs(a - b) <= _OUTSIDE * side for a, b, side in zip(box, inside, sides, strict=True))
    if near and inside[0] < inside[2] and inside[1] < inside[3]:
        return inside, ""
    unit = f"in an image of {sides[0]}x{sides[1]} pixels" if size else "as fractions of width and height"
    shown = f"left, top, right, bottom = {', '.join(f'{number:g}' for number in box)} {unit}"
    if not size and max(box) > 2:
        shown += "; these look like pixels: divide x and width by the width of the image, y and height by its height"
    return inside, f"is empty, or outside of the image: {shown}"


def _wrong_outline(outline: Any, sides: Sequence[float], far: float) -> str:
    """What is wrong with the polygons of an object, such as that its mask would lack a part; or nothing.

    `far` is the largest number of its box.
    """
    if outline is None or isinstance(outline, dict):  # no masks, or run lengths
        return ""
    if not isinstance(outline, list) or not outline or not all(isinstance(part, list) for part in outline):
        return f"is not a list of polygons: {str(outline)[:60]}"
    if wrong := [part for part in outline if len(part) < 6 or len(part) % 2]:
        return f"has a part that is not three points or more: {str(wrong[0])[:60]}"
    # The points of a line are multiples of each other, seen from the first one
    seen = [[(x - part[0], y - part[1]) for x, y in zip(part[::2], part[1::2], strict=True)] for part in outline]
    if all(math.isclose(x * b, a * y) for points in seen for (x, y), (a, b) in itertools.pairwise(points)):
        return f"is a line: {str(outline)[:60]}"
    if max(sides) > 1 and max(map(max, outline)) <= 1 < far - 1:
        return f"has fractions of width and height, and its box is in pixels: {str(outline)[:60]}"
    limits = [(part[axis::2], sides[axis]) for part in outline for axis in (0, 1)]
    if not all(-side <= number <= 2 * side for numbers, side in limits for number in numbers):  # they take memory
        return "is more than a side outside of the image"
    return ""


def refuse_shares(images: Sequence[Annotated], key: str, allowed: str) -> None:
    """Raise `UserError` if all boxes of images that have a size are within the first pixel: they are fractions of its sides."""
    sized = [image for image in images if image.size and image.boxes]
    if sized and max(number for image in sized for box in image.boxes for number in box) <= 1:
        problem = f"no number of a box is above 1, as in fractions of width and height, such as in {sized[0].path}"
        raise UserError(key, problem, allowed)


class DetectionImages(ImageFolder):
    """Image files with objects; item i is (image, target).

    The image is uint8 (3, H, W), or as `Decoding.read` gives it for other `channels`. The target is a dict of `boxes`, float32
    (N, 4) as left, top, right, bottom in pixels, `labels`, int64 (N,) from 1 on, `iscrowd`, int64 (N,), `image_id`, int, and
    with `masks` of `masks`, uint8 (N, H, W).
    Image, boxes and masks are `torchvision.tv_tensors`. The first of `classes` has label 1.

    Raises `UserError` if an image cannot be used; with `on_error=skip` only when it is read.
    """

    def __init__(
        self,
        images: Sequence[Annotated],
        classes: Sequence[str],
        masks: bool = False,
        max_pixels: int = Data.max_pixels,
        on_error: OnError = "raise",
        *,
        channels: Channels = 3,
    ) -> None:
        if masks:
            require("data.dataset.masks", "runner[detection]", "faster_coco_eval")
        for image in images:
            image.problem = image.problem or ((gone := listing.absent(image.path)) and f"{gone} does not exist")
            if image.problem and on_error == "raise":
                raise UserError("data.dataset", image.problem, "data.on_error=skip, which reads other images instead")
        refuse_shares(images, "data.dataset", "numbers in pixels; data=yolo reads fractions of width and height")
        texts = [json.dumps({**vars(image), "path": ""}).encode() for image in images]
        self._texts, self._masks = listing.Files.of(texts), masks
        self.has_encodings = any(b'"counts"' in text for text in texts)  # run-length encodings, which cannot be resized
        # Numbers that change with the annotations, so that other ones are known as other data
        digests = torch.tensor([zlib.crc32(text) for text in texts], dtype=torch.float64)
        super().__init__([image.path for image in images], digests, classes, Decoding(None, channels, 1.0, max_pixels))
        objects = [[*zip(map(tuple, each.boxes), each.labels, strict=True)] for each in images]
        twice = [each.path for each, some in zip(images, objects, strict=True) if len({*some}) < len(some)]
        many = f"images with two objects of one box and class: {len(twice):,}"
        self.warnings: list[str] = [f"{many}, such as {twice[0]}"] if twice else []

    def __getitem__(self, index: int) -> tuple[Tensor, Any]:
        """Read one image; raises `UserError`, which names the file, if it or its annotations cannot be used."""
        said = self._said(index)
        return with_objects(self.decoding.read(said.path), said, self._masks)

    def _said(self, index: int) -> Annotated:
        said = Annotated(**{**json.loads(self._texts.name(index)), "path": self.path(index)})
        if said.problem:
            raise UserError(f"{said.problem}.")
        return said

    def classes_of(self, index: int) -> list[int]:
        """The numbers of the classes of the objects in item `index`, the first class 0."""
        return [label - 1 for label in {*json.loads(self._texts.name(index))["labels"]}]

    def json_of(self, index: int, resized: bool) -> bytes:
        """The objects of item `index` in JSON of `data=shards`, for an image of another size if it is `resized`."""
        said, names = self._said(index), ["image_id", "size", "boxes", "labels", "crowd", "outlines"]
        kept = {name: getattr(said, name) for name in names[: None if self._masks else -1]}
        if resized and (sides := said.size) is not None:
            share = lambda points: [number / sides[axis % 2] for axis, number in enumerate(points)]  # noqa: E731
            kept |= {"size": None, "boxes": [*map(share, said.boxes)]}
            if self._masks:
                kept["outlines"] = [[*map(share, outline)] for outline in said.outlines]
        return json.dumps(kept).encode()


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

    with Place(f"an outline of {path}"):
        if isinstance(outline, dict) and [*outline["size"]] != [height, width]:  # before memory is reserved for it
            raise ValueError(f"its run-length encoding has the size {outline['size']}, and the image {[height, width]}")
        if isinstance(outline, list):
            outline = [(np.reshape(points, (-1, 2)) * scale).ravel().tolist() for points in outline]
        filled = torch.from_numpy(mask.decode(mask.segmToRle(outline, width, height))).view(height, width)
        if not filled.any():
            raise ValueError("it covers no pixel")
        return filled


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
    channels: Channels = 3,
) -> dict[str, DetectionImages]:
    """Data sets of COCO's JSON: for each split a folder of images and a file of annotations, relative to `root`.

    The classes are those of the files, in the order of their ids. For the other arguments see `DetectionImages`.

    Raises `UserError` if a file is missing, cut short or of another format; it names the file and the place in it.
    """
    base, made = listing.existing(root, "a folder; data=yolo takes the YAML file of a data set"), {}
    names = dict[int, str]()
    folders, files = (train_images, val_images, test_images), (train_annotations, val_annotations, test_annotations)
    for split, pictures, file in zip(_SPLITS, folders, files, strict=True):
        if file is None:
            continue
        path, folder = base / file, base / (pictures or "")
        if not path.exists():
            there = sorted(str(path.relative_to(base)) for depth in ("*.json", "*/*.json") for path in base.glob(depth))
            one = "data.dataset.train_images=FOLDER data.dataset.val_annotations=null"
            allowed = f"{base} has the JSON files {', '.join(there[:5])}; one file is split with "
            allowed = f"{allowed}data.dataset.train_annotations={there[0]} {one}" if there else ""
            raise UserError(f"data.dataset.{split}_annotations", f"there is no file {path}", allowed)
        images, theirs, empty = _read_coco(path, folder, base, masks)
        if images and listing.absent(images[0].path) and not folder.is_dir():
            problem = f"there is no folder {folder}, and {path} names {images[0].path.name} in it"
            raise UserError(f"data.dataset.{split}_images", problem, "the folder of the images, relative to data.root")
        names = names or theirs
        listing.check_names("data.dataset", path, list(theirs.values()))
        if differing := sorted(theirs.items() ^ names.items()):
            raise UserError("data.dataset", f"{path} has other categories than {train_annotations}: {differing[0]}")
        made[split] = DetectionImages(images, tuple(names.values()), masks, max_pixels, on_error, channels=channels)
        if empty:
            made[split].warnings.append(f"{path}: {empty:,} boxes of zero width or height are dropped")
    return made


def _read_coco(path: Path, folder: Path, root: Path, masks: bool) -> tuple[list[Annotated], dict[int, str], int]:
    """The images with their objects, the names of the categories by id, and how many boxes were dropped as they are empty."""
    names, images, empty = dict[int, str](), dict[int, Annotated](), 0
    with Place(path, "data.dataset", "a file of COCO's format, as docs/howto/detection.md shows") as at:
        contents = json.loads(read_regular(path, LARGEST_DATA))
        for entry in at.each("categories", contents["categories"]):
            names[_new(entry["id"], names)] = str(entry["name"])
        labels = {number: label for label, number in enumerate(sorted(names), 1)}
        for entry in at.each("images", contents["images"]):
            if not listing.is_inside(entry["file_name"], folder, root):
                problem = f"{at.part}{path} names a file outside of {root}: {entry['file_name']}"
                raise UserError("data.dataset", problem, "data.root=FOLDER with a folder above all images")
            size = int(entry["width"]), int(entry["height"])
            file = listing.written(folder / entry["file_name"])
            images[_new(entry["id"], images)] = Annotated(file, int(entry["id"]), size)
        for entry in at.each("annotations", contents["annotations"]):
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
            images[entry["image_id"]].add(f"{at.part}{path}", box, labels[entry["category_id"]], bool(crowd), outline)
    return list(images.values()), dict(sorted(names.items())), empty


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
    *,
    channels: Channels = 3,
) -> dict[str, DetectionImages]:
    """Data sets of YOLO's text files: `images/train/a.jpg` has the objects of `labels/train/a.txt`, none without that file.

    A line is a class number from 0 on, and centre, width and height of a box, or the points of a polygon; all in shares of
    the sides. `description` is a YAML file with `names`, and the folders of images as `train`, `val` and `test`, relative to
    `root`. Without it, they are `images/train`, `images/val` and `images/test`, and `classes.txt` has the names. With
    `kpt_shape` in it, the numbers of key points follow a box, and are not used. `masks` makes masks of polygons.

    Raises `UserError` if a file is missing or a line is wrong; it names both.
    """
    base, made = listing.existing(root, ""), dict[str, DetectionImages]()
    if base.is_file():  # as Ultralytics' users name it
        base, description = base.parent, base.name
    path, plain = base / description, base / "classes.txt"
    where = f"the names of the classes in {path} or {plain.name}"
    with Place(where, "data.dataset", "names: in the YAML file, or a name a line"):
        said = read_yaml(path, plain=True) if path.exists() else {}
        names = said["names"] if path.exists() else read_text(plain).rstrip().splitlines()
        # Numbers that a mapping or an empty line skips, as those of COCO do, are classes whose name is the number
        numbered = names.items() if isinstance(names, dict) else enumerate(names)
        known = {int(digits(str(place))): name for place, name in numbered}
        count = bounded(max(known) + 1, 10 * len(known) + 1000, f"numbers of classes for {len(known):,} names")
        names = tuple(str(known.get(place, "")).strip() or str(place) for place in range(count))
        points = math.prod(int(digits(each)) for each in said["kpt_shape"]) if said.get("kpt_shape") else 0
    listing.check_names("data.dataset", path if path.is_file() else plain, names)
    below = functools.cache(lambda folder: {each.name.lower(): each for each in folder.glob("*")})
    for split in _SPLITS:
        # Paths of Roboflow begin with ../, and mean the folder of the description
        name = str(said.get(split) or f"images/{split}").removeprefix("../")
        folder = base / name
        if not listing.is_inside(name, base):
            problem = f"'{split}' of {path} is a folder outside of {base}: {name}"
            raise UserError("data.dataset", problem, "data.root=FOLDER with a folder above all images")
        if not folder.is_dir():
            if split == "train" or said.get(split):
                allowed = f"a folder below {base}; lists of folders and of files are not read"
                if ((elsewhere := Path(str(said.get("path")))) / name).is_dir():  # of Ultralytics' users
                    allowed = f"data.root={elsewhere.absolute()} data.dataset.description={path.absolute()}"
                raise UserError("data.dataset", f"the images of '{split}', {folder}, are not a folder", allowed)
            continue
        files, unread = listing.images_below(folder)
        images = [Annotated(Path(file), number, None) for number, file in enumerate(files)]
        places = [labels_of(image.path) for image in images]
        for image, text in zip(images, places, strict=True):
            try:
                if os.path.lexists(text):
                    _add_lines(image, text, len(names), masks, points)
                elif other := below(text.parent).get(text.name.lower()):
                    image.problem = f"{other} must be named {text.name}, as its image is {image.path.name}"
            except UserError as error:
                image.problem = error.problems[0].message
        if images and not any(image.boxes or image.problem for image in images):
            lacking = places[-1] if places[-1].parent.is_dir() else f"folder {places[-1].parent}"
            allowed = "text files there, or another data.dataset.description"
            raise UserError("data.dataset", f"no image of '{split}' has an object: there is no {lacking}", allowed)
        made[split] = DetectionImages(images, names, masks, max_pixels, on_error, channels=channels)
        made[split].warnings += listing.unread_warnings(folder, len(unread))
    return made


def labels_of(image: Path) -> Path:
    """The text file of an image of YOLO: in `labels` instead of `images`, or beside the image where there is no such folder."""
    text = image.with_suffix(".txt")
    head, found, tail = f"/{text.as_posix()}".rpartition("/images/")
    return listing.written(Path(f"{head}/labels/{tail}"[1:]) if found else text)


def _add_lines(image: Annotated, path: Path, classes: int, masks: bool, points: int) -> None:
    """Add the objects of a file, with `points` numbers of key points each; raises `UserError` if it cannot be used."""
    with Place(path) as at:
        for line, text in enumerate(read_regular(path, _LARGEST).decode("utf-8-sig", "replace").splitlines(), 1):
            if not text.strip():
                continue
            at.part = f"line {line} of "
            label, *numbers = map(float, digits(text).split())
            if len(numbers) != 4 + points if points else len(numbers) % 2:
                after = f"a box and the {points} numbers of kpt_shape" if points else "pairs of numbers"
                raise ValueError(f"it is not a class number, {after}: {text[:60]}")
            if label not in range(classes):
                raise ValueError(f"it has class {label:g}, but the classes are 0 to {classes - 1}")
            outline = np.array(numbers[: 4 if points else None]).reshape(-1, 2)
            if len(outline) < (3 if masks else 2):
                lacking = "polygon, which data.dataset.masks=true needs" if masks else "box"
                raise ValueError(f"it has no {lacking}: {text[:60]}")
            low, high = outline.min(0), outline.max(0)
            if len(outline) == 2:  # which of a negative side are the wrong way round
                low, high = outline[0] - outline[1] / 2, outline[0] + outline[1] / 2
            shape = [numbers] if masks else None
            image.add(f"line {line} of {path}", [*low.tolist(), *high.tolist()], int(label) + 1, outline=shape)
