"""A run that diverges says so, stops with a status of its own, and saves nothing that is not finite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from runner.checkpoint.file import read

SMALL = (
    "train", "data=synthetic", "data.dataset.samples=48", "data.image_size=8", "data.batch_size=8", "epochs=4",
    "model=mlp", "model.hidden=[16]", "transform=none", "evaluate.test=false", "threads=1", "logger=none",
    "log.progress=false", "log.curves=false", "scheduler=constant", "checkpoint.min_seconds=0",
)  # fmt: skip


def finite(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.is_floating_point() or bool(value.isfinite().all())
    if isinstance(value, dict):
        return all(finite(item) for item in value.values())
    return True


def all_finite(directory: Path) -> list[str]:
    paths = sorted((directory / "checkpoints").glob("*.safetensors"))
    for path in paths:
        contents = read(path)
        assert finite(contents["model"]), path.name
        assert finite(contents["optimizer"]), path.name
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


def test_moments_that_are_not_finite_are_not_saved_either(
    run: Any, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Squares of gradients overflow before the weights do, and those weights would stand still for ever after.
    (workdir / "overflow.py").write_text(
        """
class Overflow:
    def on_step(self, loop):
        if loop.state.position.global_step == 3:
            next(iter(loop.state.optimizer.state.values()))["exp_avg_sq"][0] = float("inf")
""",
        encoding="utf-8",
    )
    monkeypatch.syspath_prepend(str(workdir))
    result = run(*SMALL, "optimizer=adamw", "+callbacks.o._target_=overflow.Overflow", "checkpoint.every_steps=2")
    assert result.status == 3, result.out
    assert "exp_avg_sq is not finite after step 4; it was not saved" in result.summary["error"]
    assert all_finite(result.directory) == ["last.safetensors", "step_0000000002.safetensors"]
