"""`check` on data that is not in memory: it reads a fair sample of it, and says how much it read."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).parent))

from runner.lab.check.sample import stratified_order

CLASSES, EACH = 5, 80


class Ordered(Dataset[Any]):
    """Samples in the order of their classes, as in a folder."""

    def __init__(self, known: bool = True) -> None:
        self.labels = torch.arange(CLASSES).repeat_interleave(EACH)
        self.classes = [f"kind{number}" for number in range(CLASSES)]
        if known:
            self.targets = self.labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        image = torch.randint(0, 256, (3, 16, 16), dtype=torch.uint8, generator=generator)
        image[int(self.labels[index]) % 3] //= 2
        return image, int(self.labels[index])


WORDS = (
    *("check", "threads=1", "device=cpu", "data=digits", "data.split.val=0.2", "data.batch_size=16", "model=mlp"),
    *("data.normalize.mean=[0.5]", "data.normalize.std=[0.3]", "transform=none", "epochs=1", "data.num_workers=0"),
)


def data(known: bool = True) -> str:
    return f"data.dataset={{_target_: test_check_samples.Ordered, known: {str(known).lower()}}}"


def test_every_prefix_of_the_order_is_a_stratified_random_sample() -> None:
    targets = torch.tensor([0] * 600 + [1] * 300 + [7] * 90 + [2] * 10)
    order = stratified_order(targets, len(targets), 0)
    assert sorted(order.tolist()) == list(range(1000))
    assert set(targets[order[:4]].tolist()) == {0, 1, 2, 7}
    for count in (50, 100, 500):
        seen = torch.bincount(targets[order[:count]], minlength=8) / count
        assert (seen[[0, 1, 7, 2]] - torch.tensor([0.6, 0.3, 0.09, 0.01])).abs().max() < 0.03
    places = order[:100][targets[order[:100]] == 0]
    assert places.float().mean() == pytest.approx(300, abs=80)
    assert (places.diff() < 0).any(), "not in the order of the files"
    assert torch.equal(order, stratified_order(targets, len(targets), 0))
    assert not torch.equal(order, stratified_order(targets, len(targets), 1))
    assert sorted(stratified_order(None, 5, 0).tolist()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("known", [True, False], ids=["targets known", "targets read"])
def test_a_sample_of_a_folder_has_every_class(run: Callable[..., Any], known: bool) -> None:
    only = "only=[image-range,class-balance,missing-classes]"
    result = run(*WORDS, "json=true", data(known), "samples=40", only)
    assert result.status == 0, result.err
    seen = json.loads(result.out)["seen"]
    assert {name: each["read"] for name, each in seen.items()} == {"train": 40, "val": 40, "test": 40}
    assert set(seen["train"]["classes"]) == {f"kind{number}" for number in range(CLASSES)}
    low, high = (8, 8) if known else (2, 20)
    assert all(low <= count <= high for count in seen["train"]["classes"].values()), seen
    if known:
        *_, test, last = run(*WORDS, data(), "samples=40", "only=[image-range]").out.strip().splitlines()
        assert test == "saw 40 of 80 samples of test: " + ", ".join(f"kind{number} 8" for number in range(CLASSES))
        assert last.startswith("2 passed in ")


def test_settings_are_checked_without_reading_images(run: Callable[..., Any]) -> None:
    names = ("optimizer-settings", "schedule", "averaging", "norm-statistics", "dropout-rate", "epoch-length")
    result = run(*WORDS, "json=true", data(), "ema=0.9999", "averaging.warmup=false", f"only=[{','.join(names)}]")
    found = json.loads(result.out)
    assert (result.status, found["seen"]) == (1, {})
    assert {each["name"]: each["status"] for each in found["checks"]}["averaging"] == "fail"
