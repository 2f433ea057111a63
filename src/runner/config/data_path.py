"""`data=PATH`: the words that train on a file or folder, by what it holds. Imports nothing heavy."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path

from hydra.errors import HydraException

from runner.base.errors import UserError
from runner.base.reading import LARGEST_DATA, open_regular, read_regular, read_yaml
from runner.config.keys import key_of
from runner.config.overrides import is_path, parsed
from runner.config.sources import Sources

_KNOWN = (
    "YOLO's data.yaml with names:, or its folder; COCO's JSON with images and annotations, or its folder; a folder with images/ "
    "and masks/, or with train/ that has both; a folder of images for each of several classes, or train/ with these"
)
_COCO = ("annotations/instances_train*.json", "annotations/instances_default.json", "train/_annotations.coco.json")
_IMAGE = re.compile(r"\.(jpe?g|png|webp|bmp|gif|tiff?)", re.IGNORECASE)
_FILE_NAME = re.compile(rb'"file_name"\s{0,99}:\s{0,99}("(?:[^"\\]|\\.){1,4096}")')


def written_out(words: Sequence[str], sources: Sources) -> tuple[list[str], str]:
    """Words with those that `data=PATH` stands for in its place, first, so that others win; and a sentence about them, or "".

    Raises `UserError` for a path that holds nothing known.
    """
    typed = [""]
    with contextlib.suppress(HydraException):  # of words that are reported elsewhere
        typed += [str(each.value()) for each in parsed(word for word in words if word.lstrip("+").startswith("data="))]
    value = typed[-1]
    if not is_path(value) or value in (names := [option.name for option in sources.options("data")]):
        return [*words], ""
    if value not in sources.found:
        sources.found[value] = _found_in(value, names)
    kind, preset, *own = sources.found[value]
    if {"model=rtdetr_r18", "model=transformers_detection"}.intersection(words):  # SGD does not train them
        preset = preset.removesuffix("_torchvision")
    # A checkpoint has the model and its task
    resumes = any(key_of(word) == "ckpt_path" and not word.endswith(("=", "=null")) for word in words)
    own = own if resumes or not preset else [f"experiment={preset}", *own]
    return [*own, *(word for word in words if key_of(word) != "data")], f"{value} is {kind}: {' '.join(own)}"


def _found_in(value: str, names: Sequence[str]) -> tuple[str, ...]:
    """What a path is, the preset for it or "", and the words that read it; `names` are the options there are."""
    path, held = Path(value).expanduser(), list[str]()
    root = f"data.root={str(path)!r}"
    with contextlib.suppress(OSError, ValueError):  # of what cannot be read
        if path.is_dir():
            held = sorted(each.name + "/" * each.is_dir() for each in path.glob("[!.]*"))
            train = path / "train" if "train/" in held else path
            if "data.yaml" in held or {"images/", "labels/"}.issubset(held):
                return "a folder of YOLO's format", "detection_torchvision", "data=yolo", root
            if any((each / "images").is_dir() and (each / "masks").is_dir() for each in (path, train)):
                classes = [] if "classes.txt" in held else _classes_of(path)
                words = ["data=segmentation_folder", "data.name=segmentation", root]  # named as by the preset
                return "a folder of images and masks", "segmentation", *words, *classes
            if files := [file for pattern in _COCO for file in sorted(path.glob(pattern))]:
                return "a folder of COCO's format", "detection_torchvision", "data=coco", *_coco(files[0])
            # The first files of a folder tell whether it has images, also where there are millions
            below = [itertools.islice(each.rglob("*"), 1000) for each in train.glob("[!.]*")]
            kinds = sum(any(_IMAGE.fullmatch(file.suffix) for file in files) for files in below)
            if kinds > 1 and not (train / "images").is_dir():  # whose masks have another name than masks/
                return "a folder of images for each class", "", "data=image_folder", root
        elif path.suffix == ".json":
            return "COCO's format", "detection_torchvision", "data=coco", *_coco(path)
        elif isinstance(content := read_yaml(path, plain=True), dict):
            held = [*content]
            if {"train", "names"}.intersection(held):
                return "YOLO's format", "detection_torchvision", "data=yolo", root
    problem = f"cannot tell what is in {value}" + f": {', '.join(held[:10])}" * bool(held)
    raise UserError("data", problem, _KNOWN, path.stem if path.stem in names else "")


def _coco(path: Path) -> list[str]:
    """The words for a file of annotations and that of validation, `val` instead of `train`; `ValueError` if it has no images."""
    root = path.parents[1] if path.parent.name in ("annotations", "train") else path.parent
    words = [f"data.root={str(root)!r}"]
    for split, new in (("train", "train"), ("val", "valid"), ("val", "val")):
        file = Path(str(path.relative_to(root)).replace("train", new))
        if split == "train" or (root / file != path and (root / file).is_file()):
            found = _FILE_NAME.search(read_regular(root / file, LARGEST_DATA))
            first = json.loads(found[1] if found else "")
            end = file.stem.rpartition("_")[2]  # such as train2017
            places = [str(file.parent), ".", end, f"images/{end}", "images"]
            there = [each for each in places if (root / each / first).is_file()] or ["images"]
            words += [f"data.dataset.{split}_annotations={str(file)!r}", f"data.dataset.{split}_images={there[0]!r}"]
    return words if len(words) > 3 else [*words, "data.dataset.val_annotations=null"]


def _classes_of(folder: Path) -> list[str]:
    """The words for masks without names: a class for each value; 255 is none beside 0 and 1."""
    import numpy as np
    from PIL import Image

    found, unread = set[int](), (OSError, ValueError, Image.DecompressionBombError)
    for path in (*folder.glob("masks/**/*"), *folder.glob("*/masks/**/*")):
        # What cannot be read is reported when it is used
        with contextlib.suppress(*unread), open_regular(path) as file, Image.open(file) as mask:
            # Pillow multiplies grey values of 2 and 4 bits
            factor = {"L;2": 85, "L;4": 17}.get(str(mask.tile[0][3]) if mask.tile else "", 1)
            found.update(np.unique(np.asarray(mask) // factor).tolist())
    classes = sorted(found - {255} if found > {0, 1} else found)
    values = [f"data.dataset.values={classes}"] if classes != [*range(len(classes))] else []
    return (
        [f"data.dataset.classes={[*map(str, classes)]}", *values] if 1 < len(classes) <= 64 else []
    )  # shades of edges are more
