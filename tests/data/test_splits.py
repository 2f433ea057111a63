"""Splits are exact, stratified and disjoint; folds partition the data, groups stay together, and leaks are reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from plain_data import Plain, plain_image
from torch.utils.data import Dataset, IterableDataset

from runner.base.errors import UserError
from runner.config.schema.sections import Split
from runner.data.build import shared_groups
from runner.data.sources.folders import image_folder
from runner.data.splits import groups_of, make_splits, split_indices, targets_of

FRACTION = st.one_of(st.just(0.0), st.floats(0.0, 0.6, allow_nan=False), st.sampled_from([0.1, 0.15, 0.25, 1 / 3, 0.5]))
FRACTIONS = st.fixed_dictionaries({}, optional={"val": FRACTION, "test": FRACTION})


def _leaves_some(fractions: dict[str, float], n: int) -> bool:
    return sum(fractions.values()) < 1 and sum(round(share * n) for share in fractions.values()) < n


class Stream(IterableDataset):
    """A data set without a length."""

    def __iter__(self):
        return iter(())


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=12), FRACTIONS, st.integers(-5, 2**62), st.booleans(), st.data()
)
def test_splits_are_disjoint_exhaustive_exact_and_stratified(counts, fractions, seed, stratified, data):
    targets = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    targets = targets[torch.tensor(data.draw(st.permutations(range(len(targets)))))] * 7 - 3
    n = len(targets)
    assume(_leaves_some(fractions, n))
    splits = split_indices(targets if stratified else None, n, fractions, seed)
    assert set(splits) == {"train", *fractions}
    assert torch.equal(torch.cat(list(splits.values())).sort().values, torch.arange(n))
    for name, indices in splits.items():
        assert indices.dtype == torch.int64
        assert torch.equal(indices, indices.sort().values)
        if name == "train":
            continue
        assert len(indices) == round(fractions[name] * n)
        for label, count in enumerate(counts) if stratified else ():
            share = fractions[name] * count
            assert abs(int((targets[indices] == label * 7 - 3).sum()) - share) < 1 + 1e-9


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=30), st.floats(0.3, 0.5), st.floats(0.3, 0.4999))
@example([3, 1, 1, 3], 0.4815, 0.3326)
@example([1, 7, 1, 7, 4, 7, 4], 0.63, 0.28)
def test_tiny_classes_contested_by_both_splits_still_work(counts, val, test):
    targets = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    fractions, n = {"val": val, "test": test}, len(targets)
    assume(_leaves_some(fractions, n))
    splits = split_indices(targets, n, fractions, 0)
    assert [len(splits["val"]), len(splits["test"])] == [round(val * n), round(test * n)]
    for name, share in fractions.items():
        held = torch.bincount(targets[splits[name]], minlength=len(counts))
        assert (held - share * torch.tensor(counts)).abs().max() < 1 + 1e-6


def test_the_split_is_a_function_of_its_arguments_alone():
    targets = torch.arange(200) % 7
    with torch.random.fork_rng():
        torch.manual_seed(1)
        before = torch.get_rng_state()
        first = split_indices(targets, 200, {"val": 0.2, "test": 0.1}, 5)
        assert torch.equal(before, torch.get_rng_state())
        torch.manual_seed(2)
        second = split_indices(targets, 200, {"test": 0.1, "val": 0.2}, 5)
    for name in first:
        assert torch.equal(first[name], second[name])
    assert not torch.equal(first["val"], split_indices(targets, 200, {"val": 0.2, "test": 0.1}, 6)["val"])


@pytest.mark.parametrize("stratified", [False, True])
def test_asking_for_a_test_split_leaves_the_validation_split_as_it_was(stratified):
    targets = torch.arange(1000) % 10 if stratified else None
    alone = split_indices(targets, 1000, {"val": 0.15}, 3)["val"]
    assert torch.equal(alone, split_indices(targets, 1000, {"val": 0.15, "test": 0.3}, 3)["val"])


def test_float_targets_are_split_at_random():
    floats = split_indices(torch.rand(50, generator=torch.Generator()), 50, {"val": 0.2}, 4)
    assert torch.equal(floats["val"], split_indices(None, 50, {"val": 0.2}, 4)["val"])


@pytest.mark.parametrize(
    ("fractions", "n", "message"),
    [
        ({"val": 0.5, "test": 0.5}, 10, r"data\.split\.val=0\.5 and data\.split\.test=0\.5"),
        ({"val": 0.6}, 1, r"no training sample is left of 1: data\.split\.val=0\.6"),
        ({"val": 0.45, "test": 0.45}, 2, "no training sample"),
        ({}, 0, "no training sample"),
    ],
)
def test_fractions_that_cannot_be_are_an_error_with_the_key(fractions, n, message):
    with pytest.raises(UserError, match=message):
        split_indices(None, n, fractions, 0)


def test_missing_splits_are_carved_from_train():
    train = Plain(100, targets=torch.arange(100) % 5)
    found = make_splits({"train": train}, Split(val=0.2, test=0.1, seed=0, stratified=True))
    assert list(found) == ["train", "val", "test"]
    assert all(dataset is train for dataset, _ in found.values())
    assert [len(indices) for _, indices in found.values()] == [70, 20, 10]
    assert torch.equal(torch.bincount(train.targets[found["val"][1]]), torch.full((5,), 4))


@pytest.mark.parametrize(
    ("given", "shares", "sizes"),
    [
        ({"train": 100}, {}, {"train": 70, "val": 10, "test": 20}),
        ({"train": 100, "test": 30}, {}, {"train": 90, "val": 10, "test": 30}),
        ({"train": 100, "test": 30}, {"val": 0.2, "test": 0.5}, {"train": 80, "val": 20, "test": 30}),
        ({"train": 100, "val": 30}, {}, {"train": 100, "val": 30}),
        ({"train": 100, "val": 30}, {"test": 0.2}, {"train": 80, "val": 30, "test": 20}),
        ({"train": 10, "val": 3}, {"val": 5.0, "test": 0}, {"train": 10, "val": 3}),
        ({"train": 10}, {"val": 0, "test": 0}, {"train": 10}),
    ],
)
def test_only_splits_that_the_data_do_not_have_are_taken_from_train(given, shares, sizes):
    datasets = {name: Plain(size) for name, size in given.items()}
    found = make_splits(datasets, Split(**shares))
    assert {name: len(indices) for name, (_, indices) in found.items()} == sizes
    assert list(found) == list(sizes)
    for name in given.keys() - {"train"}:
        assert found[name][0] is datasets[name]
        assert torch.equal(found[name][1][:], torch.arange(given[name]))


PATIENTS = Plain(
    60,
    targets=torch.tensor([0] * 55 + [1] * 5),
    patient=[index // 3 for index in range(60)],
    short=[1, 2, 3],
    name="bars",
    all_one=[7] * 60,
)


@pytest.mark.parametrize(
    ("splits", "keys", "message"),
    [
        ({}, {}, r"gives the splits \[\]"),
        ({"test": Plain(3)}, {}, r"gives the splits \['test'\]"),
        ({"train": Plain(3), "validation": Plain(3)}, {}, r"'validation'\]\n.*allowed: train, and perhaps"),
        ({"train": Plain(0)}, {}, "'train' split is empty"),
        ({"train": Plain(3), "test": Plain(0)}, {}, "'test' split is empty"),
        ({"train": Plain(100, targets=[0] * 99)}, {}, "99 entries for 100"),
        ({"train": Plain(100)}, {"val": 0.001}, r"data\.split\.val: 0\.001 of 100 .*\n.*at least 0\.01"),
        ({"train": Stream()}, {}, "length of its 'train' split is not known: TypeError"),
        ({"train": Plain(10)}, {"val": "test"}, "is test, and the data set has no test split"),
        ({"train": Plain(9), "val": Plain(4), "test": Plain(4)}, {"val": "test"}, "has a validation split of its own"),
        ({"train": Plain(10), "val": Plain(3)}, {"folds": 5}, r"folds: is 5, but this data set has a validation split"),
        ({"train": PATIENTS}, {"folds": 6}, r"folds: is 6, but class number 1 has 5 samples.*\n.*at most 5"),
        ({"train": PATIENTS}, {"folds": 61, "stratified": False}, r"there are 60 samples to divide"),
        ({"train": PATIENTS}, {"folds": 21, "group": "patient"}, r"is 21, but there are 20 groups to divide"),
        ({"train": PATIENTS}, {"group": "doctor"}, r"data\.split\.group: the data set has no attribute 'doctor'"),
        ({"train": PATIENTS}, {"group": "short"}, r"the attribute 'short' of the data set has 3 entries for 60"),
        ({"train": PATIENTS}, {"group": "name"}, r"the attribute 'name' of the data set has a str for 60"),
        ({"train": PATIENTS}, {"group": "all_one"}, r"there are 1 groups, too few or too large for any to be in 'val'"),
    ],
)
def test_data_that_cannot_be_split_is_reported(splits, keys, message):
    with pytest.raises(UserError, match=message):
        make_splits(splits, Split(**{"test": 0, **keys}))


@settings(deadline=None, max_examples=50)
@given(st.integers(2, 5000))
def test_the_suggested_smallest_fraction_is_enough(n):
    with pytest.raises(UserError) as caught:
        make_splits({"train": Plain(n)}, Split(val=1e-9, test=0, seed=0, stratified=False))
    suggested = float(str(caught.value).split("at least ")[1].split(",")[0])
    assert len(make_splits({"train": Plain(n)}, Split(val=suggested, test=0, seed=0, stratified=False))["val"][1]) >= 1


def test_targets_are_found_in_any_container():
    frozen = np.array([0, 1, 2], dtype=np.int32)
    frozen.setflags(write=False)
    for raw in (
        [0, 1, 2],
        (0, 1, 2),
        frozen,
        torch.tensor([0, 1, 2], dtype=torch.int32),
        [torch.tensor(i) for i in range(3)],
    ):
        found = targets_of(Plain(3, targets=raw))
        assert found.dtype == torch.int64
        assert found.tolist() == [0, 1, 2]
    for raw in ([0.5, 1.5], np.array([0.5, 1.5]), torch.tensor([0.5, 1.5], dtype=torch.float64)):
        found = targets_of(Plain(2, targets=raw))
        assert found.dtype == torch.float32
        assert found.tolist() == [0.5, 1.5]


@pytest.mark.parametrize("raw", [None, ["cat", "dog"], [[1], [1, 2]], 3, torch.tensor(3), {"boxes": 1}])
def test_targets_that_are_no_numbers_are_none(raw):
    assert targets_of(Plain(2, targets=raw)) is None


def test_the_test_split_can_be_evaluated_during_training():
    train, test = Plain(10), Plain(4)
    parts = make_splits({"train": train, "test": test}, Split(val="test"))
    assert list(parts) == ["train", "val"]
    assert parts["val"][0] is test
    assert [len(indices) for _, indices in parts.values()] == [10, 4]


# Folds and groups


def indices(dataset: Dataset, **keys: Any) -> dict[str, torch.Tensor]:
    return {name: found[:] for name, (_, found) in make_splits({"train": dataset}, Split(**keys)).items()}


COUNTS = st.lists(st.integers(8, 30), min_size=1, max_size=6)


@settings(deadline=None, max_examples=60)
@given(COUNTS, st.integers(2, 5), st.sampled_from([0.0, 0.2]), st.booleans(), st.integers(0, 9))
def test_folds_partition_what_is_not_for_the_test_and_share_out_every_class(counts, folds, test, stratified, seed):
    targets = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    smallest = int(min(counts) * (1 - test)) - 1 if stratified else sum(counts) - round(test * sum(counts))
    assume(smallest >= folds)
    dataset = Plain(len(targets), targets=targets)
    keys = {"folds": folds, "test": test, "seed": seed, "stratified": stratified}
    found = [indices(dataset, fold=fold, **keys) for fold in range(folds)]
    tests = [splits.get("test", torch.zeros(0, dtype=torch.int64)) for splits in found]
    assert all(torch.equal(tests[0], other) for other in tests)
    assert torch.equal(
        torch.cat([tests[0], *(splits["val"] for splits in found)]).sort().values, torch.arange(len(dataset))
    )
    sizes = [len(splits["val"]) for splits in found]
    assert max(sizes) - min(sizes) <= 1
    for splits in found:
        assert torch.equal(torch.cat(list(splits.values())).sort().values, torch.arange(len(dataset)))
    if stratified:
        shares = torch.stack([torch.bincount(targets[splits["val"]], minlength=len(counts)) for splits in found])
        assert int((shares.max(0).values - shares.min(0).values).max()) <= 1


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 9), min_size=25, max_size=60), st.integers(0, 9), st.booleans(), st.data())
def test_no_group_is_in_two_splits_and_shares_are_kept(sizes, seed, stratified, data):
    groups = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed))
    groups = groups[order]
    targets = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=len(groups), max_size=len(groups))))
    dataset = Plain(len(groups), patient=groups, targets=targets)
    found = indices(dataset, val=0.2, test=0.2, group="patient", seed=seed, stratified=stratified)
    assert torch.equal(torch.cat(list(found.values())).sort().values, torch.arange(len(groups)))
    together = [set(groups[split].tolist()) for split in found.values()]
    assert sum(map(len, together)) == len(sizes)
    for name, share in (("val", 0.2), ("test", 0.2)):
        assert abs(len(found[name]) - share * len(groups)) <= 2 * max(sizes)


def test_folds_of_groups_keep_them_together_and_partition_the_data():
    groups = [f"patient {index // 3}" for index in range(60)]
    targets = torch.tensor([index // 30 for index in range(60)])
    dataset = Plain(60, patient=groups, targets=targets)
    found = [indices(dataset, folds=4, fold=fold, test=0.0, group="patient") for fold in range(4)]
    assert torch.equal(torch.cat([splits["val"] for splits in found]).sort().values, torch.arange(60))
    for splits in found:
        assert len(splits["val"]) == 15
        inside = {groups[index] for index in splits["val"]}
        assert not inside & {groups[index] for index in splits["train"]}
        assert 6 <= int((targets[splits["val"]] == 0).sum()) <= 9


def test_groups_depend_on_the_seed_of_the_split():
    dataset = Plain(90, patient=[index // 3 for index in range(90)])
    first, again, other = (indices(dataset, group="patient", seed=seed)["val"] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("words", "key", "message"),
    [
        (("data.split.folds=5", "data.split.fold=5"), "data.split.fold", "is 5, and there are 5 folds"),
        (("data.split.fold=1",), "data.split.fold", "picks one of several folds, but data.split.folds is null"),
        (("data.split.folds=1",), "data.split.folds", "cannot be 1"),
    ],
)
def test_folds_that_cannot_be_are_reported(problems: Any, words: Any, key: str, message: str):
    assert problems(*words)[key].message == message


def test_a_pattern_tells_the_groups_of_image_files(tmp_path: Path):
    names = [f"{kind}/p{person:02d}_{shot}.png" for kind in ("cat", "dog") for person in range(12) for shot in range(3)]
    for name in names:
        plain_image(tmp_path / "person9_root" / name)
    dataset = image_folder(str(tmp_path / "person9_root"))["train"]
    assert groups_of(dataset, r"p\d+")[:4] == ["p00", "p00", "p00", "p01"]
    assert groups_of(dataset, r"/p(\d+)_")[:4] == ["00", "00", "00", "01"]
    found = indices(dataset, group=r"p\d+")
    people = [{path.name[:3] for path in map(dataset.path, split.tolist())} for split in found.values()]
    assert sum(map(len, people)) == len(set.union(*people)) == 12
    with pytest.raises(
        UserError, match=r"'q\(\[0-9\]\)' is neither an attribute .* nor found in the path cat/p00_0.png"
    ):
        groups_of(dataset, "q([0-9])")
    with pytest.raises(UserError, match="is not a regular expression"):
        groups_of(dataset, "p(")


def test_groups_that_are_in_two_splits_of_the_data_set_are_reported():
    train, test = Plain(30, patient=list(range(30))), Plain(4, patient=[28, 29, 30, 31])
    parts = make_splits({"train": train, "test": test}, Split(group="patient", seed=3))
    warnings = shared_groups(parts, "patient")
    assert sum(int(text.split()[1]) for text in warnings) == 2
    assert all(text.startswith("data.split.group: ") and "in 'test', such as 2" in text for text in warnings)
    del test.patient
    assert shared_groups(parts, "patient")[0].startswith(
        "whether groups are in 'test' and in another split is not known"
    )


def test_a_run_trains_on_its_fold_and_warns_of_leaks(train: Any, tmp_path: Path):
    names = [f"{kind}/p{person}_{shot}.png" for kind in ("cat", "dog") for person in range(6) for shot in range(2)]
    for name in (*(f"train/{name}" for name in names), "test/cat/p3_9.png", "test/dog/q7_9.png"):
        plain_image(tmp_path / name)
    small = ("data.image_size=8", "model=mlp", "model.hidden=[4]", "epochs=1", "transform=none", "data.num_workers=0")
    small += ("data.batch_size=8", f"data.root={tmp_path}")
    result = train(
        "data=image_folder", *small, "data.split.folds=3", "data.split.fold=2", "data.split.group='[pq][0-9]+'"
    )
    assert "16 train, 8 val, 2 test" in result.out
    assert "data.split.group: 1 group is in" in result.out
    assert "'test', such as p3" in result.out
    parts = ["train", "train", "val"]
    rows = [f"train/{name},{name[:3]},{parts[place % 3]}\n" for place, name in enumerate(names)]
    again = f"train/{names[2]},cat,train\n"
    (tmp_path / "labels.csv").write_text("".join(["image,label,part\n", *rows, again]))
    result = train("data=csv", *small, "data.dataset.split_column=part", "data.split.test=0")
    assert f"data.dataset: 1 file is in 'train' and in 'val', such as {tmp_path}/train/{names[2]}; list" in result.out
