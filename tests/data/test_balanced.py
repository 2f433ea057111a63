"""`data.sampler=balanced`: every class equally often, the same draws for any workers, ranks and place of entry."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from runner.data.loaders import Batch, BatchPlan, Loader, MemoryLoader
from runner.data.sampler import BalancedOrder, ClassBalance, sample_of
from runner.data.samples import SeededDataset
from runner.data.sources.synthetic import synthetic
from runner.data.workers import WorkerLoader
from runner.distributed.world import World

CPU = torch.device("cpu")
ARRAYS = synthetic(samples=60, image_size=4, classes=5)["train"]
PART = torch.arange(60)[torch.arange(60) % 4 != 0]  # 45 samples: five batches of 8 and one of 5
BALANCE = ClassBalance(ARRAYS.targets[PART])
SKEWED = torch.tensor([0] * 900 + [2] * 90 + [3] * 10)[torch.randperm(1000, generator=torch.Generator().manual_seed(0))]


def noisy(image: Tensor) -> Tensor:
    return image.float() + torch.rand(image.shape)


def loader(workers: int | None = None, transforms: Any = (), rank: int = 0, ranks: int = 1) -> Loader:
    plan = BatchPlan(PART, 8, 3, True)
    made: Loader = MemoryLoader(ARRAYS.images, ARRAYS.targets, plan, CPU)
    if workers is not None:
        made = WorkerLoader(SeededDataset(ARRAYS, 3, transforms), plan, CPU, workers=workers, persistent=False)
    made.draws, made.world = functools.partial(BalancedOrder, BALANCE, 3), World(rank=rank, size=ranks)
    return made


def joined(batches: list[Batch]) -> Batch:
    images, targets, indices = (
        torch.cat(parts) for parts in zip(*((*batch.data, batch.indices) for batch in batches), strict=True)
    )
    return Batch((images, targets), indices)


def same(one: Batch, other: Batch) -> bool:
    return all(torch.equal(a, b) for a, b in zip((*one.data, one.indices), (*other.data, other.indices), strict=True))


def test_every_class_and_every_sample_of_a_class_is_drawn_equally_often() -> None:
    order = [sample_of(BalancedOrder(ClassBalance(SKEWED), 1, epoch).slice(0, 1000)) for epoch in range(60)]
    drawn = torch.cat(order)
    classes = torch.bincount(SKEWED[drawn], minlength=4) / len(drawn)
    assert classes[1] == 0
    # Four standard deviations of a share of a third in 60,000 draws.
    assert torch.allclose(classes[[0, 2, 3]], torch.tensor(1 / 3), atol=0.008)
    for number, expected in ((0, 20_000 / 900), (2, 20_000 / 90), (3, 20_000 / 10)):
        counts = torch.bincount(drawn, minlength=1000)[number == SKEWED].float()
        assert (counts - expected).abs().max() < 5 * expected**0.5
        assert 0.7 < counts.var() / expected < 1.4 or number == 3
    assert len({tuple(each.tolist()) for each in order}) == 60, "another order in every epoch"


def test_a_slice_is_known_without_the_rest_and_follows_the_seed() -> None:
    whole = BalancedOrder(BALANCE, 5, 2).slice(0, 45)
    assert torch.equal(BalancedOrder(BALANCE, 5, 2).slice(17, 30), whole[17:30])
    assert torch.equal(BalancedOrder(BALANCE, 5, 2).slice(40, 99), whole[40:])
    assert len(BalancedOrder(BALANCE, 5, 2).slice(50, 60)) == 0
    assert not torch.equal(BalancedOrder(BALANCE, 6, 2).slice(0, 45), whole)


def test_batches_have_the_drawn_samples_of_the_split() -> None:
    batch = joined(list(loader().batches(0, 0, 6)))
    assert len(batch.targets) == 45
    assert torch.equal(batch.images, ARRAYS.images[batch.indices])
    assert torch.equal(batch.targets, ARRAYS.targets[batch.indices])
    assert torch.isin(batch.indices, PART).all()
    assert len(batch.indices.unique()) < 45


def test_memory_and_any_workers_give_the_same_batches_wherever_an_epoch_is_entered() -> None:
    expected = joined(list(loader().batches(1, 2, 6)))
    for workers in (0, 2):
        assert same(joined(list(loader(workers).batches(1, 2, 6))), expected)
    noise = joined(list(loader(0, (noisy,)).batches(1, 2, 6)))
    assert same(joined(list(loader(2, (noisy,)).batches(1, 2, 6))), noise)


def test_a_sample_that_is_drawn_again_is_augmented_in_another_way() -> None:
    batch = joined(list(loader(0, (noisy,)).batches(0, 0, 6)))
    again = [place for place, index in enumerate(batch.indices.tolist()) if index in batch.indices[:place].tolist()]
    first = batch.indices.tolist().index(int(batch.indices[again[0]]))
    assert not torch.equal(batch.images[first], batch.images[again[0]])


@pytest.mark.parametrize("workers", [None, 0])
def test_ranks_together_have_the_batches_of_one_process(workers: int | None) -> None:
    whole = list(loader(workers).batches(0, 1, 6))
    parts = [list(loader(workers, (), rank, 2).batches(0, 1, 6)) for rank in (0, 1)]
    for batch, *ranks in zip(whole, *parts, strict=True):
        assert same(joined(ranks), batch)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (("data.sampler=balanced", "data.shuffle=false"), "data.shuffle"),
        (("data.sampler=balanced", "task=regression", "loss=mse"), "data.sampler"),
        (("data.sampler=weighted",), "data.sampler"),
    ],
)
def test_what_it_cannot_be_combined_with(problems: Any, words: tuple[str, ...], key: str) -> None:
    assert key in problems(*words)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("data=synthetic", "data.dataset.kind=regression"), "not one class per sample"),
        (("data=own", "data.dataset._target_=unlisted.Unlisted"), "are not known without reading"),
    ],
)
def test_targets_without_classes_are_refused(
    rejected: Any, workdir: Any, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], reason: str
) -> None:
    (workdir / "unlisted.py").write_text(
        "import torch\n"
        "class Unlisted(torch.utils.data.Dataset):\n"
        "    classes = ('a', 'b')\n"
        "    def __len__(self): return 20\n"
        "    def __getitem__(self, index): return torch.zeros(1, 8, 8, dtype=torch.uint8), index % 2\n"
    )
    monkeypatch.syspath_prepend(str(workdir))
    result = rejected("train", *words, "data.sampler=balanced", "logger=none", "log.progress=false")
    assert "error: data.sampler: is balanced" in result.err
    assert reason in result.err
