"""BatchNorm over the rows of all ranks is BatchNorm of the whole batch, also where a rank has no rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import batchnorm_ranks
import pytest
import torch
from extended import some
from torch import nn

from rank_pool import RankPool
from runner.base.errors import UserError
from runner.distributed.batchnorm import GlobalBatchNorm, synchronize


@pytest.mark.extended
@pytest.mark.slow
@pytest.mark.parametrize("ranks", some([2, 3], 0))
def test_outputs_gradients_and_statistics_are_those_of_the_whole_batch(
    on_ranks: Callable[..., list[Any]], ranks: int
) -> None:
    found = on_ranks(batchnorm_ranks.errors, ranks)
    assert len(found[0]) == len(batchnorm_ranks.SHAPES) * 2
    for case in found[0]:
        whole, *others = (rank_found[case] for rank_found in found)
        for name in ("buffers", "after evaluation"):
            assert all(other[name] == whole[name] for other in others), f"{case}: {name} differ between ranks"
        assert max(max(one[case]["errors"].values()) for one in found) < 1e-12, case


def test_names_in_a_state_dict_are_those_of_batchnorm() -> None:
    model, other = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model[1].running_mean.add_(1)
    assert synchronize(other) == 1
    assert type(other[1]) is GlobalBatchNorm
    other.load_state_dict(model.state_dict())
    images = torch.randn(5, 4)
    assert torch.equal(model(images), other(images)), "outside of a step of several ranks it is BatchNorm"
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())
    model.load_state_dict(other.state_dict())


def test_a_layer_that_computes_more_than_batchnorm_is_refused() -> None:
    class Rectified(nn.BatchNorm2d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input).relu()

    with pytest.raises(UserError, match="layer '0', as Rectified is not torch's BatchNorm"):
        synchronize(nn.Sequential(Rectified(3)))


@pytest.mark.slow
def test_batches_that_leave_a_rank_one_value_are_refused_without_it(run: Callable[..., Any], pool: RankPool) -> None:
    words = (
        "data=synthetic",
        "data.dataset.samples=40",
        "data.batch_size=3",
        "model=torchvision",
        "model.name=resnet18",
    )
    with pool.installed():
        found = run("train", "threads=1", "logger=none", "max_steps=1", "data.image_size=32", "devices=2", *words)
    assert "leaves 1 sample or none to one of 2 processes" in found.err + found.out
    assert "sync_batchnorm=true" in found.err + found.out
