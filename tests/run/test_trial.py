"""What is tried before training: `dry_run=true` tries a step, and `data.batch_size=auto` finds the largest power of two that
fits, once, and keeps it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from runner.checkpoint.weights import weights_sha256
from runner.config.load import resolve_config
from runner.config.schema import Train
from runner.engine.errors import is_out_of_memory
from runner.run import trial
from runner.run.trial import free_memory
from runner.train import build_run

RUN = (
    "data=synthetic", "data.dataset.samples=300", "data.image_size=8", "epochs=1", "model=small_cnn", "model.width=4",
    "evaluate.test=false", "data.batch_size=auto",
)  # fmt: skip


def size_of(result: Any) -> int:
    return yaml.safe_load((result.directory / "config.yaml").read_text())["data"]["batch_size"]


def row_of(result: Any) -> str:
    return next(line for line in result.out.splitlines() if line.strip().startswith("batch "))


def test_with_memory_enough_the_samples_are_the_limit_and_the_number_gives_the_same_bits(train: Any) -> None:
    result = train(*RUN)
    assert size_of(result) == 256  # of 270 training samples
    assert "256 samples" in row_of(result)
    assert "training samples)" in row_of(result)
    assert train(*RUN, "data.batch_size=256").summary["weights_sha256"] == result.summary["weights_sha256"]


def test_less_memory_means_a_smaller_batch_and_a_resume_keeps_the_number(
    train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "free_memory", lambda device: 600_000)
    first = train(*RUN)
    size = size_of(first)
    assert 2 <= size < 256
    assert "free)" in row_of(first)
    # The sum: what it takes fits, and twice of it would not.
    monkeypatch.setattr(trial, "free_memory", lambda device: 6_000_000)
    resumed = train(f"ckpt_path={first.directory}", "epochs=2")
    again = train(f"ckpt_path={first.directory}", *RUN, "epochs=2")
    assert size_of(resumed) == size_of(again) == size
    assert resumed.summary["weights_sha256"] == again.summary["weights_sha256"]
    assert size_of(train(*RUN)) > size


def test_a_sample_that_does_not_fit_is_a_sentence(rejected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "free_memory", lambda device: 1000)
    found = rejected("train", "threads=1", "logger=none", *RUN)
    assert "data.batch_size: a sample takes about" in found.err
    assert "allowed: a smaller model or smaller images" in found.err


def test_what_the_whole_run_never_comes_to_is_decided_with_the_size_found(train: Any) -> None:
    # With single samples an epoch has 270 steps, and the run less than one; with 256 it has 2.
    words = (*RUN, "epochs=null", "max_steps=8", "freeze=[stages]", "unfreeze_at=2ep")
    found = train(*words, "swa=0.5")
    assert size_of(found) == 256
    assert "never trained" not in found.out + found.err


def test_what_is_frozen_for_a_while_counts_as_trained(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "free_memory", lambda device: 600_000)
    free, late, never = (
        train(*RUN, *words) for words in ((), ("freeze=all-but-head", "unfreeze_at=1"), ("freeze=all-but-head",))
    )
    assert size_of(late) == size_of(free) < size_of(never)


def test_the_limit_of_a_control_group_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    cpu = torch.device("cpu")
    (tmp_path / "max").write_text("5000000\n")
    (tmp_path / "current").write_text("1000000\n")
    monkeypatch.setattr(trial, "_CGROUPS", ((str(tmp_path / "max"), str(tmp_path / "current")),))
    assert free_memory(cpu) == 4_000_000
    (tmp_path / "max").write_text("max\n")
    assert free_memory(cpu) > 4_000_000


@pytest.mark.gpu
def test_on_cuda_the_batch_is_tried(train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    fits = trial._fits

    def at_most_32(training: Any, size: int) -> bool:
        tried.append(size)
        return size <= 32 and fits(training, size)

    monkeypatch.setattr(trial, "_fits", at_most_32)
    assert size_of(train(*RUN, "device=cuda")) == 32
    assert tried == [256, 128, 64, 32]


GREEDY = """
import torch
from torch import nn

class Greedy(nn.Module):
    # Takes two samples in training and four in evaluations, and has no memory for more
    def __init__(self, in_channels, num_classes):
        super().__init__()
        self.head = nn.Linear(64 * in_channels, num_classes)

    def forward(self, images):
        if len(images) > (2 if self.training else 4): raise torch.OutOfMemoryError("no memory is left")
        return self.head(images.flatten(1))
"""


def test_a_size_fits_if_there_is_memory_for_forward_and_backward(compose: Any, own_module: Any) -> None:
    own_module("greedy", GREEDY)
    parts = [word for word in RUN if not word.startswith(("model", "data.batch_size"))]
    words = ("model=null", "+model._target_=greedy.Greedy", "data.batch_size=2")
    run = build_run(resolve_config(compose(*parts, *words), Train))
    before = weights_sha256(run.model.state_dict())
    assert not trial._fits(run, 4)
    assert trial._fits(run, 2)
    assert weights_sha256(run.model.state_dict()) == before
    assert not run.state.optimizer.state
    assert all(weight.grad is None for weight in run.model.parameters())


def test_what_says_that_memory_is_short() -> None:
    on_cpu = RuntimeError("[enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: can't allocate memory")
    assert all(map(is_out_of_memory, (torch.OutOfMemoryError("CUDA out of memory"), on_cpu, MemoryError())))
    assert not any(map(is_out_of_memory, (RuntimeError("shape mismatch"), ValueError("not enough memory"))))


@pytest.mark.parametrize(
    ("words", "key", "size", "allowed"),
    [
        ("train", "data", 4, "a smaller model"),
        ("train dry_run=true data.batch_size=32", "data", 32, "a smaller data.batch_size with a larger accumulate"),
        ("find-lr data.batch_size=32", "data", 32, "data.batch_size=16 accumulate=2, which gives the same update"),
        ("train data.batch_size=32", "data", 32, "data.batch_size=16 accumulate=2, which gives the same update"),
        ("train data.batch_size=15 accumulate=2", "data", 15, "data.batch_size=5 accumulate=6, which gives the same"),
        ("train data.batch_size=2", "evaluate", 512, "a smaller evaluate.batch_size"),
    ],
)
def test_a_batch_that_does_not_fit_is_a_sentence_with_settings_that_fit(
    words: str, key: str, size: int, allowed: str, rejected: Any, own_module: Any
) -> None:
    own_module("greedy", GREEDY)
    verb, *more = words.split()
    parts = [word for word in RUN if not word.startswith("model")]
    found = rejected(verb, "threads=1", *parts, "model=null", "+model._target_=greedy.Greedy", *more)
    assert f"{key}.batch_size: there is not enough memory for batches of {size}: no memory is left" in found.err
    assert f"allowed: {allowed}" in found.err


MLP = ("model=mlp", "model.hidden=[16]", "model.dropout=0", "threads=1", "logger=none", "dry_run=true")


@pytest.mark.parametrize(
    ("words", "step"),
    [
        (("accumulate=2", "ema=0.9"), "a step with batches of 64: "),
        (("devices=3", "strategy=fsdp"), "a step with batches of 22, of one of 3 ranks: "),
    ],
)
def test_what_was_built_and_the_peak_of_a_step_are_printed_and_nothing_is_written(
    run: Callable[..., Any], words: tuple[str, ...], step: str
) -> None:
    found = run("train", *MLP, *words)
    assert found.status == 0, found.err
    assert "digits  seed 0  a dry run" in found.out
    assert re.search(r"model +MLP, 1,210 parameters", found.out), found.out
    assert re.search(rf"(?m)^{step}[\d.,]+ [MG]iB \(most resident memory of the process\)", found.out), found.out
    assert list(Path().iterdir()) == []


def test_other_verbs_refuse_a_dry_run(problems: Callable[..., Any]) -> None:
    assert "is for train" in problems("dry_run=true", verb="bench")["dry_run"].message
