"""A run that diverges says so, stops with a status of its own, and saves nothing that is not finite."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from runner.checkpoint.file import read
from runner.engine.diagnosis import is_finite, nonfinite_samples, watch_finite
from runner.engine.errors import Diverged

SMALL = (
    "train", "data=synthetic", "data.dataset.samples=48", "data.image_size=8", "data.batch_size=8", "epochs=4",
    "model=mlp", "model.hidden=[16]", "transform=none", "evaluate.test=false", "threads=1", "logger=none",
    "log.progress=false", "log.curves=false", "scheduler=constant", "checkpoint.min_seconds=0",
)  # fmt: skip


def all_finite(directory: Path) -> list[str]:
    paths = sorted((directory / "checkpoints").glob("*.safetensors"))
    for path in paths:
        contents = read(path)
        assert is_finite(contents["model"]), path.name
        assert is_finite(contents["optimizer"]), path.name
    return [path.name for path in paths]


@pytest.mark.parametrize("words", [("checkpoint.every_steps=1",), ("log.every_steps=1",), ("amp=true",)], ids=str)
def test_a_run_that_diverges_ends_with_status_3_and_nothing_that_is_not_finite(
    words: tuple[str, ...], run: Any
) -> None:
    result = run(*SMALL, "optimizer=sgd", "optimizer.lr=1e20", *words)
    assert result.status == 3, result.out + result.err
    assert result.summary["status"] == "failed"
    assert result.summary["error"].startswith("diverged: ")
    assert "optimizer.lr" in result.err
    assert "Traceback" not in result.err
    all_finite(result.directory)
    assert "weights_sha256" not in result.summary


def test_moments_that_are_not_finite_are_not_saved_either(run: Any, own_module: Any) -> None:
    # Squares of gradients overflow before the weights do, and those weights would stand still for ever after.
    own_module(
        "overflow",
        """
class Overflow:
    def on_step(self, loop):
        if loop.state.position.global_step == 3:
            next(iter(loop.state.optimizer.state.values()))["exp_avg_sq"][0] = float("inf")
""",
    )
    result = run(*SMALL, "optimizer=adamw", "+callbacks.o._target_=overflow.Overflow", "checkpoint.every_steps=2")
    assert result.status == 3, result.out
    assert "exp_avg_sq is not finite after step 4; it was not saved" in result.summary["error"]
    assert all_finite(result.directory) == ["last.safetensors", "step_0000000002.safetensors"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.ones(3), True),
        (torch.tensor([1.0, math.inf]), False),
        ({"a": torch.ones(2), "b": [torch.tensor(math.nan)]}, False),
        (torch.tensor([1, 2]), True),
        (torch.tensor([[0.0, math.nan]]).to_sparse(), False),
        (torch.tensor([[0.0, 1.0]]).to_sparse(), True),
        (None, True),
    ],
)
def test_every_tensor_counts(value: object, expected: bool) -> None:
    assert is_finite(value) is expected


def test_samples_are_named_by_their_index_and_a_long_list_is_cut() -> None:
    values, indices = torch.zeros(11, 2), torch.arange(3, 14)
    assert nonfinite_samples(values, indices) == ""
    values[1, 0] = math.nan
    assert nonfinite_samples(values, indices) == "sample 4"
    values[3] = math.inf
    assert nonfinite_samples(values[:, 0], indices) == "samples 4, 6"
    assert nonfinite_samples(values / 0, indices) == "samples 3, 4, 5, 6, 7, 8, 9, 10 and 3 more"
    assert nonfinite_samples(torch.tensor(math.nan), indices) == ""


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
def test_watch_finite_names_the_first_output_before_any_weight_changes(bench: Any, value: float, words: str) -> None:
    small = bench(build=lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 8), Log(), nn.ReLU(), nn.Linear(8, 3)))
    state = small.state()
    state.position.global_step = 6
    before = state.model[1].weight.clone()
    watch_finite(state)
    batch = small.first()
    batch = batch._replace(data=(torch.full_like(batch.images, value), batch.targets))
    with pytest.raises(Diverged, match=words):
        small.step(state)(batch, 1.0, len(batch.targets), update=True)
    assert torch.equal(state.model[1].weight, before)
    state.model.eval()
    with pytest.raises(Diverged, match="in the evaluation after step 6"), torch.inference_mode():
        state.model(batch.images)


def test_a_sound_run_that_watches_for_finite_outputs_ends_with_the_same_bits(train: Any, run: Any) -> None:
    words = ("model=mlp", "model.hidden=[8]", "epochs=1", "limit.train_batches=3", "transform=none")
    plain, looked_at = train(*words), train(*words, "debug=nan")
    assert looked_at.summary["weights_sha256"] == plain.summary["weights_sha256"]
    wild = run("train", "threads=1", "logger=none", *words, "debug=nan", "optimizer=sgd", "optimizer.lr=1e30")
    assert wild.status == 3
    assert "is the first that is not finite" in wild.err
