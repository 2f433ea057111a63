"""Handwritten digits, 8 by 8 pixels: the smallest real data set, which needs no download."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import torch

from runner.data.sources.arrays import ImageArrays


def digits(classes: list[int] | None = None) -> dict[str, ImageArrays]:
    """The 1797 images of the UCI "Optical Recognition of Handwritten Digits" test set, as scikit-learn ships them.

    The 17 grey levels (0 to 16) are spread over 0 to 255 and rounded.

    Args:
        classes: two or more digits to keep, in the order of their class numbers; None keeps all ten.

    Returns:
        'train' alone, images uint8 (1797, 1, 8, 8), or fewer; validation and test samples are split off it.
    """
    kept = list(range(10)) if classes is None else classes
    if len(set(kept)) < max(2, len(kept)) or not set(kept) <= set(range(10)):
        raise ValueError(f"classes must be two or more different digits from 0 to 9, got {classes}")
    rows = _rows()
    rows = rows[np.isin(rows[:, -1], kept)]
    pixels = np.rint(rows[:, :-1] * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    numbers = np.zeros(10, dtype=np.int64)
    numbers[kept] = np.arange(len(kept))
    targets = numbers[rows[:, -1].astype(np.int64)]
    return {"train": ImageArrays(torch.from_numpy(pixels), torch.from_numpy(targets), tuple(map(str, kept)))}


def _rows() -> np.ndarray:
    """Rows of 64 pixels and a label, from scikit-learn's own file: importing `sklearn.datasets` takes 1 s, reading 20 ms."""
    spec = importlib.util.find_spec("sklearn")
    path = Path((spec and spec.origin) or "").parent / "datasets" / "data" / "digits.csv.gz"
    if path.is_file():
        return np.loadtxt(path, delimiter=",")
    from sklearn.datasets import load_digits

    return np.column_stack(load_digits(return_X_y=True))
