"""`optimizer.lr_base_batch_size`: a learning rate that follows the number of samples of a step."""

from __future__ import annotations

import pytest
import torch

from runner.config.load import resolve_config
from runner.config.schema import Train
from runner.run.optimizer import build_optimizer


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), 0.1),
        (("optimizer.lr_base_batch_size=64",), 0.1),
        (("optimizer.lr_base_batch_size=256",), 0.025),
        (("optimizer.lr_base_batch_size=256", "accumulate=8"), 0.2),
    ],
)
def test_the_rate_is_in_proportion_to_the_samples_of_a_step(words, expected, compose):
    composition = compose("optimizer=sgd", "optimizer.lr=0.1", "data.batch_size=64", *words)
    config = resolve_config(composition, Train)
    optimizer, _ = build_optimizer(config, torch.nn.Linear(2, 2))
    assert [group["lr"] for group in optimizer.param_groups] == [pytest.approx(expected)]
    assert [group["initial_lr"] for group in optimizer.param_groups] == [pytest.approx(expected)]


def test_both_rates_of_muon_follow(compose):
    composition = compose("optimizer=muon", "optimizer.lr_base_batch_size=32", "data.batch_size=64")
    config = resolve_config(composition, Train)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizer, _ = build_optimizer(config, model)
    rates = {group["algorithm"]: group["initial_lr"] for group in optimizer.param_groups}
    assert rates == {"muon": pytest.approx(2 * 0.02), "adamw": pytest.approx(2 * 0.003)}
