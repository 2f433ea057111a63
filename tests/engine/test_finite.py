"""`watch.finite`: the first output that is not finite ends the run at once, by the name of its module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from runner.engine.diagnosis import watch_finite
from runner.engine.errors import Diverged
from runner.engine.step import train_step


class Log(nn.Module):
    """The logarithm, of which that of a negative number is NaN."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.log()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.5, r"in step 7 the output of 2 \(Log\) is the first that is not finite"),
        (float("inf"), "in step 7 the images of the batch have values that are not finite"),
    ],
)
def test_the_first_output_is_named_before_any_weight_changes(bench: Any, value: float, words: str) -> None:
    small = bench(build=lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 8), Log(), nn.ReLU(), nn.Linear(8, 3)))
    state = small.state()
    state.position.global_step = 6
    before = state.model[1].weight.clone()
    watch_finite(state)
    batch = next(iter(small.source.batches(0, 0, 1)))
    batch = batch._replace(data=(torch.full_like(batch.images, value), batch.targets))
    with pytest.raises(Diverged, match=words):
        train_step(state, small.step_parts(state.model), batch, 1.0, len(batch.targets), update=True)
    assert torch.equal(state.model[1].weight, before)
    state.model.eval()
    with pytest.raises(Diverged, match="in the evaluation after step 6"), torch.inference_mode():
        state.model(batch.images)


def test_a_run_that_is_sound_ends_with_the_same_bits(train: Any, run: Any) -> None:
    words = ("model=mlp", "model.hidden=[8]", "epochs=1", "limit.train_batches=3", "transform=none")
    plain, looked_at = train(*words), train(*words, "debug=nan")
    assert looked_at.summary["weights_sha256"] == plain.summary["weights_sha256"]
    wild = run("train", "threads=1", "logger=none", *words, "debug=nan", "optimizer=sgd", "optimizer.lr=1e30")
    assert wild.status == 3
    assert "is the first that is not finite" in wild.err
