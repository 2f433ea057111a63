"""Any data set of torchvision.datasets, by its name."""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import Any

from torch.utils.data import Dataset

from runner.base.errors import UserError, nearest
from runner.data.bad_samples import Place
from runner.data.sources.detection import clipped
from runner.data.sources.masks import Values, check_values, renumbered
from runner.instrument.nested import mapped_items

_CHOOSERS = ("train", "split", "image_set")  # arguments that name a split
_SPLITS = {"train": ("train", "trainval", "train-standard"), "val": ("val", "valid"), "test": ("test",)}
_UNPICKLE = ("LSUN", "LSUNClass")  # whatever their files hold


class Boxes(Dataset[tuple[Any, Any]]):
    """Pascal VOC, wrapped for torchvision.transforms.v2; `UserError` names the file of annotations that cannot be used."""

    def __init__(self, wrapped: Any) -> None:
        self._wrapped, self.targets, self.classes = wrapped, wrapped.targets, getattr(wrapped, "classes", None)

    def __len__(self) -> int:
        return len(self._wrapped)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        file = self._wrapped.annotations[index]
        allowed = "objects of the 20 classes of Pascal VOC, with a bndbox of whole numbers; data=coco for others"
        with Place(file, "data.dataset", allowed):
            image, target = self._wrapped[index]
        for number, box in enumerate(target["boxes"].tolist()):
            if wrong := clipped(box, tuple(image.shape[:0:-1]))[1]:
                raise UserError(f"the box in object {number} of {file} {wrong}")
        return image, target


def _with_numbers(image: Any, target: Any, values: Values | None) -> Any:
    """A sample for torchvision.transforms.v2: images are tv_tensors too, and masks have class numbers."""
    from torchvision.transforms.v2 import ToImage
    from torchvision.tv_tensors import Mask

    return mapped_items(ToImage()((image, target)), Mask, lambda mask: Mask(renumbered(mask, values)))


def torchvision_set(
    name: str,
    root: str | None = None,
    download: bool = False,
    classes: list[str] | None = None,
    images: list[str] | None = None,
    *,
    values: list[int | list[int]] | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """The splits of a data set of torchvision.datasets; only 'train' if it has none, or an argument of its class names one.

    Args:
        name: its class.
        root, download, **arguments: of the class.
        classes: names of the classes; None for those of the data set.
        images: `data.images`; unless it is None, samples are made for torchvision.transforms.v2.
        values: see `runner.data.sources.masks.segmentation_folder`.

    Raises `UserError` if there is no such data set, and as its class does, for wrong arguments and missing files.
    """
    from torchvision import datasets

    known = [each for each in datasets.__all__ if inspect.isclass(getattr(datasets, each)) and each not in _UNPICKLE]
    if name not in known:
        raise UserError("data.dataset.name", f"there is no '{name}'", ", ".join(known), nearest(name, known))
    kind: Any = getattr(datasets, name)
    taken = inspect.signature(kind).parameters
    passed = any(each.kind is each.VAR_KEYWORD for each in taken.values())  # to a base class, which has a root
    arguments |= {"root": root} if passed or "root" in taken else {}
    arguments |= {"download": True} if download and (passed or "download" in taken) else {}
    chooser = next((each for each in _CHOOSERS if each in taken), "")
    names: Any = {"train": (True,), "test": (False,)} if chooser == "train" else _SPLITS
    found: dict[str, Any] = {}
    for split, theirs in names.items() if chooser and chooser not in arguments else ():
        for each in theirs:
            with contextlib.suppress(ValueError):  # for a split that it does not have
                found[split] = kind(**arguments, **{chooser: each})
                break
    if "train" not in found:  # there is one split; or now with what else is wrong
        found["train"] = kind(**arguments)
    for split, dataset in found.items():
        labels = list(classes if classes is not None else getattr(dataset, "classes", None) or ())
        check_values(values, labels)
        if images is not None:
            dataset = datasets.wrap_dataset_for_transforms_v2(dataset)
            dataset.transforms = functools.partial(_with_numbers, values=values)
            dataset = Boxes(dataset) if name == "VOCDetection" else dataset
        if labels:
            dataset.classes = labels
        found[split] = dataset
    return found
