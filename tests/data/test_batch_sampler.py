"""`data.batch_sampler`: a function chooses the samples of each training batch."""

from __future__ import annotations

import contextlib
import math
from typing import Any

import pytest
import torch
from read_splits import read_words

MODULE = '''
import torch

CALLS = []


def pk(dataset, batch_size, generator, classes=4):
    """Batches of so many classes, each with as many samples."""
    groups = [torch.nonzero(dataset.targets == each).flatten() for each in dataset.targets.unique()]
    chosen = []
    for _ in range(len(dataset) // batch_size):
        for place in torch.randperm(len(groups), generator=generator)[:classes].tolist():
            members = groups[place]
            chosen.append(members[torch.randint(len(members), (batch_size // classes,), generator=generator)])
    return torch.cat(chosen)


def first_ones(dataset, batch_size, generator, samples):
    return list(range(samples))


def beyond(dataset, batch_size, generator):
    return [len(dataset)]


def remembering(dataset, batch_size, generator):
    CALLS.append(0)
    return [len(CALLS)]


def growing(dataset, batch_size, generator):
    CALLS.append(0)
    return [0, 1] if len(CALLS) < 4 else [0, 1, 2]


def masked(dataset, batch_size, generator):
    return torch.ones(len(dataset), dtype=torch.bool)


def seeding(dataset, batch_size, generator):
    torch.manual_seed(int(torch.randint(1000, (), generator=generator)))
    return torch.randperm(len(dataset), generator=generator)


def twice(dataset, batch_size, generator):
    return [*range(20), *range(20)]


class Vectors(torch.utils.data.Dataset):
    """Samples without a target."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.full((3,), float(index))


class Broken(Vectors):
    def __getitem__(self, index):
        if index < 3:
            raise OSError("damaged")
        return super().__getitem__(index)
'''
SAMPLER = "data.batch_sampler={_target_: chosen.%s, _partial_: true%s}"
FIELDS = ("data.images=[]", "transform=none", "loss=none")
TRAIN = ("logger=none", "log.progress=false", "model=mlp", "evaluate.test=false")


@pytest.fixture(autouse=True)
def _chosen(own_module: Any) -> None:
    own_module("chosen", MODULE)


def batches_of(data: Any, epoch: int = 0) -> list[Any]:
    loader = data.train.loader
    return list(loader.batches(epoch, 0, math.ceil(data.train.samples / loader.batch_size)))


PK = SAMPLER % ("pk", ", classes: 4")


def test_each_batch_has_the_chosen_samples(compose: Any) -> None:
    data = read_words(compose, PK, "data.batch_size=16")
    batches = batches_of(data)
    assert len(batches) == len(data.parts["train"][1]) // 16
    for batch in batches:
        assert torch.bincount(batch.targets)[batch.targets.unique()].tolist() == [4, 4, 4, 4]
        assert torch.isin(batch.indices, data.parts["train"][1]).all()
    again, other = batches_of(read_words(compose, PK, "data.batch_size=16")), batches_of(data, epoch=1)
    assert all(torch.equal(one.indices, two.indices) for one, two in zip(batches, again, strict=True))
    assert not torch.equal(batches[0].indices, other[0].indices)


def test_repeated_augmentation_draws_each_sample_several_times_in_a_row(compose: Any) -> None:
    repeated = "data.batch_sampler={_target_: runner.data.repeated.repeated_augmentation, _partial_: true, repeats: 3}"
    data = read_words(compose, repeated, "data.shift=0.5", "data.batch_size=30")
    batches = batches_of(data)
    drawn = torch.cat([batch.indices for batch in batches])
    assert len(drawn) == data.train.samples
    groups = drawn[: len(drawn) // 3 * 3].view(-1, 3)
    assert (groups == groups[:, :1]).all()
    assert len(drawn.unique()) == math.ceil(data.train.samples / 3), "no image is in two groups"
    copies = batches[0].images.view(10, 3, -1)
    assert not torch.equal(copies[:, 0], copies[:, 1]), "each is augmented differently"
    assert not torch.equal(drawn, torch.cat([batch.indices for batch in batches_of(data, epoch=1)]))


def test_samples_of_any_kind_are_chosen_too(compose: Any) -> None:
    words = (*FIELDS, "data.dataset._target_=chosen.Vectors", "data.split.val=0.5")
    (batch,) = batches_of(read_words(compose, *words, SAMPLER % ("first_ones", ", samples: 7")))
    assert batch.data[:, 0].long().tolist() == batch.indices.tolist()
    assert len(batch.indices) == 7


def test_a_sample_that_cannot_be_read_is_replaced_alike_by_any_workers(compose: Any) -> None:
    words = (*FIELDS, "data.dataset._target_=chosen.Broken", "data.on_error=skip", "data.max_skipped=1")
    data = []
    for workers in (0, 2):
        made = read_words(compose, *words, SAMPLER % ("twice", ""), f"data.num_workers={workers}")
        with contextlib.closing(made):
            data.append(torch.cat([batch.data[:, 0] for batch in batches_of(made)]))
    assert torch.equal(*data)
    assert len(data[0]) == 40
    assert data[0].min() >= 3


def test_a_function_that_seeds_the_generators_leaves_no_trace(compose: Any) -> None:
    data, before = read_words(compose, SAMPLER % ("seeding", "")), torch.get_rng_state()
    batches_of(data)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((SAMPLER % ("beyond", ""),), "does not give samples"),
        ((SAMPLER % ("first_ones", ", samples: 0"),), "does not give samples"),
        ((SAMPLER % ("remembering", ""),), "other samples when it is called again"),
        ((SAMPLER % ("growing", ""), "epochs=2"), "gives 3 samples in epoch 2"),
        ((SAMPLER % ("masked", ""),), "does not give samples"),
        ((SAMPLER % ("first_ones", ""),), "cannot give the samples of an epoch: TypeError"),
        ((PK, "data.sampler=balanced"), "gives the order"),
        ((PK, "data.shuffle=false"), "gives the order"),
        (("data.batch_sampler={_target_: chosen.Vectors}",), "cannot be called"),
    ],
)
def test_bad_functions_are_refused(rejected: Any, words: tuple[str, ...], reason: str) -> None:
    result = rejected("train", *TRAIN, *words)
    assert "data.batch_sampler" in result.err
    assert reason in result.err
