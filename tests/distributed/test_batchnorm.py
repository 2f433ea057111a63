"""BatchNorm over the rows of all ranks is BatchNorm of the whole batch, also where a rank has no rows."""

from __future__ import annotations

from typing import Any

import pytest
import rank_functions
import torch
from extended import some
from torch import nn

from rank_pool import RankPool
from runner.base.errors import UserError
from runner.distributed.batchnorm import GlobalBatchNorm, synchronize


@pytest.mark.parametrize("ranks", some([2, 3], 1))
def test_outputs_gradients_and_statistics_are_those_of_the_whole_batch(on_ranks: Any, ranks: int) -> None:
    found = on_ranks(rank_functions.batchnorm, ranks)
    assert len(found[0]) == len(rank_functions.SHAPES) * 2
    for case in found[0]:
        errors, buffers = zip(*(rank_found[case] for rank_found in found), strict=True)
        assert max(errors) < 1e-12, case
        assert all(other == buffers[0] for other in buffers), case


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


def test_the_forward_pass_of_syncbatchnorm_which_gpus_take_finds_what_it_reads() -> None:
    norm, plain = nn.Sequential(nn.BatchNorm2d(3)), nn.BatchNorm2d(3)
    synchronize(norm)
    images = torch.randn(4, 3, 5, 5)
    assert torch.equal(nn.SyncBatchNorm.forward(norm[0], images), plain(images)), "it reads what GlobalBatchNorm has"
    assert torch.equal(norm[0].running_var, plain.running_var)


def test_a_layer_that_computes_more_than_batchnorm_is_refused() -> None:
    class Rectified(nn.BatchNorm2d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input).relu()

    with pytest.raises(UserError, match="layer '0', as Rectified is not torch's BatchNorm"):
        synchronize(nn.Sequential(Rectified(3)))


def test_batches_that_leave_a_rank_one_value_are_refused_without_it(run: Any, pool: RankPool) -> None:
    words = ("data=digits", "data.batch_size=3", "model=resnet18_cifar", "model.width=4", "devices=2")
    with pool.installed():
        err = run("train", "threads=1", "logger=none", *words).err
    assert "leaves 1 sample or none to one of 2 processes" in err
    assert "sync_batchnorm=true" in err
