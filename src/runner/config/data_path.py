"""`data=PATH`: the words that train on a file or folder of one's own, by what it holds. Imports nothing heavy."""

from __future__ import annotations

import contextlib
import functools
import json
import mimetypes
import os
import re
from collections.abc import Sequence
from pathlib import Path

from runner.base.errors import UserError
from runner.base.reading import LARGEST_DATA, read_regular, read_yaml
from runner.config.keys import key_of

_MOST_CLASSES = 64  # of masks without names; more are rather shades of edges, or of a JPEG file
_FILE_NAME = re.compile(rb'"file_name"\s*:\s*("(?:[^"\\]|\\.)*")')
_LOOKED_FOR = (
    "YOLO's data.yaml (train:, names:), or a folder with it, or with images/ and labels/; a JSON file of COCO (images, "
    "annotations); a folder with images/ and masks/, or with train/ that has both; a folder of images for each of two classes "
    "or more, or train/ with these; or data=OPTION data.root=FOLDER"
)


def is_path(value: str, options: Sequence[str]) -> bool:
    """Tell whether the value of `data=` is an existing file or folder, and not one of the options."""
    path = os.path.expanduser(value)  # noqa: PTH111  as below
    named = "/" in value or value.endswith((".yaml", ".yml", ".json")) or os.path.isdir(path)  # noqa: PTH112
    return value not in options and named and os.path.exists(path)  # noqa: PTH110  Path.exists raises for a long text


def written_out(words: Sequence[str], options: Sequence[str]) -> tuple[list[str], str]:
    """Words with those that `data=PATH` stands for instead of it, first, so that others win; and what the path is, or nothing.

    A checkpoint has the model and its task, so with `ckpt_path` only the data are selected.
    """
    value = next((word.partition("=")[2].strip("'\"") for word in reversed(words) if key_of(word) == "data"), "")
    if not is_path(value, options):
        return [*words], ""
    kind, preset, own = found_in(value)
    resumes = any(key_of(word) == "ckpt_path" and word.partition("=")[2] not in ("", "null") for word in words)
    before = [preset] if preset and not resumes else []
    return [*before, *own, *(word for word in words if key_of(word) != "data")], f"{value} is {kind}"


@functools.cache
def found_in(value: str) -> tuple[str, str, tuple[str, ...]]:
    """What a file or folder is, the preset for it or nothing, and the words that read it; raises `UserError` if it is none."""
    path = Path(value)
    real, root = path.expanduser(), f"data.root={_text(path)}"
    if real.is_dir():
        below = sorted(each.name + "/" * each.is_dir() for each in real.iterdir() if not each.name.startswith("."))
        if "data.yaml" in below or {"images/", "labels/"}.issubset(below):
            return "a folder of YOLO's format", "experiment=detection", ("data=yolo", root)
        if any((folder / "images").is_dir() and (folder / "masks").is_dir() for folder in (real / "train", real)):
            names = () if "classes.txt" in below else _classes_of(real)
            found = ("data=segmentation_folder", "data.name=segmentation", root, *names)
            return "a folder of images and masks", "experiment=segmentation", found
        if sum(map(_has_image, (real / "train" if "train/" in below else real).iterdir())) > 1:
            return "a folder of images for each class", "", ("data=image_folder", root)
        held = f"has {', '.join(below[:10]) or 'nothing'}"
    elif real.suffix == ".json":
        content = read_regular(real, LARGEST_DATA)
        if b'"images"' in content and b'"annotations"' in content:
            return "COCO's format", "experiment=detection", _coco(path)
        held = "lacks images or annotations"
    else:
        with contextlib.suppress(ValueError):
            said = read_yaml(real, plain=True)
            if isinstance(said, dict) and {"train", "names"} & said.keys():
                other = (f"data.dataset.description={_text(path.name)}",) if path.name != "data.yaml" else ()
                return "YOLO's format", "experiment=detection", ("data=yolo", f"data.root={_text(path.parent)}", *other)
        held = "has neither train: nor names:"
    raise UserError("data", f"cannot tell what {value} is: it {held}", _LOOKED_FOR)


def _coco(path: Path) -> tuple[str, ...]:
    """The words for a file of annotations, and for that of validation if it has the same name but for `val`."""
    root = path.parent.parent if path.parent.name in ("annotations", "train") else path.parent
    name = str(path.relative_to(root))
    others = [other for new in ("val", "valid") if (other := name.replace("train", new)) != name]
    val = next((other for other in others if (root / other).expanduser().is_file()), None)
    words = ["data=coco", f"data.root={_text(root)}"]
    for split, file in (("train", name), ("val", val)):
        words.append(f"data.dataset.{split}_annotations={_text(file) if file else 'null'}")
        if file:
            words.append(f"data.dataset.{split}_images={_text(_images_of(root.expanduser(), Path(file)))}")
    return tuple(words)


def _images_of(root: Path, file: Path) -> Path:
    """The folder of the images of a file of annotations: where the first image is; `images`, if it is nowhere."""
    first = _FILE_NAME.search(read_regular(root / file, LARGEST_DATA))
    end = file.stem.rpartition("_")[2]  # such as train2017
    places = [file.parent, Path(), Path(end), Path("images", end), Path("images")]
    return next((place for place in places if first and (root / place / json.loads(first[1])).is_file()), places[-1])


def _classes_of(folder: Path) -> tuple[str, ...]:
    """The words for the classes of masks without names: a class for each value; 255 is none after 0, 1, 2, ..."""
    import numpy as np
    from PIL import Image

    files = [path for split in ("", "train", "val", "test") for path in (folder / split / "masks").rglob("*")]
    found = set[int]()
    for path in files:
        with contextlib.suppress(OSError), Image.open(path) as mask:  # others are reported when they are read
            bits = mask.tile[0][3].partition(";")[2] if mask.mode == "L" and mask.tile else ""
            values = np.asarray(mask).ravel() // (255 // (2 ** int(bits) - 1) if bits in ("2", "4") else 1)
            found |= {*np.flatnonzero(np.bincount(values)).tolist()}
    classes = sorted(found - {255})
    if len(classes) < 2 or classes != [*range(len(classes))]:
        classes = sorted(found)
    if not 1 < len(classes) <= _MOST_CLASSES:
        problem = f"the masks of {folder} have {len(classes)} different values, and there is no classes.txt"
        raise UserError("data", problem, f"{folder / 'classes.txt'} with a name a line, and masks of class numbers, as PNG")
    values_too = () if classes == [*range(len(classes))] else (f"data.dataset.values={classes}",)
    return f"data.dataset.classes={[*map(str, classes)]}", *values_too


def _has_image(folder: Path) -> bool:
    """Tell whether there is an image in a folder or below."""
    below = folder.rglob("*") if folder.is_dir() and not folder.name.startswith(".") else ()
    return any(str(mimetypes.guess_type(path.name, strict=False)[0]).startswith("image/") for path in below)


def _text(value: str | Path) -> str:
    """A text as Hydra reads it."""
    quoted = str(value).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{quoted}'"
