"""`dtype=float64` computes in float64 from the images to the averages; float32 is what it was."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
import torch

from runner.base.errors import UserError
from runner.config.load import resolve_config
from runner.config.schema import VERBS
from runner.runtime.precision import choose_precision
from runner.train import build_run

REGRESSION = ("data=synthetic", "data.dataset.kind=regression", "data.dataset.classes=1", "task=regression", "loss=mse")
SMALL = ("data.image_size=8", "model=mlp", "threads=1")


@pytest.mark.parametrize(
    "words",
    [
        ("transform=mix", "loss.label_smoothing=0.1", "loss.class_weights=balanced"),
        ("data=synthetic", *SMALL, "transform=strong", "loss=focal", "channels_last=true"),
        (*REGRESSION, *SMALL, "transform=mix"),
    ],
    ids=["classes", "strong", "regression"],
)
def test_images_targets_outputs_loss_and_averages_are_float64(words: tuple[str, ...], compose: Any) -> None:
    run = build_run(resolve_config(compose("dtype=float64", "ema=0.9", *words), VERBS["train"]))
    with contextlib.closing(run.data):
        batch = next(run.data.train.loader.batches(0, 0, 1))
        targets = run.task.targets(batch.targets)
        outputs = run.model(batch.images)
        loss = run.loss(outputs, targets)
        assert run.state.averaged is not None
        tensors = [batch.images, outputs, loss, *run.model.parameters(), *run.state.averaged.weights().values()]
        tensors += [targets] if run.data.train.mix is not None else []
        assert {tensor.dtype for tensor in tensors if tensor.is_floating_point()} == {torch.float64}
        assert run.hardware.precision.name == "float64"
        run.step(batch, 1.0, len(batch.images), update=True)
        moments = [
            value for state in run.state.optimizer.state.values() for name, value in state.items() if name != "step"
        ]
        assert {moment.dtype for moment in moments} == {torch.float64}
        assert float(run.state.meter.read()) != float(torch.tensor(run.state.meter.read()))


@pytest.mark.extended
def test_a_run_starts_from_the_weights_of_float32_and_can_be_evaluated(train: Any, accepted: Any) -> None:
    words = ("max_steps=4", "log.every_steps=1", "evaluate.test=false", "model=mlp")
    plain, wide = train(*words), train(*words, "dtype=float64")
    first, other = plain.metrics[0]["loss"], wide.metrics[0]["loss"]
    assert first != other
    assert first == pytest.approx(other, rel=1e-6)
    model = wide.last["model"]
    assert {tensor.dtype for tensor in model.values()} == {torch.float64}
    found = accepted("eval", f"ckpt_path={wide.directory}", "split=val", "json=true")
    assert json.loads(found.out)["metrics"]["loss"] == wide.metrics[-1]["loss"]
    resumed = train(f"ckpt_path={wide.directory}", "max_steps=6", "dtype=float32")
    model = resumed.last["model"]
    assert {tensor.dtype for tensor in model.values()} == {torch.float32}


def test_what_it_cannot_be_combined_with_is_refused(problems: Any) -> None:
    assert "amp=bf16 computes in 16 bits" in str(problems("dtype=float64", "amp=bf16")["dtype"])
    assert "float64 is not known" in str(problems("dtype=float64", "log.utilization=true")["log.utilization"])
    with pytest.raises(UserError, match="mps does not support"):
        choose_precision(False, torch.device("mps"), "float64")
