"""Splits that keep groups together, and folds: pure functions of the data, the shares and the seed."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.config.errors import UserError

_KEY = "data.split.group"
_FOLDS = "data.split.folds"


def groups_of(dataset: Dataset[Any], group: str) -> list[str]:
    """The group of each sample of a data set, as text.

    Args:
        dataset: has an attribute of this name with a group for each sample, or `paths`, the files of its samples.
        group: the name of the attribute; or a regular expression that is searched for in the path of each file, below the
            folder that all files have in common. Its first group in parentheses counts if it has one, else all of it.

    Raises:
        UserError: if the data set has neither, there are other than one for each sample, or a file does not match.
    """
    samples = len(dataset)  # type: ignore[arg-type]
    if group.isidentifier() and hasattr(dataset, group):
        values = getattr(dataset, group)
        values = values.tolist() if isinstance(values, Tensor | np.ndarray) else values
        counted = isinstance(values, Sequence) and not isinstance(values, str)
        if not counted or len(values) != samples:
            count = f"{len(values)} entries" if counted else f"a {type(values).__name__}"
            raise UserError(
                f"{_KEY}: the attribute '{group}' of the data set has {count} for {samples} samples\n"
                "    allowed: an attribute with a group for each sample"
            )
        return [str(value) for value in values]
    if not hasattr(dataset, "paths"):
        raise UserError(
            f"{_KEY}: the data set has no attribute '{group}', and no files that a pattern could be searched in\n"
            "    allowed: null, an attribute with a group for each sample, or image files"
        )
    return _matched([Path(path) for path in dataset.paths], _pattern(group))


def _pattern(group: str) -> re.Pattern[str]:
    try:
        return re.compile(group)
    except re.error as error:
        raise UserError(
            f"{_KEY}: '{group}' is no regular expression: {error}\n    allowed: such as '(patient[0-9]+)'"
        ) from error


def _matched(paths: list[Path], pattern: re.Pattern[str]) -> list[str]:
    common = os.path.commonpath([path.parent for path in paths])
    found = []
    for path in paths:
        name = Path(os.path.relpath(path, common)).as_posix()
        match = pattern.search(name)
        if match is None:
            raise UserError(
                f"{_KEY}: '{pattern.pattern}' is not found in {name}\n"
                "    allowed: a pattern that is found in the path of every file, or an attribute of the data set"
            )
        found.append(match[1] if pattern.groups and match[1] is not None else match[0])
    return found


def numbered(groups: Sequence[str]) -> Tensor:
    """Groups as numbers from 0 on, int64 (N,), in the order in which they first occur."""
    known = {name: number for number, name in enumerate(dict.fromkeys(groups))}
    return torch.tensor([known[name] for name in groups], dtype=torch.int64)


def split_groups(classes: Tensor, groups: Tensor, shares: Sequence[float], order: Tensor) -> Tensor:
    """Give every group whole to one of several splits, so that each has about its share of every class.

    Large groups go first, those of one size in a random order; each to the split that lacks most of what the group has. So no
    split is further from its share than the groups are large.

    Args:
        classes: class of each sample, int64 (N,) from 0 on; all 0 for no classes.
        groups: group of each sample, int64 (N,) from 0 on.
        shares: share of each split, together 1.
        order: a random permutation of the samples, int64 (N,).

    Returns:
        The number of the split of each sample, int64 (N,).
    """
    count, kinds = int(groups.max()) + 1, int(classes.max()) + 1
    table = np.zeros((count, kinds))
    np.add.at(table, (groups.numpy(), classes.numpy()), 1)
    totals = table.sum(0)
    lacking = np.outer(np.asarray(shares), totals)
    # The place of a group's first sample in the random order is the group's own.
    place = np.full(count, len(groups))
    np.minimum.at(place, groups[order].numpy(), np.arange(len(groups)))
    of_group = np.zeros(count, dtype=np.int64)
    for group in sorted(range(count), key=lambda group: (-table[group].sum(), place[group])):
        needs = (lacking * table[group] / np.maximum(totals, 1)).sum(1)
        # Rounded, so that what is equal is, and goes to the smaller split.
        chosen = max(range(len(shares)), key=lambda split: (round(needs[split], 9), lacking[split].sum()))
        lacking[chosen] -= table[group]
        of_group[group] = chosen
    return torch.from_numpy(of_group)[groups]


def stratified_folds(classes: Tensor, folds: int, order: Tensor) -> Tensor:
    """Deal samples out into folds, class by class, so that folds and each class in them differ by one sample at most.

    Args:
        classes: class of each sample, int64 (N,) from 0 on; all 0 for no classes.
        folds: number of folds.
        order: a random permutation of the samples, int64 (N,).

    Returns:
        The fold of each sample, int64 (N,).

    Raises:
        UserError: if a class has fewer samples than there are folds.
    """
    counts = torch.bincount(classes)
    if len(counts) and bool(((counts < folds) & (counts > 0)).any()):
        scarce = int(((counts < folds) & (counts > 0)).nonzero()[0])
        of_class = f"class number {scarce} has" if len(counts) > 1 else "there are"
        raise UserError(
            f"{_FOLDS}: is {folds}, but {of_class} {int(counts[scarce])} samples to divide\n"
            f"    allowed: at most {int(counts[counts > 0].min())}"
            + (", or data.split.stratified=false" if len(counts) > 1 else "")
        )
    sorted_places = order[torch.sort(classes[order], stable=True).indices]
    fold = torch.empty_like(classes)
    fold[sorted_places] = torch.arange(len(classes)) % folds
    return fold


def group_folds(classes: Tensor, groups: Tensor, folds: int, order: Tensor) -> Tensor:
    """Folds that keep groups together: see `split_groups`.

    Raises:
        UserError: if there are fewer groups than folds.
    """
    count = len(torch.unique(groups))
    if count < folds:
        raise UserError(f"{_FOLDS}: is {folds}, but there are {count} groups to divide\n    allowed: at most {count}")
    return split_groups(classes, groups, [1 / folds] * folds, order)
