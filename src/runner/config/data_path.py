"""`data=PATH`: the words that train on a file or folder, by what it holds. Imports nothing heavy."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

from runner.base.errors import UserError
from runner.base.reading import LARGEST_DATA, read_regular, read_yaml
from runner.config.keys import key_of
from runner.config.sources import Sources

_KNOWN = (
    "YOLO's data.yaml with names:, or its folder; COCO's JSON with images and annotations; a folder with images/ and masks/, "
    "or with train/ that has both; a folder of images for each of several classes, or train/ with these"
)
_IMAGE = re.compile(r"\.(jpe?g|png|webp|bmp|gif|tiff?)", re.IGNORECASE)
_FILE_NAME = re.compile(rb'"file_name"\s*:\s*("(?:[^"\\]|\\.)*")')


def is_path(value: str) -> bool:
    """Tell whether a value of `data=` that is not an option is an existing file or folder."""
    path = os.path.expanduser(value)  # noqa: PTH111  as below
    named = "/" in value or value.endswith((".yaml", ".yml", ".json")) or os.path.isdir(path)  # noqa: PTH112
    return named and os.path.exists(path)  # noqa: PTH110  Path.exists raises for a long text


def written_out(words: Sequence[str], sources: Sources) -> tuple[list[str], str]:
    """Words with those that `data=PATH` stands for in its place, first, so that others win; and what the path is, or ""."""
    [*_, value] = ["", *(word.partition("=")[2].strip("'\"") for word in words if key_of(word) == "data")]
    if not is_path(value) or value in [option.name for option in sources.options("data")]:
        return [*words], ""
    kind, preset, *own = _found_in(value)
    # A checkpoint has the model and its task
    resumes = any(key_of(word) == "ckpt_path" and not word.endswith(("=", "=null")) for word in words)
    before = [f"experiment={preset}"] if preset and not resumes else []
    return [*before, *own, *(word for word in words if key_of(word) != "data")], f"{value} is {kind}"


def _found_in(value: str) -> Sequence[str]:
    """What a path is, the preset for it or "", and the words that read it; raises `UserError` for what is not known."""
    path, held = Path(value).expanduser(), list[str]()
    root = f"data.root={str(path)!r}"
    with contextlib.suppress(OSError, ValueError):  # of what cannot be read
        if path.is_dir():
            held = sorted(each.name + "/" * each.is_dir() for each in path.iterdir() if each.name[0] != ".")
            train = path / "train" if "train/" in held else path
            if "data.yaml" in held or {"images/", "labels/"}.issubset(held):
                return "a folder of YOLO's format", "detection", "data=yolo", root
            if any((each / "images").is_dir() and (each / "masks").is_dir() for each in (path, train)):
                words = ["data=segmentation_folder", "data.name=segmentation", root]  # named as by the preset
                return "a folder of images and masks", "segmentation", *words, *_classes_of(path)
            if sum(any(_IMAGE.fullmatch(file.suffix) for file in each.rglob("*")) for each in train.iterdir()) > 1:
                return "a folder of images for each class", "", "data=image_folder", root
        elif path.suffix == ".json":
            return "COCO's format", "detection", "data=coco", *_coco(path)
        elif {"train", "names"}.intersection(held := [*map(str, read_yaml(path, plain=True) or ())]):
            return "YOLO's format", "detection", "data=yolo", root
    raise UserError("data", f"cannot tell what is in {value}" + f": {', '.join(held[:10])}" * bool(held), _KNOWN)


def _coco(path: Path) -> list[str]:
    """The words for a file of annotations and that of validation, `val` instead of `train`; `ValueError` if it has no images."""
    root = path.parents[1] if path.parent.name in ("annotations", "train") else path.parent
    words = [f"data.root={str(root)!r}"]
    for split, new in (("train", "train"), ("val", "valid"), ("val", "val")):
        file = Path(str(path.relative_to(root)).replace("train", new))
        if split == "train" or (root / file != path and (root / file).is_file()):
            [first] = _FILE_NAME.findall(read_regular(root / file, LARGEST_DATA))[:1]
            end = file.stem.rpartition("_")[2]  # such as train2017
            places = [str(file.parent), ".", end, f"images/{end}", "images"]
            there = [each for each in places if (root / each / json.loads(first)).is_file()] or ["images"]
            words += [f"data.dataset.{split}_annotations={str(file)!r}", f"data.dataset.{split}_images={there[0]!r}"]
    return words if len(words) > 3 else [*words, "data.dataset.val_annotations=null"]


def _classes_of(folder: Path) -> list[str]:
    """The words for masks without names: a class for each value; 255 is none beside 0 and 1."""
    import numpy as np
    from PIL import Image

    found, named = set[int](), (folder / "classes.txt").exists()
    for path in () if named else (*folder.glob("masks/**/*"), *folder.glob("*/masks/**/*")):
        with (
            contextlib.suppress(OSError, ValueError),
            Image.open(path) as mask,
        ):  # others are reported when they are read
            # Pillow multiplies grey values of 2 and 4 bits
            factor = {"L;2": 85, "L;4": 17}.get(str(mask.tile[0][3]) if mask.tile else "", 1)
            found |= {*np.flatnonzero(np.bincount(np.asarray(mask).ravel() // factor)).tolist()}
    classes = sorted(found - {255} if found > {0, 1} else found)
    values = [f"data.dataset.values={classes}"] if classes != [*range(len(classes))] else []
    return [f"data.dataset.classes={[*map(str, classes)]}", *values] if 1 < len(classes) <= 64 else []
