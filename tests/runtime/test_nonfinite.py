"""A NaN in an input, a weight or a gradient, under each precision: every policy does what it says, and nothing is lost."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from extended import some

from runner.checkpoint.file import read

SMALL = (
    "data=synthetic", "data.dataset.samples=64", "data.image_size=8", "data.batch_size=8", "epochs=3", "data.split.val=0",
    "data.split.test=0.2", "model=small_cnn", "model.width=4", "transform=none", "evaluate.test=false", "threads=1",
    "logger=none", "log.progress=false", "log.curves=false", "log.every_steps=4",
    "checkpoint.every_steps=5", "optimizer=sgd", "optimizer.lr=0.01",
)  # fmt: skip
FAULTS = """
import torch

STEP = 13  # between log points at 12 and 16, after the checkpoint of step 10

class Input:
    '''A pixel of whatever is trained on in that step.'''
    def on_start(self, loop):
        source, batches = loop.source, loop.source.batches
        def spoilt(epoch, start, stop):
            for number, batch in enumerate(batches(epoch, start, stop), start):
                if epoch * loop.plan.batches + number == STEP - 1:
                    batch.images[2, 0, 3, 3] = float("nan")
                yield batch
        source.batches = spoilt

class Weight:
    done = False
    def on_step(self, loop):
        if loop.state.position.global_step == STEP - 1 and not Weight.done:
            Weight.done = True
            with torch.no_grad(): next(loop.state.model.parameters())[0] = float("nan")

class Gradient:
    def on_start(self, loop):
        def spoil(grad):
            step = loop.state.position.global_step + 1
            return torch.full_like(grad, float("inf")) if step == STEP else grad
        list(loop.state.model.parameters())[-1].register_hook(spoil)
"""


@pytest.fixture
def faulty(run: Callable[..., Any], own_module: Callable[..., Path]) -> Callable[..., Any]:
    own_module("my_faults", FAULTS)
    named = "+callbacks.fault._target_=my_faults."
    return lambda fault, policy, *words: run("train", *SMALL, named + fault, f"on_nonfinite={policy}", *words)


def finite(directory: Path) -> bool:
    contents = [read(path) for path in (directory / "checkpoints").glob("*.safetensors")]
    return all(tensor.isfinite().all() for found in contents for tensor in found["model"].values())


AMP = ["amp=false", "amp=bf16", "amp=fp16"]
CAUSES = {
    "Input": "the images of sample",
    "Weight": "weights are not finite",
    "Gradient": "the cause could not be reproduced",
}


@pytest.mark.parametrize(
    ("fault", "amp"),
    # Under fp16 an infinite gradient belongs to scaling
    [
        *some(itertools.product(("Input", "Weight"), AMP), 0, 2, 4, several=True),
        *itertools.product(["Gradient"], AMP[:2]),
    ],
)
def test_raise_stops_and_keeps_what_was_saved(faulty: Any, fault: str, amp: str) -> None:
    result = faulty(fault, "raise", amp)
    assert result.status == 3, result.err + result.out
    assert "the gradients of step 13 (epoch 2) are not finite" in result.err
    assert CAUSES[fault] in result.err
    assert finite(result.directory)
    assert result.last["position"]["global_step"] == 10
    if fault != "Gradient":
        batch = torch.load(result.directory / "nonfinite" / "step_0000000013.pt", weights_only=True)
        assert batch["images"].isnan().any() == (fault == "Input")
        assert len(batch["indices"]) == 8


def test_under_fp16_a_gradient_that_overflows_is_left_to_the_scaler(faulty: Any) -> None:
    result = faulty("Gradient", "raise", "amp=fp16")
    assert result.status == 0, result.err
    assert result.last["scaler"]["scale"] < 2.0**16
    assert finite(result.directory)


@pytest.mark.parametrize(
    ("amp", "optimizer"),
    [("amp=false", "optimizer=rmsprop"), ("amp=bf16", "optimizer=sgd"), ("amp=fp16", "optimizer=sgd")],
)
def test_training_goes_on_without_the_step(faulty: Any, amp: str, optimizer: str) -> None:
    result = faulty("Input", "skip", amp, optimizer, "optimizer.lr=0.01")
    assert result.status == 0, result.err + result.out
    assert "step 13" in result.out
    assert finite(result.directory)
    assert result.last["position"]["global_step"] == 24
    steps = [line["global_step"] for line in result.logged("train")]
    assert steps == sorted(set(steps))
    assert all(line["loss"] is not None for line in result.metrics)


def test_a_weight_is_not_healed_by_skipping_and_nothing_spoilt_is_saved(faulty: Any) -> None:
    result = faulty("Weight", "skip")
    assert result.status == 3, result.out
    assert "is not finite after step 15; it was not saved" in result.err
    assert finite(result.directory)
