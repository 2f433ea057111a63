"""`profile` says where the time and the memory of a step go, and its figures follow what is done to the run."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runner.instrument.profiler_ranges import BACKWARD, FORWARD, OPTIMIZER, PREPARE, WAIT
from runner.lab.profile.measure import Measured
from runner.lab.profile.report import StepProfile, verdict
from runner.runtime.stopwatch import OTHER, Step

SMALL = (
    "profile", "threads=1", "data=synthetic", "data.dataset.samples=54", "data.image_size=8", "data.batch_size=8",
    "model=mlp", "model.hidden=[32]", "warmup_steps=1", "steps=6", "trace_steps=2",
)  # fmt: skip
PARTS = [WAIT, PREPARE, FORWARD, BACKWARD, OPTIMIZER, OTHER]
SLOW = """
import time
import torch

class Slow:
    def __init__(self, **options): pass
    classes = ("a", "b")
    targets = [index % 2 for index in range(54)]
    def __len__(self): return 54
    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.full((1, 8, 8), index, dtype=torch.uint8), index % 2
"""


@pytest.fixture
def profile(run: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    def call(*words: str) -> dict[str, Any]:
        result = run(*SMALL, "json=true", *words)
        assert result.status == 0, result.err
        found = json.loads(result.out)
        written = json.loads((Path(found["folder"]) / "profile.json").read_text())
        assert {name: found[name] for name in written} == written
        return found  # type: ignore[no-any-return]

    return call


def test_the_parts_of_a_step_add_up_to_the_whole(profile: Callable[..., Any]) -> None:
    found = profile("data.drop_last=true")
    split, whole = found["split"], found["step_ms"]["mean"]
    assert list(split) == PARTS
    assert sum(part["ms"] for part in split.values()) == pytest.approx(whole, rel=1e-6)
    assert sum(part["share"] for part in split.values()) == pytest.approx(1, rel=1e-6)
    assert all(split[name]["ms"] > 0 for name in (PREPARE, FORWARD, BACKWARD, OPTIMIZER, OTHER))
    assert split[WAIT]["ms"] == 0, "images in memory are not waited for"
    assert found["steps"] == {"warm-up": 1, "timing": 6, "tracing": 2, "memory": 1}
    assert found["samples_per_s"] == pytest.approx(8 / (whole / 1000), rel=1e-6)


def test_a_trace_that_torch_could_not_write_leaves_no_part_and_is_an_error(
    run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, workdir: Path
) -> None:
    def on_a_full_disk(self: Any, path: str) -> None:
        Path(f"{path}.tmp").write_text("{")

    monkeypatch.setattr("torch.profiler.profile.export_chrome_trace", on_a_full_disk)
    result = run(*SMALL, "output=mine")
    assert result.status == 1
    assert "torch could not write mine/trace.json" in result.err
    assert not list(workdir.rglob("*.tmp"))


def test_the_trace_is_json_with_our_ranges_and_the_table_has_the_operations(profile: Callable[..., Any]) -> None:
    folder = Path(profile("warmup_steps=4")["folder"])
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    names = [event.get("name") for event in events if event.get("ph") == "X" and event.get("cat") == "user_annotation"]
    for name in ("step", FORWARD, BACKWARD, OPTIMIZER):
        assert names.count(name) == 2, name
    assert PREPARE in names
    ops = json.loads((folder / "ops.json").read_text())
    by_name = {op["name"]: op for op in ops}
    assert by_name["aten::addmm"]["calls"] == 2
    assert not {"step", FORWARD} & set(by_name)
    assert [op["self_ms"] for op in ops] == sorted((op["self_ms"] for op in ops), reverse=True)
    text = (folder / "ops.txt").read_text()
    assert "aten::addmm" in text
    assert "means of 2 traced steps" in text
    assert {path.name for path in folder.iterdir()} == {
        "trace.json", "ops.json", "ops.txt", "config.yaml", "profile.json",
    }  # fmt: skip


def test_without_traced_steps_there_is_no_trace(profile: Callable[..., Any]) -> None:
    found = profile("trace_steps=0", "warmup_steps=0")
    assert found["files"] == ["config.yaml"]
    assert found["steps"] == {"timing": 6, "memory": 1}


def test_a_slow_data_set_shows_as_waiting_for_data(
    profile: Callable[..., Any], workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (workdir / "slow_set.py").write_text(SLOW)
    monkeypatch.syspath_prepend(str(workdir))
    monkeypatch.delitem(sys.modules, "slow_set", raising=False)
    quick = profile("data.placement=disk", "data.num_workers=0")
    slow = profile(
        "data.dataset={_target_: slow_set.Slow}", "data.placement=disk", "data.num_workers=0", "trace_steps=0"
    )
    assert slow["split"][WAIT]["ms"] > 8 * 2, "eight samples of two milliseconds"
    assert slow["split"][WAIT]["share"] > 0.5
    assert slow["split"][WAIT]["ms"] > 5 * quick["split"][WAIT]["ms"]
    assert slow["bottleneck"].startswith("Waiting for data takes")
    assert "data.num_workers=" in slow["bottleneck"]


def test_bytes_and_work_drop_with_fewer_layers(profile: Callable[..., Any]) -> None:
    deep, flat = profile("model.hidden=[64,64,64]", "trace_steps=0"), profile("model.hidden=[64]", "trace_steps=0")
    for name in ("weights_bytes", "gradients_bytes", "optimizer_bytes"):
        assert deep["memory"][name] > flat["memory"][name] > 0, name
    assert deep["memory"]["peak_bytes"] > 2**25
    compute = deep["compute"]
    assert compute["flops_of_sample"] > flat["compute"]["flops_of_sample"]
    assert (compute["utilization"], compute["ceiling_flops_per_s"]) == (None, None), "no peak of a CPU is listed"


@pytest.mark.parametrize(
    "words",
    [
        ("amp=true",),
        ("amp=fp16", "grad_clip.norm=1.0"),
        ("accumulate=2", "grad_clip.value=0.1"),
        ("data.placement=disk",),
    ],
    ids=" ".join,
)
def test_it_works_with_what_changes_a_step(profile: Callable[..., Any], words: tuple[str, ...]) -> None:
    found = profile(*words, "data.num_workers=0" if "data.placement=disk" in words else "steps=4")
    assert found["precision"].startswith({"amp=true": "bf16", "amp=fp16": "fp16"}.get(words[0], "float32"))
    assert found["split"][OPTIMIZER]["ms"] > 0
    assert (found["split"][WAIT]["ms"] > 0) == ("data.placement=disk" in words)
    assert found["accumulate"] == (2 if "accumulate=2" in words else 1)


def test_profiling_leaves_the_next_training_in_the_process_alone(
    profile: Callable[..., Any], train: Callable[..., Any]
) -> None:
    words = [word for word in SMALL if not word.startswith(("profile", "warmup", "steps", "trace"))]
    before = train(*words, "epochs=1").summary["weights_sha256"]
    profile()
    assert train(*words, "epochs=1").summary["weights_sha256"] == before


PLAIN: dict[str, Any] = {
    "shares": {WAIT: 0.0, PREPARE: 0.02, FORWARD: 0.4, BACKWARD: 0.5, OPTIMIZER: 0.05, OTHER: 0.03},
    "device": "cpu", "busy": None, "small_ops": 0.1, "utilization": 0.4, "batch_size": 64, "workers": None, "cores": 8,
    "in_memory_possible": True, "on_device": True, "off": [], "accumulate": 1,
}  # fmt: skip


def of(**shares: float) -> dict[str, float]:
    names = {"wait": WAIT, "prepare": PREPARE, "optimizer": OPTIMIZER, "other": OTHER, "forward": FORWARD}
    found = {names[name]: share for name, share in shares.items()}
    return found | {BACKWARD: 1 - sum(shares.values())}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ["Backward takes most of a step (50%, at 40% of what the cpu can compute)", "smaller model"]),
        ({"off": ["amp"]}, ["try amp=true"]),
        ({"off": ["tf32"]}, ["try tf32=true"]),
        ({"off": ["channels_last"]}, ["try channels_last=true"]),
        ({"off": ["compile"]}, ["try compile=true"]),
        ({"shares": of(wait=0.5), "workers": 2, "in_memory_possible": False},
         ["Waiting for data takes 50% of a step", "data.num_workers=8 (now 2)"]),
        ({"shares": of(wait=0.5), "workers": 2}, ["data.placement=auto"]),
        ({"shares": of(wait=0.5), "workers": 8, "in_memory_possible": False}, ["all 8 CPU cores", "data.cache=disk"]),
        ({"shares": of(prepare=0.3)}, ["Copying and augmenting takes 30%", "transform.train"]),
        ({"shares": of(prepare=0.3), "device": "GPU", "on_device": False}, ["data.placement=device"]),
        ({"shares": of(optimizer=0.45), "accumulate": 2}, ["The optimizer takes 45%", "accumulate=4", "data.batch_size=256"]),
        ({"shares": of(other=0.5)}, ["Callbacks and the loop", "data.batch_size=256 (now 64)"]),
        ({"device": "GPU", "busy": 0.3, "off": ["compile"]}, ["The GPU computes in only 30% of a step", "compile=true"]),
        ({"device": "GPU", "busy": 0.3}, ["data.batch_size=256"]),
        ({"device": "GPU", "busy": 0.95, "off": ["amp"]}, ["Backward takes most", "of what the GPU can compute", "amp=true"]),
        ({"utilization": 0.02, "off": ["amp"]}, ["at 2.0% of what the cpu can compute", "data.batch_size=256"]),
        ({"small_ops": 0.8, "off": ["amp"]}, ["less than 0.02 ms take 80%", "data.batch_size=256"]),
        ({"small_ops": None, "utilization": None, "shares": of(forward=0.8)}, ["Forward takes most of a step (80%):"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)  # fmt: skip
def test_the_sentence_names_what_takes_the_time_and_a_key_to_try(changes: dict[str, Any], said: list[str]) -> None:
    sentence = verdict(StepProfile(**PLAIN | changes))
    assert all(part in sentence for part in said), sentence
    assert sentence.endswith(".")
    assert "\n" not in sentence


def test_people_get_the_report_with_the_sentence_and_the_folder_last(run: Callable[..., Any]) -> None:
    result = run(*SMALL)
    assert result.status == 0, result.err
    *_, sentence, folder = result.out.strip().splitlines()
    found = json.loads((Path(folder) / "profile.json").read_text())
    assert sentence == found["bottleneck"]
    assert Path(folder).parent == Path("outputs/profiles")
    for part in (*PARTS, "aten::addmm", "samples/s", "trace.json"):
        assert part in result.out, part


def test_a_step_that_compiles_for_a_smaller_batch_is_told_apart_and_waiting_is_not() -> None:
    def step(computing: float, waiting: float = 0.0) -> Step:
        return Step({FORWARD: computing / 2, BACKWARD: computing / 2, WAIT: waiting})

    found = Measured()
    found.take([step(0.01), step(0.02), step(3.0), step(0.01, waiting=5.0)], [8, 8, 5, 8])
    assert found.unusual == [3.0]
    assert (len(found.steps), found.samples) == (3, 24)
    assert sum(found.seconds) == pytest.approx(5.04)


def test_a_budget_that_is_used_up_ends_the_phases_early(profile: Callable[..., Any]) -> None:
    found = profile("budget_s=0.0001", "warmup_steps=50", "steps=50")
    assert found["steps"] == {"warm-up": 1, "timing": 1, "tracing": 1, "memory": 1}
    assert found["cut_short"] == ["warm-up", "timing", "tracing"]


def test_a_run_that_exists_is_profiled_by_its_checkpoint(
    profile: Callable[..., Any], train: Callable[..., Any]
) -> None:
    done = train("data=synthetic", "data.dataset.samples=30", "data.image_size=8", "model=mlp", "epochs=1")
    found = profile(f"ckpt_path={done.directory}", "data.batch_size=4", "trace_steps=0")
    assert found["batch_size"] == 4
    config = (Path(found["folder"]) / "config.yaml").read_text()
    assert "samples: 54" in config, "the line is on top"
    assert "epochs: 1" in config, "the rest is the checkpoint's"


def test_a_folder_of_ones_own_is_used_and_a_file_in_the_way_is_a_mistake(
    profile: Callable[..., Any], run: Callable[..., Any], workdir: Path
) -> None:
    assert profile("output=here/there", "trace_steps=0")["folder"] == "here/there"
    assert (workdir / "here" / "there" / "profile.json").is_file()
    (workdir / "file").write_text("")
    result = run(*SMALL, "output=file/there")
    assert (result.status, result.err.startswith("error: output: cannot make the folder")) == (2, True)
