"""Folds partition the data, groups stay together, and what is in two splits is reported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image
from plain_data import Plain
from torch.utils.data import Dataset

from runner.base.errors import UserError
from runner.config.schema.sections import Split
from runner.data.build import shared_groups
from runner.data.sources.folders import image_folder
from runner.data.splits import groups_of, make_splits


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
    ("keys", "words"),
    [
        ({"folds": 6, "test": 0}, r"data\.split\.folds: is 6, but class number 1 has 5 samples.*\n.*at most 5"),
        ({"folds": 61, "test": 0, "stratified": False}, r"there are 60 samples to divide"),
        ({"folds": 21, "test": 0, "group": "patient"}, r"is 21, but there are 20 groups to divide"),
        ({"group": "doctor"}, r"data\.split\.group: the data set has no attribute 'doctor'"),
        ({"group": "short"}, r"the attribute 'short' of the data set has 3 entries for 60"),
        ({"group": "name"}, r"the attribute 'name' of the data set has a str for 60"),
        ({"group": "all_one"}, r"there are 1 groups, too few or too large for any to be in 'val'"),
    ],
)
def test_what_cannot_be_divided_is_reported(keys: dict[str, Any], words: str):
    patients = [index // 3 for index in range(60)]
    names: Any = {"patient": patients, "short": [1, 2, 3], "name": "bars", "all_one": [7] * 60}
    dataset = Plain(60, targets=torch.tensor([0] * 55 + [1] * 5), **names)
    with pytest.raises(UserError, match=words):
        indices(dataset, **keys)


def test_folds_of_a_data_set_with_validation_samples_are_refused():
    with pytest.raises(UserError, match=r"data\.split\.folds: is 5, but this data set has a validation split"):
        make_splits({"train": Plain(10), "val": Plain(3)}, Split(folds=5))


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


def images(folder: Path, names: list[str]) -> None:
    for number, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (number, 0, 0)).save(path)


def test_a_pattern_tells_the_groups_of_image_files(tmp_path: Path):
    names = [f"{kind}/p{person:02d}_{shot}.png" for kind in ("cat", "dog") for person in range(12) for shot in range(3)]
    images(tmp_path / "person9_root", names)
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
    images(tmp_path / "train", names)
    images(tmp_path / "test", ["cat/p3_9.png", "dog/q7_9.png"])
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
