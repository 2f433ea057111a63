"""Splitting and carving."""

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from plain_data import Plain
from torch.utils.data import IterableDataset

from runner.base.errors import UserError
from runner.config.schema.sections import Split
from runner.data.splits import make_splits, split_indices, targets_of

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
    splits = split_indices(targets, n, fractions, seed, stratified)
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
    splits = split_indices(targets, n, fractions, 0, stratified=True)
    assert [len(splits["val"]), len(splits["test"])] == [round(val * n), round(test * n)]
    for name, share in fractions.items():
        held = torch.bincount(targets[splits[name]], minlength=len(counts))
        assert (held - share * torch.tensor(counts)).abs().max() < 1 + 1e-6


def test_the_split_is_a_function_of_its_arguments_alone():
    targets = torch.arange(200) % 7
    with torch.random.fork_rng():
        torch.manual_seed(1)
        before = torch.get_rng_state()
        first = split_indices(targets, 200, {"val": 0.2, "test": 0.1}, 5, True)
        assert torch.equal(before, torch.get_rng_state())
        torch.manual_seed(2)
        second = split_indices(targets, 200, {"test": 0.1, "val": 0.2}, 5, True)
    for name in first:
        assert torch.equal(first[name], second[name])
    assert not torch.equal(first["val"], split_indices(targets, 200, {"val": 0.2, "test": 0.1}, 6, True)["val"])


@pytest.mark.parametrize("stratified", [False, True])
def test_asking_for_a_test_split_leaves_the_validation_split_as_it_was(stratified):
    targets = torch.arange(1000) % 10
    alone = split_indices(targets, 1000, {"val": 0.15}, 3, stratified)["val"]
    assert torch.equal(alone, split_indices(targets, 1000, {"val": 0.15, "test": 0.3}, 3, stratified)["val"])


def test_float_targets_are_split_at_random():
    floats = split_indices(torch.rand(50, generator=torch.Generator()), 50, {"val": 0.2}, 4, True)
    assert torch.equal(floats["val"], split_indices(None, 50, {"val": 0.2}, 4, False)["val"])


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
        split_indices(None, n, fractions, 0, False)


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


@pytest.mark.parametrize(
    ("splits", "val", "message"),
    [
        ({}, 0.1, r"gives the splits \[\]"),
        ({"test": Plain(3)}, 0.1, r"gives the splits \['test'\]"),
        ({"train": Plain(3), "validation": Plain(3)}, 0.1, r"'validation'\]\n.*allowed: train, and perhaps"),
        ({"train": Plain(0)}, 0.1, "'train' split is empty"),
        ({"train": Plain(3), "test": Plain(0)}, 0.1, "'test' split is empty"),
        ({"train": Plain(100, targets=[0] * 99)}, 0.1, "99 entries for 100"),
        ({"train": Plain(100)}, 0.001, r"data\.split\.val: 0\.001 of 100 .*\n.*at least 0\.01"),
        ({"train": Stream()}, 0.1, "length of its 'train' split is not known: TypeError"),
    ],
)
def test_data_that_cannot_be_split_is_reported(splits, val, message):
    with pytest.raises(UserError, match=message):
        make_splits(splits, Split(val=val, test=0, seed=0, stratified=True))


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


@pytest.mark.parametrize("raw", [None, ["cat", "dog"], [[1], [1, 2]], 3, {"boxes": 1}])
def test_targets_that_are_no_numbers_are_none(raw):
    assert targets_of(Plain(2, targets=raw)) is None


def test_the_test_split_can_be_evaluated_during_training():
    train, test = Plain(10), Plain(4)
    parts = make_splits({"train": train, "test": test}, Split(val="test"))
    assert list(parts) == ["train", "val"]
    assert parts["val"][0] is test
    assert [len(indices) for _, indices in parts.values()] == [10, 4]
    for datasets in ({"train": train}, {"train": train, "val": test, "test": test}):
        with pytest.raises(UserError, match="is test, and the data set has"):
            make_splits(datasets, Split(val="test"))
