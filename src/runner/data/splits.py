"""Which samples are trained on and which are held out: pure functions of the data, the fractions and the seed.

Own code instead of `sklearn.model_selection`: the samples of a split for a given seed must never change, and the exact
sizes per class are a promise; scikit-learn draws other samples, and rounds otherwise.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.base.errors import UserError
from runner.config.schema.sections import TEST_SHARE, Split
from runner.data.sampler import AllSamples, Indices

_MOST_SAMPLES = 10**9  # their order takes 8 GB
_HELD_OUT = ("val", "test")
# Keeps the split apart from every other permutation that is drawn from the same seed.
_SALT = 0x5B117

Parts = Mapping[str, tuple[Dataset[Any], Indices]]
"""For each split the data set that it is read from, and its samples in it."""


def make_splits(datasets: Mapping[str, Dataset[Any]], split: Split) -> dict[str, tuple[Dataset[Any], Indices]]:
    """Complete the splits of a data set: those that it does not have are taken from 'train'.

    Returns 'train', 'val' and 'test', if they exist, in this order, with ascending indices. A split of the data set is used
    whole, whatever the fractions; it has no list of indices, so it may have any size. Raises `UserError` if 'train' is missing,
    a split is empty or has an unknown name, a fraction gives no sample, or folds or groups cannot be made.
    """
    if not {"train"} <= datasets.keys() <= {"train", *_HELD_OUT}:
        raise UserError("data.dataset", f"gives the splits {[*datasets]}", "train, and perhaps val and test")
    found: dict[str, tuple[Dataset[Any], Indices]] = {
        name: (dataset, AllSamples(_length(name, dataset))) for name, dataset in datasets.items()
    }
    if split.val == "test":
        if "test" not in datasets or "val" in datasets:
            has = "has no test split" if "test" not in datasets else "has a validation split of its own"
            raise UserError("data.split.val", f"is test, and the data set {has}", "a fraction, or such a data set")
        found["val"] = found.pop("test")
        return {"train": found["train"], "val": found["val"]}
    source, n = datasets["train"], len(found["train"][1])
    # Folds make a validation split themselves, so a second one would compete
    if split.folds is not None and "val" in datasets:
        raise UserError("data.split.folds", f"is {split.folds}, but this data set has a validation split of its own")
    # Who brings a validation split trains on all the rest.
    test = split.test if split.test is not None else 0.0 if "val" in datasets else TEST_SHARE
    wanted = {"val": split.val if split.folds is None else 1 / split.folds, "test": test}
    fractions = {name: share for name, share in wanted.items() if name not in datasets and share != 0}
    if fractions:
        targets = targets_of(source) if split.stratified else None
        if targets is not None and len(targets) != n:
            problem = f"its attribute targets has {len(targets)} entries for {n} samples of 'train'"
            raise UserError("data.dataset", problem, "one target for each sample, or no such attribute")
        groups = _numbered(groups_of(source, split.group)) if split.group is not None else None
        for name, indices in _divided(targets, groups, n, fractions, split).items():
            if len(indices) == 0:
                # An empty split would fail at its first evaluation
                problem = f"{fractions[name]} of {n} training samples is not even one"
                least = math.ceil(1000 / n) / 1000
                raise UserError(f"data.split.{name}", problem, f"at least {least:g}, or 0 for no such split")
            found[name] = source, indices
    return {name: found[name] for name in ("train", *_HELD_OUT) if name in found}


def _length(name: str, dataset: Dataset[Any]) -> int:
    try:
        size = len(dataset)  # type: ignore[arg-type]
    except Exception as error:  # user code can raise anything
        problem = f"the length of its '{name}' split is not known: {type(error).__name__}: {error}"
        raise UserError("data.dataset", problem, "a map-style data set with __len__ and __getitem__") from error
    if not 0 < size <= _MOST_SAMPLES:
        much = f"has {size:,} samples, and at most {_MOST_SAMPLES:,} are read" if size else "is empty"
        raise UserError("data.dataset", f"its '{name}' split {much}")
    return size


def targets_of(dataset: Dataset[Any]) -> Tensor | None:
    """The attribute `targets` of a data set on the CPU, int64 for whole numbers and float32 for others.

    None if there is none, or it holds no numbers.
    """
    raw = getattr(dataset, "targets", None)
    if isinstance(raw, Tensor) and raw.ndim:
        tensor = raw.detach().cpu()
        return tensor.float() if tensor.is_floating_point() else tensor.long()
    try:
        array = np.asarray(raw)
    except ValueError:
        return None
    if array.dtype.kind not in "biuf" or array.ndim == 0:
        return None
    return torch.from_numpy(array.astype(np.float32 if array.dtype.kind == "f" else np.int64))


def _divided(
    targets: Tensor | None, groups: Tensor | None, n: int, fractions: Mapping[str, float], split: Split
) -> dict[str, Tensor]:
    """`split_indices`, with a fold for validation if there are folds.

    The test split is set apart first, so that it is the same for every fold; the rest is divided into folds.
    """
    # With folds, the validation split is not a share but a fold of what is left
    shares = {name: share for name, share in fractions.items() if name != "val" or split.folds is None}
    splits = split_indices(targets, n, shares, split.seed, groups)
    if split.folds is None:
        return splits
    # Folds divide what is left, so that every fold is tested on the same samples.
    rest = splits["train"]
    place, classes = _order(len(rest), split.seed), _strata(targets, n)[rest]
    if groups is None:
        fold = _stratified_folds(classes, split.folds, place)
    else:
        groups = _numbered(groups[rest].tolist())
        if (count := int(groups.max()) + 1) < split.folds:
            problem = f"is {split.folds}, but there are {count} groups to divide"
            raise UserError("data.split.folds", problem, f"at most {count}")
        fold = split_groups(classes, groups, [1 / split.folds] * split.folds, place)
    return splits | {"train": rest[fold != split.fold], "val": rest[fold == split.fold]}


def split_indices(
    targets: Tensor | None, n: int, fractions: Mapping[str, float], seed: int, groups: Tensor | None = None
) -> dict[str, Tensor]:
    """Divide samples 0 .. n-1 into 'train' and the held-out splits named in `fractions`.

    Every held-out split has exactly `round(fraction * n)` samples; with targets, the count of every class in it is within
    one of `fraction` times the size of the class (largest remainders). Changing the fraction of 'test' alone keeps 'val',
    unless classes are so small that both compete for the last sample. With `groups`, see `split_groups` instead.

    `targets` are integer classes (n,) to stratify by; None, floats or more dimensions mean a plain random split. The global
    random state is neither read nor changed. Returns int64 indices in ascending order for 'train' and each key of
    `fractions`. Raises `UserError` if no training sample would be left, or a split would have no group.
    """
    names = [name for name in _HELD_OUT if name in fractions]
    shares, sizes = [fractions[name] for name in names], [round(fractions[name] * n) for name in names]
    if sum(shares) >= 1 or sum(sizes) >= n:
        given = " and ".join(f"data.split.{name}={fraction}" for name, fraction in fractions.items())
        raise UserError("data.split", f"no training sample is left of {n}: {given or 'nothing'} held out")
    order, classes = _order(n, seed), _strata(targets, n)
    if groups is None:
        counts = torch.bincount(classes)
        amounts = _apportion(counts.numpy(), shares, sizes)
        taken = torch.from_numpy(np.vstack([amounts, counts.numpy() - amounts.sum(0)]).T.reshape(-1))
        # Of each class, in random order, the first ones go to the first held-out split, and the last ones to training, number 0
        places, number = torch.tensor([*range(1, len(names) + 1), 0]).repeat(len(counts)), torch.empty_like(classes)
        number[order[torch.sort(classes[order], stable=True).indices]] = places.repeat_interleave(taken)
    else:
        # A patient or a scene must be in one split only, or the test would measure memory
        number = split_groups(classes, groups, [1 - sum(shares), *shares], order)
    splits = {name: (number == place).nonzero()[:, 0] for place, name in enumerate(["train", *names])}
    if groups is not None and (empty := next((name for name, indices in splits.items() if not len(indices)), "")):
        problem = f"there are {int(groups.max()) + 1} groups, too few or too large for any to be in '{empty}'"
        raise UserError("data.split.group", problem, "other shares, or 0 for no such split")
    return splits


def _order(n: int, seed: int) -> Tensor:
    """A random permutation of n samples, int64 (n,), that depends on the seed of the split alone."""
    generator = torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + _SALT) % 2**63)
    return torch.randperm(n, generator=generator)


def _strata(targets: Tensor | None, n: int) -> Tensor:
    """The class of each sample, int64 (n,) from 0 on; all 0 where the targets are not classes."""
    if targets is None or targets.dim() != 1 or targets.is_floating_point():
        return torch.zeros(n, dtype=torch.int64)
    classes: Tensor = torch.unique(targets.cpu(), return_inverse=True)[1]
    return classes


def _apportion(counts: np.ndarray, fractions: list[float], sizes: list[int]) -> np.ndarray:
    """The number of samples of each class that go to each of at most two splits, int64 (splits, classes).

    Every entry is its share rounded down or up, every split has its exact size, and no class gives more than it has.
    What a split lacks when all is rounded down comes from the classes with the largest remainders. Only a class whose
    training share is below one may be unable to give one more to both splits: the first split takes so few of these
    contested classes that enough are left for the second.
    """
    shares = np.outer(fractions, counts)
    amounts = np.floor(shares).astype(np.int64)
    remainders = shares - amounts
    for turn, size in enumerate(sizes):
        spare, later = counts - amounts.sum(0), slice(turn + 1, turn + 2)
        can_give = (remainders[later] > 0).any(0) & (spare > 0)
        # Samples that the next split needs are not all given to this one
        allowed = int(can_give.sum()) - (sum(sizes[later]) - int(amounts[later].sum()))
        order = np.argsort(-remainders[turn], kind="stable")
        order = order[((remainders[turn] > 0) & (spare > 0))[order]]
        contested = (can_give & (spare == 1))[order]
        chosen = order[~contested | (np.cumsum(contested) <= allowed)][: size - int(amounts[turn].sum())]
        amounts[turn, chosen] += 1
        assert amounts[turn].sum() == size, "every split finds its samples"
    return amounts


def groups_of(dataset: Dataset[Any], group: str) -> list[str]:
    """The group of each sample of a data set, as text.

    `group` is an attribute of the data set with a group for each sample; or a regular expression that is searched for in the
    path of each file of `dataset.paths`, relative to their common folder: its first group in parentheses, or the whole match.
    Raises `UserError` if the data set has neither, the numbers differ, or a file does not match.
    """
    key, samples = "data.split.group", len(dataset)  # type: ignore[arg-type]
    # An attribute of the data set comes before a pattern, as it states the groups itself
    if group.isidentifier() and hasattr(dataset, group):
        values = getattr(dataset, group)
        values = values.tolist() if isinstance(values, Tensor | np.ndarray) else values
        counted = isinstance(values, Sequence) and not isinstance(values, str)
        if not counted or len(values) != samples:
            count = f"{len(values)} entries" if counted else f"a {type(values).__name__}"
            raise UserError(key, f"the attribute '{group}' of the data set has {count} for {samples} samples")
        return [str(value) for value in values]
    if not hasattr(dataset, "paths"):
        problem = f"the data set has no attribute '{group}', and no files whose paths a pattern could match"
        raise UserError(key, problem, "null, an attribute with a group for each sample, or image files")
    try:
        pattern = re.compile(group)
    except re.error as error:
        raise UserError(key, f"'{group}' is not a regular expression: {error}", "such as '(patient[0-9]+)'") from error
    # Names are relative to the common folder, so that a pattern does not match where the data happen to lie
    paths = [Path(path) for path in dataset.paths]
    common = os.path.commonpath([path.parent for path in paths])
    found = []
    for path in paths:
        name = Path(os.path.relpath(path, common)).as_posix()
        match = pattern.search(name)
        if match is None:
            problem = f"'{pattern.pattern}' is neither an attribute of the data set nor found in the path {name}"
            raise UserError(key, problem, "groups, an attribute" if hasattr(dataset, "groups") else "")
        found.append(match[1] if pattern.groups and match[1] is not None else match[0])
    return found


def _numbered(groups: Sequence[Any]) -> Tensor:
    """Groups as numbers from 0 on, int64 (N,), in the order in which they first occur."""
    known = {name: number for number, name in enumerate(dict.fromkeys(groups))}
    return torch.tensor([known[name] for name in groups], dtype=torch.int64)


def split_groups(classes: Tensor, groups: Tensor, shares: Sequence[float], order: Tensor) -> Tensor:
    """Assign whole groups to splits, so that each split has about its share of every class.

    Large groups go first, those of one size in random order; each to the split that lacks most of what the group has. So no
    split is further from its share than the groups are large.

    `classes` and `groups` are those of each sample, int64 (N,) from 0 on, classes all 0 for none; `shares` are together 1;
    `order` is a random permutation of the samples. Returns the number of the split of each sample, int64 (N,).
    """
    # How many samples of each class each group has
    count, kinds = int(groups.max()) + 1, int(classes.max()) + 1
    table = np.zeros((count, kinds))
    np.add.at(table, (groups.numpy(), classes.numpy()), 1)
    totals = table.sum(0)
    lacking = np.outer(np.asarray(shares), totals)
    # A group is placed in the random order by its first sample.
    place = np.full(count, len(groups))
    np.minimum.at(place, groups[order].numpy(), np.arange(len(groups)))
    of_group = np.zeros(count, dtype=np.int64)
    # Large groups first, as small ones can still fill the gaps that these leave
    for group in sorted(range(count), key=lambda group: (-table[group].sum(), place[group])):
        needs = (lacking * table[group] / np.maximum(totals, 1)).sum(1)
        # Rounded, so that ties are ties, and go to the smaller split.
        chosen = max(range(len(shares)), key=lambda split: (round(needs[split], 9), lacking[split].sum()))
        lacking[chosen] -= table[group]
        of_group[group] = chosen
    return torch.from_numpy(of_group)[groups]


def _stratified_folds(classes: Tensor, folds: int, order: Tensor) -> Tensor:
    """The fold of each sample, int64 (N,): folds, and each class in them, differ by at most one sample in size."""
    counts = torch.bincount(classes)
    scarce = ((counts < folds) & (counts > 0)).nonzero()[:, 0].tolist()
    if scarce:
        of_class = f"class number {scarce[0]} has" if len(counts) > 1 else "there are"
        allowed = f"at most {int(counts[counts > 0].min())}" + ", or data.split.stratified=false" * (len(counts) > 1)
        problem = f"is {folds}, but {of_class} {int(counts[scarce[0]])} samples to divide"
        raise UserError("data.split.folds", problem, allowed)
    fold = torch.empty_like(classes)
    fold[order[torch.sort(classes[order], stable=True).indices]] = torch.arange(len(classes)) % folds
    return fold
