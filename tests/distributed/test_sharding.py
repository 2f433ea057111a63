"""strategy=fsdp: runs whose weights are divided among ranks train as those of one process do."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_runs import Left, make_job, train_jobs, train_on_ranks

from runner.config.errors import Problem

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
    "window": (*VIT, "accumulate=3", "grad_clip.norm=0.5", "ema=0.9", "epochs=2"),
    "parts": (
        *VIT,
        "freeze=[blocks.0.*@3]",
        "grad_clip.agc=0.01",
        "activation_checkpointing=true",
        "swa=1",
        "epochs=2",
    ),
    "adamw": (*MLP, "optimizer=adamw", "optimizer.eps=0.001", "on_nonfinite=skip", NAN),
    "still": (*MLP, "optimizer.lr=1e-60", "optimizer.weight_decay=0", "max_steps=1"),
}
KEYS = {"parts": ("fsdp.blocks=[blocks.1]", "fsdp.reshard_after_forward=false")}


@pytest.fixture
def job(compose: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """The job of a run in a folder of that name, which may resume from another at its step 3."""

    def make(name: str, *words: str, resume: str = "") -> Any:
        made = make_job(compose, *SMALL, *words, f"hydra.run.dir={tmp_path / name}")
        checkpoint = tmp_path / resume / "checkpoints" / "step_0000000003.safetensors"
        return dataclasses.replace(made, checkpoint=checkpoint) if resume else made

    return make


def assert_same(some: Left, other: Left, rel: float = 1e-5) -> None:
    """Losses and tensors are equal to rounding; a loss of 0 is of a step that was skipped."""
    name = some.directory.name
    pairs = list(zip(some.losses, other.losses, strict=True))
    assert all(ours == pytest.approx(theirs, rel=rel) for ours, theirs in pairs if theirs), (name, pairs)
    for ours, theirs in zip(some.val, other.val, strict=True):
        assert ours == pytest.approx(theirs, rel=rel), name
    ours, theirs = some.tensors(), other.tensors()
    assert sorted(ours) == sorted(theirs)
    for place, tensor in theirs.items():
        if tensor.is_floating_point():
            atol = rel * float(tensor.abs().amax()) if tensor.numel() else 0.0
            torch.testing.assert_close(
                ours[place], tensor, rtol=rel, atol=atol, msg=lambda text, p=place: f"{name}, {p}: {text}"
            )


@pytest.mark.slow
def test_divided_weights_train_and_resume_as_one_process_does(job: Callable[..., Any], tmp_path: Path) -> None:
    alone = [job(f"{name}_1", *words) for name, words in RUNS.items()]
    train_jobs(alone)
    two, ddp, window = ("devices=2", "strategy=fsdp"), ("devices=2", "strategy=ddp"), RUNS["window"]
    divided = [job(f"{name}_2", *words, *two, *KEYS.get(name, ())) for name, words in RUNS.items()]
    divided.append(job("window_ddp", *window, *ddp))
    divided += [job(f"fsdp_after_{before}", *window, *two, resume=f"window_{before}") for before in ("1", "2", "ddp")]
    divided.append(job("ddp_after_2", *window, *ddp, resume="window_2"))
    train_on_ranks(divided, 2, tmp_path / "logs")
    train_jobs([job("1_after_2", *window, resume="window_2")])
    found = {path.name: Left(path) for path in tmp_path.iterdir() if (path / "metrics.jsonl").exists()}
    for name in RUNS:
        assert_same(found[f"{name}_2"], found[f"{name}_1"])
    for name in ("window_ddp", "fsdp_after_1", "fsdp_after_2", "fsdp_after_ddp", "ddp_after_2", "1_after_2"):
        assert_same(found[name], found["window_1"])
    assert found["still_2"].summary["weights_sha256"] == found["still_1"].summary["weights_sha256"], "initial weights"
    for number in (1, 2):
        assert "the images of sample 3 have values that are not finite; skipped" in found[f"adamw_{number}"].log


@pytest.mark.slow
def test_three_ranks_keep_a_third_of_the_state_each(job: Callable[..., Any], tmp_path: Path) -> None:
    names = ("plain", "window")
    train_jobs([job(f"{name}_1", *RUNS[name]) for name in names])
    train_on_ranks(
        [job(f"{name}_3", *RUNS[name], "devices=3", "strategy=fsdp") for name in names], 3, tmp_path / "logs"
    )
    for name in names:
        assert_same(Left(tmp_path / f"{name}_3"), Left(tmp_path / f"{name}_1"))
    for rank, log in enumerate(["run.log", "logs/rank_1.log", "logs/rank_2.log"]):
        said = (tmp_path / "window_3" / log).read_text()
        assert f"rank {rank} of 3 keeps" in said
        assert "3 units" in said
        for part in ("parameters", "gradients", "optimizer state"):
            own, all_ = re.search(rf"([\d.]+) KiB of ([\d.]+) KiB of {part}", said).groups()  # type: ignore[union-attr]
            assert float(own) == pytest.approx(float(all_) / 3, rel=0.15), part


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("compile=true", "compile"),
        ("on_oom=split", "on_oom"),
        ("data.batch_size=auto", "data.batch_size"),
        ("amp=fp16", "amp"),
        ("dist.find_unused_parameters=true", "dist.find_unused_parameters"),
        ("optimizer._target_=torch.optim.Adafactor", "optimizer"),
        ("fsdp.cpu_offload=true", "fsdp.cpu_offload"),
    ],
)
def test_what_divided_weights_rule_out_is_refused(
    problems: Callable[..., dict[str, Problem]], word: str, key: str
) -> None:
    words = ("strategy=fsdp", "devices=2", "device=cpu")
    assert key not in problems(*words)
    assert key in problems(*words, word)


def test_keys_of_fsdp_have_no_effect_without_it(problems: Callable[..., dict[str, Problem]]) -> None:
    found = problems("fsdp.replicas=2", "fsdp.reshard_after_forward=false")
    assert {"fsdp.replicas", "fsdp.reshard_after_forward"} <= set(found)
