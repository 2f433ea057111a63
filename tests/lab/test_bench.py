"""`bench` finds what pays on this machine: shown with models and data whose speed is known, because they sleep."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

PARTS = '''
import time

import torch
from torch import nn

MS = 0.001


class Net(nn.Module):
    """Linear, with pauses that a toggle takes away."""

    def __init__(self, num_classes: int, image_size: tuple[int, int], pause_ms: float = 0.0, broken: bool = False,
                 steps_with_amp: int = 1000, without_amp_ms: float = 0.0, without_channels_last_ms: float = 0.0,
                 with_channels_last_ms: float = 0.0):
        super().__init__()
        self.layer = nn.Conv2d(3, num_classes, image_size)
        self.pause_ms, self.broken = pause_ms, broken
        self.without_amp_ms, self.steps_with_amp = without_amp_ms, steps_with_amp
        self.layout_ms = {True: with_channels_last_ms, False: without_channels_last_ms}

    def forward(self, images):
        fast = torch.is_autocast_enabled("cpu")
        if self.training:
            self.steps_with_amp -= fast
            if self.steps_with_amp < 0:
                raise RuntimeError("no memory is left, say")
            is_nhwc = images.is_contiguous(memory_format=torch.channels_last)
            time.sleep(MS * (self.pause_ms + self.layout_ms[is_nhwc] + (0 if fast else self.without_amp_ms)))
        logits = self.layer(images).flatten(1)
        if self.broken and fast:
            logits = logits / 0
        return logits

'''
TINY = (
    *("threads=1", "data=synthetic", "data.image_size=8", "data.batch_size=8", "transform=none"),
    *("repeats=5", "steps=2"),
)
NET = ("--config-dir", "mine", "model=paused")
OPTION = """# A model that sleeps.
_target_: bench_parts.Net
pause_ms: 0.0
broken: false
steps_with_amp: 1000
without_amp_ms: 0.0
without_channels_last_ms: 0.0
with_channels_last_ms: 0.0
"""

Bench = Callable[..., dict[str, Any]]


@pytest.fixture
def parts(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The sleeping model, and measurements as short as their steps: pauses are longer than any noise."""
    monkeypatch.setattr("runner.lab.bench.run._LEAST_S", 0.0)
    (workdir / "bench_parts.py").write_text(PARTS)
    (workdir / "mine" / "model").mkdir(parents=True)
    (workdir / "mine" / "model" / "paused.yaml").write_text(OPTION)
    monkeypatch.syspath_prepend(workdir)
    yield
    sys.modules.pop("bench_parts", None)


@pytest.fixture
def bench(run: Callable[..., Any], parts: None, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """What `bench` finds out about the sleeping model: `bench("toggles=[]", "vary.amp=[bf16]", "model.without_amp_ms=5")`."""
    monkeypatch.setattr("runner.lab.bench.run.bars", lambda *_, **__: None)

    def call(*words: str) -> dict[str, Any]:
        result = run("bench", *TINY, *NET, *words, "json=true")
        assert result.status == 0, result.err
        found: dict[str, Any] = json.loads(result.out)
        return found | {"by_name": {" ".join(each["overrides"]): each for each in found.get("candidates", [])}}

    return call


def reasons(found: dict[str, Any]) -> dict[str, str]:
    return {each["what"]: each["why"] for each in found["left_out"]}


def test_toggles_that_pay_are_found_and_combined_and_the_combination_recommended(bench: Bench) -> None:
    found = bench("toggles=[amp,channels_last]", "model.without_amp_ms=15", "model.without_channels_last_ms=15")
    baseline, amp = found["baseline"], found["by_name"]["amp=bf16"]
    assert amp["ratio"]["median"] > 1.5
    assert amp["samples_per_s"]["median"] > baseline["samples_per_s"]["median"]
    assert baseline["step_ms"]["median"] > 30
    assert amp["verdict"] == ""
    (combined,) = [each for each in found["candidates"] if each["kind"] == "combination"]
    assert combined["ratio"]["median"] > max(each["ratio"]["median"] for each in found["candidates"][1:])
    assert {word.split("=")[0] for word in found["recommended"]} == {"amp", "channels_last"}


@pytest.mark.extended
def test_people_get_a_table_a_picture_and_the_recommendation_before_the_folder(
    run: Callable[..., Any], parts: None, workdir: Path
) -> None:
    result = run("bench", *TINY, *NET, "model.without_channels_last_ms=15", "toggles=[channels_last,tf32]")
    assert result.status == 0, result.err
    *lines, last_but_one, last = result.out.strip().splitlines()
    assert last_but_one == "recommended: channels_last=true"
    folder = Path(last)
    assert folder.parent == Path("outputs/benchmarks")
    assert any(line.startswith("as configured") for line in lines)
    assert any(line.startswith("tf32") and "setting of CUDA's" in line for line in lines)
    written = json.loads((folder / "bench.json").read_text())
    assert written["recommended"] == ["channels_last=true"]
    assert written["environment"]["torch"]["version"] == torch.__version__
    with Image.open(folder / "bench.png") as picture:
        picture.verify()


@pytest.mark.extended
def test_if_nothing_pays_it_says_so(run: Callable[..., Any], parts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.lab.bench.run.bars", lambda *_, **__: None)
    result = run("bench", *TINY, *NET, "model.with_channels_last_ms=4", "toggles=[channels_last]")
    assert result.status == 0, result.err
    assert result.out.strip().splitlines()[-2] == "recommended: nothing to change"


def test_losses_are_reported_and_another_training_is_not_recommended(bench: Bench) -> None:
    found = bench("toggles=[]", "vary.optimizer.fused=[false]", "vary.data.batch_size=[4]")
    same, other = found["by_name"]["optimizer.fused=false"], found["by_name"]["data.batch_size=4"]
    assert same["loss"] == found["baseline"]["loss"] != other["loss"]
    assert other["verdict"] == "another training"
    assert other["saved_bytes"] < same["saved_bytes"] == found["baseline"]["saved_bytes"]


def test_a_loss_that_is_not_finite_is_not_recommended(bench: Bench) -> None:
    found = bench("toggles=[]", "vary.amp=[bf16]", "model.broken=true", "model.without_amp_ms=15")
    assert found["by_name"]["amp=bf16"]["verdict"] == "loss not finite"
    assert found["recommended"] == []


def test_what_cannot_be_run_is_listed_with_the_reason(bench: Bench) -> None:
    found = bench(
        *("toggles=[optimizer.fused]", "optimizer.foreach=true", "vary.data.batch_size=[0]", "vary.model.pause=[1]"),
        *("vary.data.placement=[elsewhere]", "vary.optimizer.fused=[true]", "vary.grad_clip.norm=[-1]"),
    )
    why = reasons(found)
    assert why["data.batch_size=0"].startswith("data.batch_size: cannot be 0")
    assert "is not an argument of bench_parts.Net" in why["model.pause=1"]
    assert "elsewhere" in why["data.placement=elsewhere"]
    assert "fused" in why["optimizer.fused=true"]
    assert "grad_clip.norm" in why["grad_clip.norm=-1"]
    assert [*found["by_name"]] == ["optimizer.fused=true optimizer.foreach=false"]


def test_a_candidate_that_fails_later_on_is_left_out_and_the_others_go_on(bench: Bench) -> None:
    found = bench("toggles=[]", "vary.amp=[bf16]", "vary.optimizer.fused=[false]", "model.steps_with_amp=7")
    assert reasons(found) == {"amp=bf16": "no memory is left, say"}
    assert [*found["by_name"]] == ["optimizer.fused=false"]
    assert len(found["by_name"]["optimizer.fused=false"]["ratios"]) == 5


def test_a_candidate_that_is_far_too_slow_costs_the_others_no_time(bench: Bench) -> None:
    found = bench("toggles=[channels_last]", "model.with_channels_last_ms=60", "steps=20")
    assert "5 times slower" in reasons(found)["channels_last=true"]
    assert found["candidates"] == []


def test_when_time_is_over_no_candidate_and_no_round_begins_and_it_is_said(bench: Bench) -> None:
    found = bench("toggles=[channels_last]", "model.pause_ms=20", "budget_s=0.001")
    assert "no time was left" in reasons(found)["channels_last=true"]
    assert found["notes"] == ["3 measurements instead of 5, because time ran out"]
    assert len(found["baseline"]["seconds_per_sample"]) == 3


def test_switches_of_torch_are_set_for_each_candidate_and_put_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    original = torch.nn.Conv2d.forward

    def forward(self: Any, images: Any) -> Any:
        seen.append(torch.is_anomaly_enabled())
        return original(self, images)

    monkeypatch.setattr(torch.nn.Conv2d, "forward", forward)
    found = bench("toggles=[]", "vary.detect_anomaly=[true]", "model.pause_ms=3")
    assert [*found["by_name"]] == ["detect_anomaly=true"]
    turns = sum(before != after for before, after in itertools.pairwise(seen))
    assert turns > 2 * 5, "five rounds of turns"
    assert not torch.is_anomaly_enabled()


@pytest.mark.extended
def test_without_room_for_all_candidates_each_is_built_for_its_turn(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.lab.bench.run.room_for", lambda *_: False)
    found = bench("toggles=[]", "vary.amp=[bf16]", "model.without_amp_ms=15")
    assert found["by_name"]["amp=bf16"]["ratio"]["median"] > 1.5


@pytest.mark.extended
def test_the_config_of_a_checkpoint_is_measured_with_the_line_on_top(
    train: Callable[..., Any], run: Callable[..., Any]
) -> None:
    trained = train("data=synthetic", "data.image_size=8", "model=mlp", "model.hidden=[7]", "max_steps=1")
    result = run("bench", f"ckpt_path={trained.directory}", "threads=1", "toggles=[]", "vary.seed=[1]", "budget_s=1")
    assert result.status == 0, result.err
    assert "MLP, 1,431 parameters" in result.out
    assert "seed=1" in result.out


def test_the_jobs_of_a_sweep_write_into_its_folder(bench: Bench, run: Callable[..., Any]) -> None:
    result = run("bench", "--multirun", *TINY, *NET, "toggles=[]", "seed=0,1", "budget_s=1")
    assert result.status == 0, result.err
    [sweep] = Path("outputs/benchmarks").iterdir()
    for job in ("0", "1"):
        assert json.loads((sweep / job / "bench.json").read_text())["recommended"] == []
