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

    `group` is an attribute of the data set with a group for each sample; or a regular expression that is searched for in the
    path of each file of `dataset.paths`, relative to their common folder: its first group in parentheses, or the whole match.

    Raises:
        UserError: if the data set has neither, the numbers differ, or a file does not match.
    """
    samples = len(dataset)  # type: ignore[arg-type]
    if group.isidentifier() and hasattr(dataset, group):
        values = getattr(dataset, group)
        values = values.tolist() if isinstance(values, Tensor | np.ndarray) else values
        counted = isinstance(values, Sequence) and not isinstance(values, str)
        if not counted or len(values) != samples:
            count = f"{len(values)} entries" if counted else f"a {type(values).__name__}"
            problem = f"the attribute '{group}' of the data set has {count} for {samples} samples"
            raise UserError(_KEY, problem, "an attribute with a group for each sample")
        return [str(value) for value in values]
    if not hasattr(dataset, "paths"):
        problem = f"the data set has no attribute '{group}', and no files whose paths a pattern could match"
        raise UserError(_KEY, problem, "null, an attribute with a group for each sample, or image files")
    try:
        pattern = re.compile(group)
    except re.error as error:
        problem = f"'{group}' is no regular expression: {error}"
        raise UserError(_KEY, problem, "for example '(patient[0-9]+)'") from error
    paths = [Path(path) for path in dataset.paths]
    common = os.path.commonpath([path.parent for path in paths])
    found = []
    for path in paths:
        name = Path(os.path.relpath(path, common)).as_posix()
        match = pattern.search(name)
        if match is None:
            problem = f"'{pattern.pattern}' is not found in {name}"
            raise UserError(_KEY, problem, "a pattern found in the path of every file, or an attribute of the data set")
        found.append(match[1] if pattern.groups and match[1] is not None else match[0])
    return found


def numbered(groups: Sequence[str]) -> Tensor:
    """Groups as numbers from 0 on, int64 (N,), in the order in which they first occur."""
    known = {name: number for number, name in enumerate(dict.fromkeys(groups))}
    return torch.tensor([known[name] for name in groups], dtype=torch.int64)


def split_groups(classes: Tensor, groups: Tensor, shares: Sequence[float], order: Tensor) -> Tensor:
    """Assign whole groups to splits, so that each split has about its share of every class.

    Large groups go first, those of one size in random order; each to the split that lacks most of what the group has. So no
    split is further from its share than the groups are large.

    Args:
        classes, groups: of each sample, int64 (N,) from 0 on; classes all 0 for none.
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
    # A group is placed in the random order by its first sample.
    place = np.full(count, len(groups))
    np.minimum.at(place, groups[order].numpy(), np.arange(len(groups)))
    of_group = np.zeros(count, dtype=np.int64)
    for group in sorted(range(count), key=lambda group: (-table[group].sum(), place[group])):
        needs = (lacking * table[group] / np.maximum(totals, 1)).sum(1)
        # Rounded, so that ties are ties, and go to the smaller split.
        chosen = max(range(len(shares)), key=lambda split: (round(needs[split], 9), lacking[split].sum()))
        lacking[chosen] -= table[group]
        of_group[group] = chosen
    return torch.from_numpy(of_group)[groups]


def stratified_folds(classes: Tensor, folds: int, order: Tensor) -> Tensor:
    """The fold of each sample, int64 (N,): folds, and each class in them, differ by at most one sample in size.

    `classes` and `order` are as for `split_groups`. Raises `UserError` if a class has fewer samples than there are folds.
    """
    counts = torch.bincount(classes)
    scarce = ((counts < folds) & (counts > 0)).nonzero()[:, 0].tolist()
    if scarce:
        of_class = f"class number {scarce[0]} has" if len(counts) > 1 else "there are"
        allowed = f"at most {int(counts[counts > 0].min())}" + ", or data.split.stratified=false" * (len(counts) > 1)
        raise UserError(_FOLDS, f"is {folds}, but {of_class} {int(counts[scarce[0]])} samples to divide", allowed)
    sorted_places = order[torch.sort(classes[order], stable=True).indices]
    fold = torch.empty_like(classes)
    fold[sorted_places] = torch.arange(len(classes)) % folds
    return fold


def group_folds(classes: Tensor, groups: Tensor, folds: int, order: Tensor) -> Tensor:
    """Folds that keep groups together, see `split_groups`; raises `UserError` if there are fewer groups than folds."""
    count = len(torch.unique(groups))
    if count < folds:
        raise UserError(_FOLDS, f"is {folds}, but there are {count} groups to divide", f"at most {count}")
    return split_groups(classes, groups, [1 / folds] * folds, order)
