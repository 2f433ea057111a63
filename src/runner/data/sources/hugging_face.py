"""Data sets of the library `datasets`: saved with `save_to_disk`, folders, Parquet files, or from the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runner.base.errors import UserError, nearest, require
from runner.config.schema.sections import Data
from runner.data.bad_samples import Place
from runner.data.sources.bands import Channels
from runner.data.sources.folders import ImageList
from runner.data.sources.image_io import Decoding
from runner.data.sources.tables import Kind, Table, column_targets

_SPLITS = {"train": ("train",), "val": ("validation", "valid", "val", "dev"), "test": ("test",)}
_SAVED = ("dataset_dict.json", "state.json")  # what save_to_disk writes, of several splits or of one


class EncodedImages(ImageList):
    """The images of a column of a data set of `datasets`; for the other arguments see `ImageList`.

    Args:
        rows: with the column `key` as it is stored, not decoded.
        key, name: the column; the data set and the split, for messages.
    """

    def __init__(
        self, rows: Any, key: str, name: str, targets: Tensor, classes: Sequence[str], *, decoding: Decoding
    ) -> None:
        super().__init__(targets, classes, decoding)
        self._rows, self._key, self._name = rows, key, name

    def encoded(self, index: int) -> tuple[Path, bytes | None]:
        """See `ImageList.encoded`; raises `UserError` if the row is empty."""
        stored = self._rows[index][self._key] or {}
        content, path = stored.get("bytes"), stored.get("path")
        if content is None and path is not None:
            return Path(path), None
        if content is None:
            raise UserError(f"cannot read the image {self._name}[{index}]: it is empty. Remove the row.")
        return Path(f"{self._name}[{index}]"), content


def hugging_face(
    root: str,
    download: bool = False,
    path: str | None = None,
    subset: str | None = None,
    image_key: str | None = None,
    *,
    label_key: str | list[str] | None = None,
    kind: Kind | None = None,
    train_split: str | None = None,
    val_split: str | None = None,
    test_split: str | None = None,
    image_size: int | None = None,
    channels: Channels = 3,
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
        image_size, channels, crop_share, max_pixels: see `runner.data.sources.image_io.Decoding`.

    Raises `UserError` if `datasets` is not installed, the data set, a split or a column is missing or not unique, or a label is
    invalid.
    """
    require("data.dataset", "runner[huggingface]", "datasets")
    import datasets

    decoding = Decoding(image_size, channels, crop_share, max_pixels)
    found = _loaded(datasets, root, path, subset, download)
    all_splits = dict(found) if isinstance(found, Mapping) else {train_split or "train": found}
    splits = _chosen(all_splits, {"train": train_split, "val": val_split, "test": test_split})
    features = splits["train"].features
    images = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
    key = _column("image_key", image_key, images, features)
    others = [name for name in features if name != key]
    named = [name for name in others if isinstance(features[name], datasets.ClassLabel)]
    labels = label_key if isinstance(label_key, list) else [_column("label_key", label_key, named or others, features)]
    targets, classes = _targets(datasets, splits, labels, kind, path or root)
    # Targets were read for all splits together, so that a class has one number in each of them.
    result, parts = {}, torch.split(targets, [*map(len, splits.values())])
    for (split, rows), some in zip(splits.items(), parts, strict=True):
        encoded = rows.select_columns([key]).cast_column(key, datasets.Image(decode=False))
        result[split] = EncodedImages(encoded, key, f"{path or root}:{split}", some, classes, decoding=decoding)
    return result


def _loaded(datasets: Any, root: str, path: str | None, subset: str | None, download: bool) -> Any:
    """The data set of a path or a name, or a mapping of several."""
    place = Path(root).expanduser() / Path(path or ".").expanduser()
    if not place.exists():  # a path that exists is never taken for a name on the Hub
        if not download:
            problem = f"{place.absolute()} does not exist, and data.download=false"
            allowed = "a folder or a .parquet file, or data.download=true to fetch the name"
            raise UserError("data.dataset.path", problem, allowed)
        allowed = "a network and a name on the Hub, or a copy made with save_to_disk: data.dataset.path=<its folder>"
        with Place(f"'{path}' from the Hub", "data.dataset.path", allowed):
            return datasets.load_dataset(str(path), subset)
    with Place(place.absolute(), "data.dataset.path"):
        if place.is_file():
            return datasets.load_dataset("parquet", data_files=str(place))
        if any((place / name).is_file() for name in _SAVED):
            return datasets.load_from_disk(str(place))
        return datasets.load_dataset(str(place), subset)


def _chosen(found: Mapping[str, Any], names: Mapping[str, str | None]) -> dict[str, Any]:
    """The splits train, val and test among those of the data set."""
    chosen = {}
    for split, given in names.items():
        usual = next((each for each in _SPLITS[split] if each in found), "train" if split == "train" else None)
        name = usual if given is None else given
        if name is not None and name not in found:
            problem = f"there is no split '{name}'"
            raise UserError(f"data.dataset.{split}_split", problem, ", ".join(found), nearest(name, found))
        if name is not None:
            chosen[split] = found[name]
    return chosen


def _column(key: str, given: str | None, choices: Sequence[str], features: Mapping[str, Any]) -> str:
    """The column that is named, or the only one of `choices`; raises `UserError` if there is no such column."""
    if given is None and len(choices) == 1:
        return choices[0]
    if given is not None and given not in features:
        problem = f"there is no column '{given}'"
        raise UserError(f"data.dataset.{key}", problem, ", ".join(features), nearest(given, features))
    if given is None or (key == "image_key" and given not in choices):
        problem = f"is null, and {len(choices)} columns may be it" if not given else f"'{given}' is not an image column"
        raise UserError(f"data.dataset.{key}", problem, ", ".join(choices or features))
    return given


def _targets(
    datasets: Any, splits: Mapping[str, Any], labels: list[str], kind: Kind | None, name: str
) -> tuple[Tensor, tuple[str, ...]]:
    """Targets (N, ...) of all splits one after the other, and the names of the classes."""
    for label in labels:
        _column("label_key", label, labels, splits["train"].features)
    columns = {label: [entry for rows in splits.values() for entry in rows[label]] for label in labels}
    table = Table(Path(name), columns, [number for rows in splits.values() for number in range(1, len(rows) + 1)])
    feature = splits["train"].features[labels[0]]
    if len(labels) > 1 or kind not in (None, "classification") or not isinstance(feature, datasets.ClassLabel):
        return column_targets(table, labels, kind)
    for row, entry in enumerate(columns[labels[0]]):
        if entry is None or not 0 <= entry < len(feature.names):
            raise table.wrong(row, labels[0], f"is {entry}, and there are {len(feature.names)} classes")
    return torch.tensor(columns[labels[0]], dtype=torch.int64), tuple(feature.names)
