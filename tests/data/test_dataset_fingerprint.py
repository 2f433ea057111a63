"""A checkpoint stores a fingerprint of its data: lengths, classes, and a few samples of each split."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_data import noise_image
from read_splits import read_splits
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder as Torchvisions

from runner.config.schema.sections import Data
from runner.data.dataset_fingerprint import class_changes, data_changes, fingerprint_data
from runner.data.sampler import AllSamples, Indices
from runner.data.sources.arrays import ImageArrays
from runner.data.sources.folders import ImageFolder, image_folder
from runner.data.sources.synthetic import synthetic

ARRAYS = synthetic(samples=40, image_size=6)["train"]


class Counted(Dataset[Any]):
    """A data set that notes what is read of it."""

    def __init__(self, length: int = 10**9, changes: bool = False, **attributes: Any) -> None:
        self.length, self.changes = length, changes
        self.read: list[int] = []
        vars(self).update(attributes)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.read.append(index)
        if index % 2:
            raise OSError("damaged")
        return torch.full((1, 2, 2), (index + len(self.read) * self.changes) % 251, dtype=torch.uint8), index % 7


def of(dataset: Any, indices: Indices | None = None) -> dict[str, Any]:
    part = dataset, AllSamples(len(dataset)) if indices is None else indices
    return fingerprint_data({"train": part}, {"train": dataset})


def test_the_same_data_are_known_again_and_others_are_not() -> None:
    whole = of(ARRAYS)
    assert whole == of(synthetic(samples=40, image_size=6)["train"])
    assert whole["train"]["samples"] == 40
    assert of(synthetic(samples=40, image_size=6, seed=1)["train"])["train"]["content"] != whole["train"]["content"]
    assert of(ARRAYS, torch.arange(40).flip(0))["train"]["content"] != whole["train"]["content"]


def test_every_sample_counts_where_there_are_few() -> None:
    few = torch.arange(16)
    expected = of(ARRAYS, few)
    for index, what in itertools.product(range(16), ("images", "targets")):
        images, targets = ARRAYS.images.clone(), ARRAYS.targets.clone()
        {"images": images, "targets": targets}[what][index] ^= 1
        assert of(ImageArrays(images, targets, ARRAYS.classes), few) != expected


@pytest.mark.parametrize("place", [0, 1, 517, 999])
def test_all_targets_count_though_few_samples_are_read(place: int) -> None:
    targets = [index % 7 for index in range(1000)]
    before = Counted(1000, targets=list(targets))
    expected = of(before)
    assert len(before.read) == 16
    targets[place] += 1
    changed = Counted(1000, targets=targets)
    clauses = data_changes(expected, of(changed), lambda: of(changed))
    assert clauses == ["'train' has other targets"]
    half = torch.arange(0, 1000, 2)
    assert (of(changed, half) == of(before, half)) == (place % 2 == 1), "those of the split alone"


def folder(root: Path) -> Path:
    for number in range(60):
        noise_image(root / "ab"[number % 2] / f"{number:02}.bmp", 4 + number % 3, 4, number)
    return root


def own(root: Path) -> ImageFolder:
    return image_folder(str(root), image_size=4)["train"]


@pytest.mark.parametrize("listed", [own, Torchvisions])
def test_files_of_a_folder_that_are_moved_or_of_another_size_are_other_data(listed: Any, tmp_path: Path) -> None:
    root = folder(tmp_path / "one")
    before = of(listed(root))
    assert before == of(listed(folder(tmp_path / "elsewhere")))
    (root / "a" / "30.bmp").write_bytes((root / "b" / "31.bmp").read_bytes())  # of another size
    now = of(listed(root))
    assert "'train' has other files" in data_changes(before, now, lambda: now)[0]
    (root / "a" / "30.bmp").rename(root / "b" / "30.bmp")
    now = of(listed(root))
    assert "'train' has other targets" in data_changes(before, now, lambda: now)[0]


def test_a_file_that_is_gone_is_reported_where_it_is_read(tmp_path: Path) -> None:
    assert of(ImageFolder([tmp_path / "31.bmp"], [0], ["a"])) is not None


def test_a_checkpoint_of_an_older_version_is_compared_by_what_it_has() -> None:
    old = {"train": {name: of(ARRAYS)["train"][name] for name in ("samples", "content")}}
    old["train"] |= dict.fromkeys(("images", "ends", "bytes"), "of fields that are gone")
    assert data_changes(old, of(ARRAYS), lambda: of(ARRAYS)) == []
    old["train"]["content"] = "of other samples"
    assert data_changes(old, of(ARRAYS), lambda: of(ARRAYS)) == ["'train' has other images or targets"]


def test_of_a_billion_samples_a_few_are_read_always_the_same_ones() -> None:
    first, second = Counted(), Counted()
    assert of(first) == of(second)
    assert first.read == second.read
    assert len(set(first.read)) == 16
    assert max(first.read) > 10**8


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        ({"train": ("a", 9)}, {"train": ("a", 9)}, []),
        ({"train": ("a", 9)}, {"train": ("b", 9)}, ["'train' has other images or targets"]),
        ({"train": ("a", 1009)}, {"train": ("b", 8)}, ["'train' has 8 samples instead of 1,009"]),
        ({"train": ("a", 9), "val": ("a", 3)}, {"train": ("a", 9)}, ["there is no split 'val' now"]),
        ({"train": ("a", 9)}, {"train": ("b", 9), "val": ("a", 3)}, ["'train' has", "there is a split 'val' now"]),
    ],
)
def test_differences_are_named(before: Any, now: Any, words: list[str]) -> None:
    old, new = (
        {name: {"content": content, "samples": samples} for name, (content, samples) in given.items()}
        for given in (before, now)
    )
    found = data_changes(old, new, lambda: new)
    assert len(found) == len(words)
    assert all(clause.startswith(word) for clause, word in zip(found, words, strict=True))


def test_data_that_are_others_at_every_reading_are_known_by_their_length() -> None:
    changing = Counted(1000, changes=True)
    before = of(changing)
    assert before != of(changing)
    assert data_changes(before, of(changing), lambda: of(changing)) == []
    node = {"_target_": f"{__name__}.Counted", "length": 1000, "changes": True}
    splits = read_splits(Data(dataset=node, on_error="skip", num_workers=0))
    assert data_changes(splits.fingerprint(), splits.fingerprint(), splits.fingerprint) == []
    longer = of(Counted(1001, changes=True))
    assert data_changes(before, longer, lambda: of(changing)) == ["'train' has 1,001 samples instead of 1,000"]


def test_names_of_classes_are_compared() -> None:
    assert class_changes(["a", "b"], ["a", "b"]) == []
    assert class_changes(["a", "b"], ["b", "a"]) == ["its classes are b, a instead of a, b"]
    assert class_changes([], [str(n) for n in range(9)]) == ["its classes are 0, 1, 2, 3, 4, ... (9) instead of none"]
