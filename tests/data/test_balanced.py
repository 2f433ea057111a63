"""`data.sampler=balanced`: every class equally often; test_loaders.py has its batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_loaders import ARRAYS, PART

from runner.data.sampler import BalancedOrder, ClassBalance, sample_of

BALANCE = ClassBalance(ARRAYS.targets[PART])
SKEWED = torch.tensor([0] * 900 + [2] * 90 + [3] * 10)[torch.randperm(1000, generator=torch.Generator().manual_seed(0))]


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
