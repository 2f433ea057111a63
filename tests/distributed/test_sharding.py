"""strategy=fsdp: runs whose weights are divided among ranks train as those of one process do."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_runs import Left, make_job, train_jobs, train_on_ranks

# 41 samples to train on: five batches, of which the last has one.
SMALL = (
    "data=synthetic", "data.dataset.samples=46", "data.image_size=8", "data.batch_size=10", "data.normalize.mean=[0.5,0.5,0.5]",
    "data.normalize.std=[0.25,0.25,0.25]", "evaluate.batch_size=2", "evaluate.test=false", "epochs=1", "device=cpu",
    "transform=strong", "optimizer=sgd", "optimizer.lr=0.02", "scheduler=constant", "logger=none", "callbacks=none", "threads=1",
    "log.progress=false", "log.curves=false", "log.every_steps=1", "checkpoint.min_seconds=0", "checkpoint.every_steps=3",
    "checkpoint.keep=9", "trust=[sharded_runs]",
)  # fmt: skip
MLP = ("model=mlp", "model.hidden=[16]", "model.dropout=0.3")
VIT = (
    "model=vit_tiny", "model.dim=12", "model.depth=2", "model.dropout=0.1", "model.drop_path=0.2", "model.mlp_ratio=2",
)  # fmt: skip
NAN = "transform.train=[{_target_:sharded_runs.Poison,sample:3}]"
RUNS = {
    "plain": MLP,
    "window": (*VIT, "accumulate=3", "grad_clip.norm=0.5", "ema=0.9"),
    "parts": (*VIT, "freeze=[blocks.0.*@3]", "grad_clip.agc=0.01", "activation_checkpointing=true", "swa=1", "epochs=2"),
    "adamw": (*MLP, "optimizer=adamw", "optimizer.eps=0.001", "on_nonfinite=skip", NAN),
    "still": (*MLP, "optimizer.lr=1e-30", "optimizer.weight_decay=0", "max_steps=1"),
}  # fmt: skip
KEYS = {
    "parts": ("fsdp.blocks=[blocks.1]", "fsdp.reshard_after_forward=false"),
    "window": ("fsdp.replicas=1",),
}


@pytest.fixture
def job(compose: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """The job of a run in a folder of that name."""
    return lambda name, *words: make_job(compose, *SMALL, *words, f"hydra.run.dir={tmp_path / name}")


def assert_same(some: Left, other: Left, rel: float = 1e-5) -> None:
    """Losses and tensors are equal to rounding."""
    name = some.directory.name
    assert some.losses == pytest.approx(other.losses, rel=rel), name
    assert len(some.val) == len(other.val) > 0
    for ours, theirs in zip(some.val, other.val, strict=True):
        assert ours == pytest.approx(theirs, rel=rel), name
    ours, theirs = some.tensors(), other.tensors()
    assert list(ours) == list(theirs)
    for place, tensor in theirs.items():
        if tensor.is_floating_point():
            largest = float(tensor.abs().max()) if tensor.numel() else 0.0
            torch.testing.assert_close(
                ours[place], tensor, rtol=rel, atol=rel * largest, msg=lambda m, p=place: f"{name} {p}: {m}"
            )


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_divided_weights_train_as_one_process_does(job: Callable[..., Any], tmp_path: Path, size: int) -> None:
    alone = [job(f"{name}_1", *words) for name, words in RUNS.items()]
    train_jobs(alone)
    ranks = (f"devices={size}", "strategy=fsdp")
    divided = [job(f"{name}_{size}", *words, *ranks, *KEYS.get(name, ())) for name, words in RUNS.items()]
    train_on_ranks(divided, size, tmp_path / "logs")
    for name in RUNS:
        assert_same(Left(tmp_path / f"{name}_{size}"), Left(tmp_path / f"{name}_1"))
    bits = {Left(tmp_path / f"still_{number}").summary["weights_sha256"] for number in (1, size)}
    assert len(bits) == 1, "initial weights differ"
    skipped = [(tmp_path / f"adamw_{number}" / "skipped_steps").exists() for number in (1, size)]
    assert skipped[0] == skipped[1]
    log = (tmp_path / f"window_{size}" / "logs" / f"rank_{size - 1}.log").read_text()
    own, all_ = re.search(r"keeps ([\d.]+) KiB of ([\d.]+) KiB of parameters", log).groups()  # type: ignore[union-attr]
    assert float(own) <= 1.05 * float(all_) / size
    assert re.search(rf"rank {size - 1} of {size} keeps .* of gradients, .* of optimizer state; 3 units", log)
