"""Several ranks train as one process does: the same samples, losses and weights, to rounding."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from extended import some
from torch import nn

from runner.optim.losses import CrossEntropy
from runner.run.ranks import uneven_loss
from scale_equality import CASES, COMMON, Runs

# Epochs of 5 batches; the last one has a single sample, so ranks have to do without.
QUICK = (*COMMON, "data.dataset.samples=103", "max_steps=12", "evaluate.every_epochs=1", "evaluate.test=false")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with contextlib.closing(Runs(tmp_path_factory.mktemp("runs"))) as made:
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("case", some(["MLP", "CNN, sync_batchnorm, accumulate=3"], 1))
def test_any_number_of_ranks_trains_as_one_process(runs: Runs, case: str) -> None:
    words = (*QUICK, *CASES[case], "dtype=float64")
    one = runs.train(words)
    found = runs.train([*words, "devices=3"])
    assert len(one.losses) >= 12
    assert len(one.ids[0, 4]) == 1
    assert found.difference(one) < 1e-10
    assert (found.initial, found.ids) == (one.initial, one.ids)


@pytest.mark.slow
def test_the_number_of_ranks_may_change_when_resuming(runs: Runs) -> None:
    words = (*QUICK, *CASES["MLP"])
    one = runs.train(words)
    # The first signal comes inside an epoch, the second one at the end of an epoch, before it is evaluated.
    reading = ("data.placement=disk", "data.num_workers=1")
    found = runs.train(words, [(2, ["devices=2"]), (10, ["devices=3", *reading]), (None, ["devices=1"])])
    assert found.difference(one) < 1e-4
    assert (found.initial, found.ids) == (one.initial, one.ids)


class OverWeights(nn.Module):
    """Divides by the class weights of the batch, as torch's own loss does."""

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        weight = torch.arange(1.0, logits.shape[1] + 1)
        return nn.functional.cross_entropy(logits, targets, weight=weight)


def test_a_loss_that_is_no_mean_over_samples_is_named(compose: Any) -> None:
    from runner.config.load import resolve_config
    from runner.config.schema import VERBS
    from runner.train import build_run

    run = build_run(resolve_config(compose("threads=1"), VERBS["train"]))
    with contextlib.closing(run.data):
        assert uneven_loss(CrossEntropy(class_weights=[1.0] * 9 + [7.0]), run.task, run.data) == []
        assert "mean over its samples" in uneven_loss(OverWeights(), run.task, run.data)[0]
