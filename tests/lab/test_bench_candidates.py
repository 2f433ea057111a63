"""Which settings `bench` tries on which machine, and what it says of those that it does not try."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.config.composition import Composition
from runner.config.load import opened, resolve_config
from runner.config.schema.verbs import Bench
from runner.lab.bench.candidates import Candidate, RunTraits, candidates

CPU = RunTraits(
    device="cpu",
    cores=6,
    threads=4,
    precision=False,
    workers=None,
    kernels={"fused": False, "foreach": False},
    convolutions=True,
)
CUDA = dataclasses.replace(CPU, device="cuda", kernels={"fused": True, "foreach": False})
FUSED = "optimizer.fused=true optimizer.foreach=false"
WORKERS = dataclasses.replace(CPU, workers=2)

# The same words give the same config, and composing is what takes the time.
_KNOWN: dict[tuple[str, ...], tuple[Bench, Composition]] = {}

Tried = Callable[..., tuple[dict[str, Candidate], dict[str, str]]]


@pytest.fixture
def composed(workdir: Path) -> Callable[..., tuple[Bench, Composition]]:
    def call(*words: str) -> tuple[Bench, Composition]:
        if words not in _KNOWN:
            with opened("bench", words) as command:
                _KNOWN[words] = resolve_config(command.composition, Bench), command.composition
        return _KNOWN[words]

    return call


@pytest.fixture
def tried(composed: Callable[..., Any]) -> Tried:
    """Candidates by name, and what was skipped with the reason: `tried(CPU, amp=True)`."""

    def call(traits: RunTraits, *words: str, **changes: Any) -> tuple[dict[str, Candidate], dict[str, str]]:
        config, composition = composed(*words)
        optimizer = config.optimizer | changes.pop("optimizer", {})
        changed = dataclasses.replace(config, optimizer=optimizer, **changes)
        found, left_out = candidates(changed, traits, composition.sources)
        return {candidate.name: candidate for candidate in found}, dict(left_out)

    return call


def test_on_the_cpu_each_toggle_that_applies_is_tried_and_compiling_only_if_asked_for(tried: Tried) -> None:
    found, left_out = tried(CPU)
    assert {"amp=bf16", "amp=fp16", "channels_last=true", FUSED, "performance=fast"} <= set(found)
    assert {"threads=1", "threads=2", "threads=6", "data.placement=disk"} <= set(found)
    assert not any("compile" in name or "tf32" in name or "cudnn" in name for name in found)
    assert not {"threads=4", "performance=baseline", "amp=false", "performance=max"} & set(found)
    assert {"compile", "tf32", "cudnn_benchmark", "performance=max", "data.num_workers"} <= set(left_out)
    found, _ = tried(CPU, toggles=["compile", "performance"])
    assert {"compile=true", "compile=step", "performance=max", "performance=fast"} <= set(found)
    assert all(name.startswith(("compile=", "performance=")) for name in found)
    assert "performance=fast" not in tried(CPU, amp="auto", channels_last=True)[0], "it changes nothing"


def test_on_cuda_its_own_toggles_and_compiling_are_tried(tried: Tried) -> None:
    found, left_out = tried(CUDA)
    assert {"compile=true", "tf32=true", "cudnn_benchmark=true", "performance=max"} <= set(found)
    assert {"data.placement=disk", "data.placement=ram", "data.placement=device"} <= set(found)
    assert "threads" in left_out


def test_what_is_on_already_is_tried_off(tried: Tried) -> None:
    traits = dataclasses.replace(CPU, precision="bf16", kernels={"fused": True, "foreach": False})
    found, _ = tried(traits, amp=True, channels_last=True, optimizer={"fused": True}, compile=True)
    assert {"amp=false", "amp=fp16", "channels_last=false", "optimizer.fused=false", "compile=false"} <= set(found)
    assert {"compile=step", "optimizer.foreach=true optimizer.fused=false", "activation_checkpointing=true"} <= set(
        found
    )
    assert "compile=false" in tried(traits, compile="step")[0]
    assert "performance=baseline" in found
    assert not {"amp=bf16", "channels_last=true", "compile=true"} & set(found)


def test_toggles_narrow_what_is_tried(tried: Tried) -> None:
    found, left_out = tried(CPU, toggles=["amp", "optimizer.fused"])
    assert set(found) == {"amp=bf16", "amp=fp16", FUSED}
    assert left_out == {}
    assert tried(CPU, toggles=[]) == ({}, {})


def test_optimizer_and_model_are_asked_only_for_what_they_take(tried: Tried) -> None:
    found, left_out = tried(dataclasses.replace(CPU, kernels={"foreach": False}, convolutions=False))
    assert "channels_last=true" not in found
    assert "channels_last" in left_out
    assert "optimizer.foreach=true" in found
    assert "AdamW" in left_out["optimizer.fused"]


def test_fused_and_foreach_take_each_others_place(tried: Tried) -> None:
    on = dataclasses.replace(CPU, kernels={"fused": True, "foreach": False})
    found, _ = tried(on, optimizer={"fused": True}, toggles=["optimizer.fused", "optimizer.foreach"])
    assert dict(found["optimizer.foreach=true optimizer.fused=false"].settings) == {
        "optimizer.foreach": True,
        "optimizer.fused": False,
    }


def test_workers_are_tried_where_samples_are_read_one_by_one(tried: Tried, composed: Callable[..., Any]) -> None:
    found, _ = tried(WORKERS, toggles=["data.num_workers", "data.placement"])
    assert set(found) == {f"data.num_workers={count}" for count in (0, 1, 4, 6)}
    config, composition = composed("data.placement=disk", "data.num_workers=2")
    names = {candidate.name for candidate in candidates(config, WORKERS, composition.sources)[0]}
    assert {"data.num_workers=0", "data.placement=ram data.num_workers=auto"} <= names
    assert "data.num_workers=2" not in names


@pytest.mark.parametrize(
    "word", ["vary.data.batch_size=[64,128,256]", "vary={data.batch_size:[64,128,256]}"], ids=["dotted", "mapping"]
)
def test_further_keys_are_varied_in_either_spelling(word: str, tried: Tried) -> None:
    found, _ = tried(CPU, word, toggles=[])
    assert set(found) == {"data.batch_size=128", "data.batch_size=256"}, "64 is what is configured"
    assert not found["data.batch_size=128"].same_training
    varied, _ = tried(CPU, toggles=[], vary={"optimizer": {"fused": [False, True]}})
    assert set(varied) == {"optimizer.fused=false", "optimizer.fused=true"}
    assert varied["optimizer.fused=true"].same_training


def test_an_own_preset_is_tried(composed: Callable[..., Any], workdir: Path) -> None:
    folder = workdir / "mine" / "performance"
    folder.mkdir(parents=True)
    (folder / "lean.yaml").write_text("# @package _global_\n# Mine.\namp: bf16\noptimizer:\n  fused: true\n")
    config, composition = composed("--config-dir", "mine")
    found, _ = candidates(config, CPU, composition.sources)
    [own] = [candidate for candidate in found if candidate.words == ("performance=lean",)]
    assert dict(own.settings) == {"amp": "bf16", "optimizer.fused": True}
    assert own.same_training
