"""A checkpoint knows its data again: lengths, classes, and a few samples of each split."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.data.arrays import ImageArrays
from runner.data.identity import identity, other_classes, other_data
from runner.data.indices import Indices, Whole
from runner.data.synthetic import synthetic

ARRAYS = synthetic(samples=40, image_size=6)["train"]


class Counted(Dataset[Any]):
    """A data set that notes what is read of it."""

    def __init__(self, length: int = 10**9, changes: bool = False) -> None:
        self.length, self.changes = length, changes
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.read.append(index)
        if index % 2:
            raise OSError("damaged")
        return torch.full((1, 2, 2), (index + len(self.read) * self.changes) % 251, dtype=torch.uint8), index % 7


def of(dataset: Any, indices: Indices | None = None) -> dict[str, Any]:
    return identity({"train": (dataset, Whole(len(dataset)) if indices is None else indices)})


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


def test_of_a_billion_samples_a_few_are_read_always_the_same_ones() -> None:
    first, second = Counted(), Counted()
    assert of(first) == of(second)
    assert first.read == second.read
    assert len(set(first.read)) == 16
    assert max(first.read) > 10**8


def test_the_generators_are_left_as_they_were() -> None:
    before = torch.get_rng_state()
    of(ARRAYS)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        ({"train": ("a", 9)}, {"train": ("a", 9)}, []),
        ({"train": ("a", 9)}, {"train": ("b", 9)}, ["'train' has other images or targets"]),
        ({"train": ("a", 1009)}, {"train": ("b", 8)}, ["'train' has 8 samples in place of 1,009"]),
        ({"train": ("a", 9), "val": ("a", 3)}, {"train": ("a", 9)}, ["there is no split 'val' now"]),
        ({"train": ("a", 9)}, {"train": ("b", 9), "val": ("a", 3)}, ["'train' has", "there is a split 'val' now"]),
    ],
)
def test_differences_are_named(before: Any, now: Any, words: list[str]) -> None:
    old, new = (
        {name: {"content": content, "samples": samples} for name, (content, samples) in given.items()}
        for given in (before, now)
    )
    found = other_data(old, new, lambda: new)
    assert len(found) == len(words)
    assert all(clause.startswith(word) for clause, word in zip(found, words, strict=True))


def test_data_that_are_others_at_every_reading_are_known_by_their_length() -> None:
    changing = Counted(1000, changes=True)
    before = of(changing)
    assert before != of(changing)
    assert other_data(before, of(changing), lambda: of(changing)) == []
    longer = of(Counted(1001, changes=True))
    assert other_data(before, longer, lambda: of(changing)) == ["'train' has 1,001 samples in place of 1,000"]


def test_names_of_classes_are_compared() -> None:
    assert other_classes(["a", "b"], ["a", "b"]) == []
    assert other_classes(["a", "b"], ["b", "a"]) == ["its classes are b, a in place of a, b"]
    assert other_classes([], [str(n) for n in range(9)]) == ["its classes are 0, 1, 2, 3, 4, ... (9) in place of none"]
