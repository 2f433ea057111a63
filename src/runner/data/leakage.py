"""Leakage: groups or identical images in two splits."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from runner.config.errors import UserError
from runner.data.groups import groups_of
from runner.data.sampler import Indices
from runner.data.sources.arrays import ImageArrays


def find_leaks(parts: Mapping[str, tuple[Dataset[Any], Indices]], group: str | None) -> list[str]:
    """Warnings about groups (see `groups_of`; None for none), and images in memory, that are in two splits."""
    found = _shared_groups(parts, group) if group is not None else []
    arrays = {name: part for name, part in parts.items() if isinstance(part[0], ImageArrays)}
    return found + _shared_images(arrays)


def _shared_groups(parts: Mapping[str, tuple[Dataset[Any], Indices]], group: str) -> list[str]:
    known: dict[int, list[str]] = {}
    of_split: dict[str, dict[str, None]] = {}
    for name, (dataset, indices) in parts.items():
        if id(dataset) not in known:
            try:
                known[id(dataset)] = groups_of(dataset, group)
            except UserError as error:  # a test set that comes with the data need not name groups
                problem = error.args[0].splitlines()[0]
                return [f"whether groups are in '{name}' and in another split is not known: {problem}"]
        of_split[name] = dict.fromkeys(known[id(dataset)][index] for index in indices[:].tolist())
    found = []
    for one, other in itertools.combinations(of_split, 2):
        if shared := [label for label in of_split[one] if label in of_split[other]]:
            count = "1 group is" if len(shared) == 1 else f"{len(shared):,} groups are"
            found.append(f"data.split.group: {count} in '{one}' and in '{other}', such as {shared[0]}")
    return found


def _shared_images(arrays: Mapping[str, tuple[Any, Indices]]) -> list[str]:
    digests: dict[int, np.ndarray] = {}
    for dataset, _ in arrays.values():
        if id(dataset) not in digests:
            digests[id(dataset)] = dataset.digests
    of_split = {name: digests[id(dataset)][indices[:].numpy()] for name, (dataset, indices) in arrays.items()}
    found = []
    for one, other in itertools.combinations(of_split, 2):
        again = np.flatnonzero(np.isin(of_split[other], of_split[one]))
        if len(again) == 0:
            continue
        (first, firsts), (second, seconds) = arrays[one], arrays[other]
        place = int(np.flatnonzero(of_split[one] == of_split[other][again[0]])[0])
        twins = int(firsts[place]), int(seconds[int(again[0])])
        if not torch.equal(first.images[twins[0]], second.images[twins[1]]):
            continue  # two images with the same digest, which happens once in 10^19 pairs
        count = "1 image is" if len(again) == 1 else f"{len(again):,} images are"
        found.append(
            f"{count} in '{other}' and, pixel for pixel, in '{one}', such as sample {twins[1]} as sample {twins[0]}: what "
            f"is measured on '{other}' is a little too good"
        )
    return found
