"""Handwritten digits, 8 by 8 pixels: the smallest real data set, which needs no download."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import torch

from runner.data.sources.arrays import ImageArrays

_SIDE = 8
_LEVELS = 16
_CLASSES = tuple(str(digit) for digit in range(10))


def digits(classes: list[int] | None = None) -> dict[str, ImageArrays]:
    """The 1797 images of the UCI "Optical Recognition of Handwritten Digits" test set, as scikit-learn ships them.

    The 17 grey levels (0 to 16) are spread over 0 to 255 and rounded.

    Args:
        classes: two or more digits to keep, in the order of their class numbers; None keeps all ten.

    Returns:
        'train' alone, images uint8 (1797, 1, 8, 8), or fewer; validation and test samples are split off it.
    """
    if classes is not None and (len(set(classes)) < max(2, len(classes)) or not set(classes) <= set(range(10))):
        raise ValueError(f"classes must be two or more different digits from 0 to 9, got {classes}")
    rows = _packaged_rows()
    if rows is None:
        rows = _rows_by_sklearn()
    pixels = np.rint(rows[:, :-1] * (255 / _LEVELS)).astype(np.uint8).reshape(-1, 1, _SIDE, _SIDE)
    targets = rows[:, -1].astype(np.int64)
    if classes is None:
        return {"train": ImageArrays(torch.from_numpy(pixels), torch.from_numpy(targets), _CLASSES)}
    kept = np.isin(targets, classes)
    numbers = np.zeros(len(_CLASSES), dtype=np.int64)
    numbers[classes] = np.arange(len(classes))
    names = tuple(_CLASSES[digit] for digit in classes)
    return {"train": ImageArrays(torch.from_numpy(pixels[kept]), torch.from_numpy(numbers[targets[kept]]), names)}


def _packaged_rows() -> np.ndarray | None:
    """Rows of 64 pixels and a label from scikit-learn's own file; None if this release keeps it elsewhere.

    Reading it takes 20 ms, importing `sklearn.datasets` about 1 s.
    """
    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if not path.is_file():
        return None
    return np.loadtxt(path, delimiter=",")


def _rows_by_sklearn() -> np.ndarray:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    return np.column_stack([pixels, labels])
