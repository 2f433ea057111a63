"""Which samples are trained on and which are held out: pure functions of the data, the fractions and the seed.

Own code instead of `sklearn.model_selection`: the samples of a split for a given seed must never change, and the exact
sizes per class are a promise; scikit-learn draws other samples, and rounds otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.config.errors import UserError
from runner.config.schema.sections import Split
from runner.data.groups import group_folds, groups_of, numbered, split_groups, stratified_folds
from runner.data.sampler import AllSamples, Indices

_MOST_SAMPLES = 10**9  # their order takes 8 GB
_HELD_OUT = ("val", "test")
# Keeps the split apart from every other permutation that is drawn from the same seed.
_SALT = 0x5B117


def split_indices(
    targets: Tensor | None, n: int, fractions: Mapping[str, float], seed: int, stratified: bool
) -> dict[str, Tensor]:
    """Divide samples 0 .. n-1 into 'train' and the held-out splits named in `fractions`.

    Every held-out split has exactly `round(fraction * n)` samples; if stratified, the count of every class in it is within
    one of `fraction` times the size of the class (largest remainders). Changing the fraction of 'test' alone keeps 'val',
    unless classes are so small that both compete for the last sample.

    Args:
        targets: (n,) integer classes to stratify by; None, floats or more dimensions mean a plain random split.
        n: number of samples.
        fractions: share of 'val' and of 'test', from 0 on, together below 1.
        seed: seed of the private generator; the global random state is neither read nor changed.
        stratified: whether classes keep their proportions.

    Returns:
        int64 indices in ascending order for 'train' and each key of `fractions`.

    Raises:
        UserError: if a fraction is out of range or no training sample would be left.
    """
    if not set(fractions) <= set(_HELD_OUT):
        raise ValueError(f"fractions are for {' and '.join(_HELD_OUT)}, got {sorted(fractions)}")
    if targets is not None and len(targets) != n:
        raise ValueError(f"there are {len(targets)} targets for {n} samples")
    sizes = _checked_sizes(fractions, n)
    order, classes = _order(n, seed), _strata(targets if stratified else None, n)
    counts = torch.bincount(classes)
    names = [name for name in _HELD_OUT if name in fractions]
    taken = _apportion(counts.numpy(), [fractions[name] for name in names], [sizes[name] for name in names])

    # Within its class, the rank of a sample in the random order decides where it goes.
    grouped = order[torch.sort(classes[order], stable=True).indices]
    first_of_class = torch.cumsum(counts, 0) - counts
    rank = torch.arange(n) - first_of_class[classes[grouped]]
    start = torch.zeros_like(counts)
    splits = {}
    for name, amounts in zip(names, taken, strict=True):
        stop = start + torch.from_numpy(amounts)
        chosen = (rank >= start[classes[grouped]]) & (rank < stop[classes[grouped]])
        splits[name] = grouped[chosen].sort().values
        start = stop
    train = grouped[rank >= start[classes[grouped]]].sort().values
    return {"train": train, **splits}


def _order(n: int, seed: int) -> Tensor:
    """A random permutation of n samples, int64 (n,), that depends on the seed of the split alone."""
    generator = torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + _SALT) % 2**63)
    return torch.randperm(n, generator=generator)


def _strata(targets: Tensor | None, n: int) -> Tensor:
    """The class of each sample, int64 (n,) from 0 on; all 0 where the targets are no classes."""
    if targets is None or targets.dim() != 1 or targets.is_floating_point():
        return torch.zeros(n, dtype=torch.int64)
    classes: Tensor = torch.unique(targets.cpu(), return_inverse=True)[1]
    return classes


def _divided(
    targets: Tensor | None, groups: Tensor | None, n: int, fractions: Mapping[str, float], split: Split
) -> dict[str, Tensor]:
    """`split_indices`, or the same with groups kept together, or with a fold for validation.

    The test split is set apart first, so that it is the same for every fold; the rest is divided into folds.
    """
    shares = {name: share for name, share in fractions.items() if name != "val" or split.folds is None}
    if groups is None:
        splits = split_indices(targets, n, shares, split.seed, split.stratified)
    else:
        splits = _whole_groups(targets, groups, n, shares, split)
    if split.folds is None:
        return splits
    rest = splits["train"]
    place, classes = _order(len(rest), split.seed), _strata(targets if split.stratified else None, n)[rest]
    if groups is None:
        fold = stratified_folds(classes, split.folds, place)
    else:
        fold = group_folds(classes, numbered(groups[rest].tolist()), split.folds, place)
    return splits | {"train": rest[fold != split.fold], "val": rest[fold == split.fold]}


def _whole_groups(
    targets: Tensor | None, groups: Tensor, n: int, fractions: Mapping[str, float], split: Split
) -> dict[str, Tensor]:
    _checked_sizes(fractions, n)
    classes = _strata(targets if split.stratified else None, n)
    shares = [1 - sum(fractions.values()), *fractions.values()]
    number = split_groups(classes, groups, shares, _order(n, split.seed))
    splits = {name: (number == place).nonzero()[:, 0] for place, name in enumerate(["train", *fractions])}
    for name, indices in splits.items():
        if len(indices) == 0:
            problem = f"there are {int(groups.max()) + 1} groups, too few or too large for any to be in '{name}'"
            raise UserError("data.split.group", problem, "more groups, other shares, or a share of 0 for no such split")
    return splits


def make_splits(datasets: Mapping[str, Dataset[Any]], split: Split) -> dict[str, tuple[Dataset[Any], Indices]]:
    """Complete the splits of a data set: those that it does not have are taken from 'train'.

    Returns:
        For each of 'train', 'val', 'test' that exists, in this order, the data set that it is read from and its indices,
        ascending. A split of the data set is used whole, whatever the fractions; it has no list of indices, so it may have any
        size.

    Raises:
        UserError: if 'train' is missing, a split is empty or has an unknown name, a fraction is out of range, a
            fraction above 0 gives no sample, or folds or groups cannot be made.
    """
    for name in datasets:
        if name not in ("train", *_HELD_OUT):
            raise UserError("data.dataset", f"it gives a split named '{name}'", "train, val and test")
    if "train" not in datasets:
        raise UserError("data.dataset", f"it gives no 'train' split, only {', '.join(datasets) or 'nothing'}")
    sizes = {name: _length(name, dataset) for name, dataset in datasets.items()}
    source, n = datasets["train"], sizes["train"]
    if split.folds is not None and "val" in datasets:
        problem = f"is {split.folds}, but this data set has a validation split of its own"
        raise UserError("data.split.folds", problem, "null")
    wanted = {"val": split.val if split.folds is None else 1 / split.folds, "test": split.test}
    fractions = {name: share for name, share in wanted.items() if name not in datasets and share != 0}
    found: dict[str, tuple[Dataset[Any], Indices]] = {"train": (source, AllSamples(n))}
    if fractions:
        targets = targets_of(source) if split.stratified else None
        if targets is not None and len(targets) != n:
            problem = f"its attribute targets has {len(targets)} entries for {n} samples of 'train'"
            raise UserError("data.dataset", problem, "one target for each sample, or no such attribute")
        groups = numbered(groups_of(source, split.group)) if split.group is not None else None
        for name, indices in _divided(targets, groups, n, fractions, split).items():
            if len(indices) == 0:
                problem = f"{fractions[name]} of {n} training samples is not even one"
                allowed = f"at least {math.ceil(1000 / n) / 1000:g}, or 0 for no such split"
                raise UserError(f"data.split.{name}", problem, allowed)
            found[name] = source, indices
    found |= {name: (datasets[name], AllSamples(sizes[name])) for name in _HELD_OUT if name in datasets}
    return {name: found[name] for name in ("train", *_HELD_OUT) if name in found}


def targets_of(dataset: Dataset[Any]) -> Tensor | None:
    """The attribute `targets` of a data set on the CPU, int64 for whole numbers and float32 for others.

    None if there is none, or it holds no numbers.
    """
    raw = getattr(dataset, "targets", None)
    if raw is None:
        return None
    if isinstance(raw, Tensor):
        tensor = raw.detach().cpu()
        return tensor.float() if tensor.is_floating_point() else tensor.long()
    try:
        array = np.asarray(raw)
    except ValueError:
        return None
    if array.dtype.kind not in "biuf" or array.ndim == 0:
        return None
    return torch.from_numpy(array.astype(np.float32 if array.dtype.kind == "f" else np.int64))


def _checked_sizes(fractions: Mapping[str, float], n: int) -> dict[str, int]:
    for name, fraction in fractions.items():
        if not 0 <= fraction < 1:
            raise UserError(f"data.split.{name}", f"cannot be {fraction}", "a fraction from 0 to below 1")
    given = " and ".join(f"data.split.{name}={fraction}" for name, fraction in fractions.items())
    if sum(fractions.values()) >= 1:
        raise UserError("data.split", f"{given} leave no training sample", "fractions that are together below 1")
    sizes = {name: round(fraction * n) for name, fraction in fractions.items()}
    if n - sum(sizes.values()) < 1:
        reason = f"{given} hold out all of them" if sizes else "the data set is empty"
        raise UserError("data.split", f"no training sample is left of {n}: {reason}")
    return sizes


def _apportion(counts: np.ndarray, fractions: list[float], sizes: list[int]) -> list[np.ndarray]:
    """How many samples of each class go to each of at most two splits, int64 (classes,) for each split.

    Every entry is its share rounded down or up, every split has its exact size, and no class gives more than it has.
    What a split lacks when all is rounded down comes from the classes with the largest remainders. Only a class whose
    training share is below one may be unable to give one more to both splits: the first split takes so few of these
    contested classes that enough are left for the second.
    """
    shares = [fraction * counts for fraction in fractions]
    amounts = [np.floor(share).astype(np.int64) for share in shares]
    remainders = [share - amount for share, amount in zip(shares, amounts, strict=True)]
    spare = counts - sum(amounts, start=np.zeros_like(counts))
    for turn, (amount, remainder) in enumerate(zip(amounts, remainders, strict=True)):
        lacking = sizes[turn] - int(amount.sum())
        open_classes = (remainder > 0) & (spare > 0)
        contested, allowed = np.zeros_like(open_classes), 0
        for later in range(turn + 1, len(amounts)):
            wanted = sizes[later] - int(amounts[later].sum())
            can_give = (remainders[later] > 0) & (spare > 0)
            contested = open_classes & can_give & (spare == 1)
            allowed = int(can_give.sum()) - wanted
        for index in np.argsort(-remainder, kind="stable"):
            if lacking == 0:
                break
            if not open_classes[index] or (contested[index] and allowed == 0):
                continue
            allowed -= int(contested[index])
            amount[index] += 1
            spare[index] -= 1
            lacking -= 1
        assert lacking == 0, "every split finds its samples"
    return amounts


def _length(name: str, dataset: Dataset[Any]) -> int:
    try:
        size = len(dataset)  # type: ignore[arg-type]
    except TypeError:
        problem = f"its '{name}' split has no length"
        raise UserError("data.dataset", problem, "a map-style data set with __len__ and __getitem__") from None
    except Exception as error:
        problem = f"the length of its '{name}' split is not known: {type(error).__name__}: {error}"
        raise UserError("data.dataset", problem, "a data set whose __len__ gives the number of its samples") from error
    if size > _MOST_SAMPLES:
        raise UserError("data.dataset", f"its '{name}' split has {size:,} samples", f"at most {_MOST_SAMPLES:,}")
    if size == 0:
        raise UserError("data.dataset", f"its '{name}' split is empty")
    return size
