"""Data sets of the library `datasets`: saved with `save_to_disk`, folders, Parquet files, or from the Hugging Face Hub."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.config.errors import UserError, nearest
from runner.config.schema.sections import Data
from runner.data.sources.image_io import Cut, middle_square, read_image
from runner.data.sources.tables import Kind, Table, column_targets

_SPLITS = {"train": ("train",), "val": ("validation", "valid", "val", "dev"), "test": ("test",)}
_SAVED = ("dataset_dict.json", "state.json")  # what save_to_disk writes, of several splits or of one


class EncodedImages(Dataset[tuple[Tensor, int | Tensor]]):
    """Map-style data set of the encoded images of a column; item i is (uint8 tensor (C, H, W), target).

    Args:
        rows: of `datasets`, with the column `key` as it is stored, not decoded.
        key, name: the column; the data set and the split, for messages.
        targets: int64 (N,), or float32 (N, ...).
        classes, image_size, channels, crop_share, max_pixels: see `runner.data.sources.folders.ImageFolder`.
    """

    def __init__(
        self,
        rows: Any,
        key: str,
        name: str,
        targets: Tensor,
        classes: tuple[str, ...],
        image_size: int | None,
        channels: Literal[1, 3],
        crop_share: float,
        max_pixels: int,
    ) -> None:
        self._rows, self._key, self._name = rows, key, name
        self.targets, self.classes, self.image_size, self.channels = targets, classes, image_size, channels
        self.crop_share, self.max_pixels = crop_share, max_pixels

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int | Tensor]:
        """Decode one image; raises `UserError`, which names the row, if it cannot be decoded."""
        return self.read_part(index, functools.partial(middle_square, share=self.crop_share), self.image_size)

    def read_part(self, index: int, cut: Cut, size: int | None) -> tuple[Tensor, int | Tensor]:
        """Decode only a part of an image, see `ImageFolder.read_part`."""
        stored, target = self._rows[index][self._key] or {}, self.targets[index]
        content, path = stored.get("bytes"), stored.get("path")
        name = Path(f"{self._name}[{index}]") if content is not None or path is None else Path(path)
        if content is None and path is None:
            raise UserError(f"cannot read the image {name}: it is empty. Remove the row.")
        image = read_image(name, size, self.channels, cut, self.max_pixels, content)
        return image, target if target.is_floating_point() else int(target)


def hugging_face(
    root: str,
    download: bool = False,
    path: str | None = None,
    subset: str | None = None,
    image_key: str | None = None,
    label_key: str | list[str] | None = None,
    kind: Kind | None = None,
    train_split: str | None = None,
    val_split: str | None = None,
    test_split: str | None = None,
    image_size: int | None = None,
    channels: Literal[1, 3] = 3,
    crop_share: float = 1.0,
    max_pixels: int = Data.max_pixels,
) -> dict[str, EncodedImages]:
    """Data sets of images and labels that the library `datasets` reads.

    Args:
        root: folder of the data set.
        download: whether a `path` that is not a file or folder is a name on the Hub, which `datasets` fetches or has in its cache.
        path: folder or Parquet file under `root`, or a whole path, or a name on the Hub; None for `root` itself.
        subset: name of the configuration of a data set on the Hub.
        image_key, label_key: columns; None for the only column of images, and the only column of class labels or, without
            such, the only other column. Several label columns are a list.
        kind: see `runner.data.sources.tables.image_table`.
        train_split, val_split, test_split: names of the splits; None for train, validation and test, if they exist.
        image_size, channels, crop_share, max_pixels: see `runner.data.sources.folders.image_folder`.

    Raises:
        UserError: if `datasets` is not installed, the data set, a split or a column is missing or not unique, or a label is
            invalid.
    """
    try:
        import datasets
    except ImportError as error:
        problem = "needs the library datasets, which is not installed"
        raise UserError("data.dataset", problem, "pip install 'runner[huggingface]'") from error
    if channels not in (1, 3):
        raise ValueError(f"channels must be 1 or 3, got {channels}")
    if not 0 < crop_share <= 1:
        raise ValueError(f"crop_share must be above 0 and at most 1, got {crop_share}")
    found = _loaded(datasets, root, path, subset, download)
    all_splits = dict(found) if isinstance(found, Mapping) else {train_split or "train": found}
    splits = _chosen(all_splits, {"train": train_split, "val": val_split, "test": test_split})
    features = splits["train"].features
    key = _image_key(datasets, features, image_key)
    labels = [label_key] if isinstance(label_key, str) else label_key or [_label_key(datasets, features, key)]
    for label in labels:
        _check_column("data.dataset.label_key", label, features)
    targets, classes = _targets(datasets, splits, labels, kind, path or root)
    made, start = {}, 0
    for split, rows in splits.items():
        encoded = rows.select_columns([key]).cast_column(key, datasets.Image(decode=False))
        some, start = targets[start : start + len(rows)], start + len(rows)
        settings = (image_size, channels, crop_share, max_pixels)
        made[split] = EncodedImages(encoded, key, f"{path or root}:{split}", some, classes, *settings)
    return made


def _loaded(datasets: Any, root: str, path: str | None, subset: str | None, download: bool) -> Any:
    """What `datasets` makes of a path or a name: one of its data sets, or a mapping of them."""
    place = Path(root).expanduser() / Path(path or ".").expanduser()
    if not place.exists() and not download:
        problem = f"{place.absolute()} does not exist, and data.download=false"
        raise UserError(
            "data.dataset.path", problem, "a folder or a .parquet file, or data.download=true to fetch the name"
        )
    try:
        if not place.exists():
            return datasets.load_dataset(str(path), subset)
        if place.is_file():
            return datasets.load_dataset("parquet", data_files=str(place))
        if any((place / name).is_file() for name in _SAVED):
            return datasets.load_from_disk(str(place))
        return datasets.load_dataset(str(place), subset)
    except Exception as error:  # readers of a dozen formats and a network raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        if place.exists():
            raise UserError("data.dataset.path", f"{place.absolute()} cannot be read: {reason}") from error
        allowed = "a network and a name on the Hub, or a copy made with save_to_disk: data.dataset.path=<its folder>"
        raise UserError("data.dataset.path", f"'{path}' could not be fetched: {reason}", allowed) from error


def _chosen(found: Mapping[str, Any], names: Mapping[str, str | None]) -> dict[str, Any]:
    """The splits train, val and test among those of the data set."""
    chosen = {}
    for split, given in names.items():
        if given is not None and given not in found:
            problem = f"there is no split '{given}'"
            raise UserError(f"data.dataset.{split}_split", problem, ", ".join(found), nearest(given, found))
        name = given or next((name for name in _SPLITS[split] if name in found), None)
        if name is not None:
            chosen[split] = found[name]
    if "train" not in chosen:
        raise UserError("data.dataset.train_split", "there is no split 'train'", ", ".join(found))
    return chosen


def _check_column(key: str, column: str, features: Mapping[str, Any]) -> None:
    if column not in features:
        raise UserError(key, f"there is no column '{column}'", ", ".join(features), nearest(column, features))


def _image_key(datasets: Any, features: Mapping[str, Any], given: str | None) -> str:
    images = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
    if given is not None:
        _check_column("data.dataset.image_key", given, features)
        if given not in images:
            raise UserError(
                "data.dataset.image_key", f"'{given}' is not an image column", ", ".join(images) or "none here"
            )
        return given
    if len(images) != 1:
        what = f"has {len(images)} columns of images" if images else "has no image column"
        raise UserError("data.dataset.image_key", f"is null, and the data set {what}", ", ".join(images or features))
    return images[0]


def _label_key(datasets: Any, features: Mapping[str, Any], image: str) -> str:
    others = [name for name in features if name != image]
    named = [name for name in others if isinstance(features[name], datasets.ClassLabel)]
    choices = named or others
    if len(choices) != 1:
        problem = f"is null, and {len(choices)} columns may be the label"
        raise UserError("data.dataset.label_key", problem, ", ".join(choices) or "a data set with labels")
    return choices[0]


def _targets(
    datasets: Any, splits: Mapping[str, Any], labels: list[str], kind: Kind | None, name: str
) -> tuple[Tensor, tuple[str, ...]]:
    """Targets (N, ...) of all splits one after the other, and the names of the classes."""
    columns = {label: [entry for rows in splits.values() for entry in rows[label]] for label in labels}
    table = Table(Path(name), columns, [number for rows in splits.values() for number in range(1, len(rows) + 1)])
    feature = splits["train"].features[labels[0]]
    if len(labels) > 1 or kind not in (None, "classification") or not isinstance(feature, datasets.ClassLabel):
        return column_targets(table, labels, kind)
    for row, entry in enumerate(columns[labels[0]]):
        if entry is None or not 0 <= entry < len(feature.names):
            problem = f"is {entry}, and there are {len(feature.names)} classes"
            raise table.wrong(row, labels[0], problem, "a label in every row, or no such row")
    return torch.tensor(columns[labels[0]], dtype=torch.int64), tuple(feature.names)
