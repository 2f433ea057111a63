"""`profile` says which share of a step is data, host and device, and writes the trace of torch.profiler."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.instrument.profiler_ranges import BACKWARD, FORWARD, OPTIMIZER, PREPARE, WAIT
from runner.lab.profile import DATA, DEVICE, HOST, Measurement, Ranges

SMALL = (
    "profile", "threads=1", "data=synthetic", "data.dataset.samples=54", "data.image_size=8", "data.batch_size=8",
    "model=mlp", "model.hidden=[32]", "warmup_steps=1", "steps=6", "trace_steps=2",
)  # fmt: skip
SLOW = """
import time
import torch

class Slow:
    def __init__(self, **options): pass
    classes = ("a", "b")
    targets = [index % 2 for index in range(54)]
    def __len__(self): return 54
    def __getitem__(self, index):
        time.sleep(0.005)
        return torch.full((1, 8, 8), index, dtype=torch.uint8), index % 2
"""


@pytest.fixture
def profile(json_of: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    def call(*words: str) -> dict[str, Any]:
        found: dict[str, Any] = json_of(*SMALL, *words)
        written = json.loads((Path(found["folder"]) / "profile.json").read_text())
        assert {name: found[name] for name in written} == written
        return found

    return call


class Clock:
    """Stands in for the clock of the host and for events of a CUDA device, whose times advance apart."""

    host = device = 0.0

    def __init__(self, enable_timing: bool = True) -> None:
        assert enable_timing

    def record(self, stream: Any) -> None:
        assert stream == "the compute stream"
        self.at = Clock.device

    def elapsed_time(self, other: Clock) -> float:
        return other.at - self.at


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the GPU was asked to do."""
    calls: list[str] = []
    monkeypatch.setattr("runner.lab.profile.time.perf_counter", lambda: Clock.host)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the compute stream")
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("wait"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: calls.append(f"push {name}"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: calls.append("pop"))
    return calls


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_each_moment_of_a_step_is_data_host_or_device(device: str, clock: list[str]) -> None:
    ranges = Ranges(torch.device(device))

    def wait(seconds: float) -> None:
        if device == "cpu":
            Clock.host += seconds
        else:
            Clock.device += 1000 * seconds

    ranges.reset()
    for length in (1.0, 10.0):
        wait(length)
        with ranges(PREPARE):
            wait(2 * length)
            with ranges(WAIT):
                wait(3 * length)
            wait(4 * length)
        for name in (FORWARD, BACKWARD, OPTIMIZER):
            with ranges(name):
                wait(5 * length)
        ranges.boundary()
    assert clock.count("wait") == 0, "nothing waits before the times are read"
    first, second = ranges.steps()
    assert first == {HOST: 1.0, DATA: 9.0, DEVICE: 15.0}
    assert second == {HOST: 10.0, DATA: 90.0, DEVICE: 150.0}
    named = [f"push {name}" for name in (PREPARE, WAIT, FORWARD, BACKWARD, OPTIMIZER)] * 2
    assert [call for call in clock if call.startswith("push")] == (named if device == "cuda" else [])
    ranges.reset()
    assert ranges.steps() == []


def measurement(tmp_path: Path) -> Measurement:
    config: Any = None  # only phases read it
    return Measurement(config, torch.device("cpu"), tmp_path, print)


def test_time_between_the_kernels_of_a_traced_gpu_is_the_hosts(tmp_path: Path) -> None:
    class Event:
        def __init__(self, device: str, microseconds: float, is_user_annotation: bool = False) -> None:
            self.device_type = getattr(torch.autograd.DeviceType, device)
            self.self_device_time_total, self.is_user_annotation = microseconds, is_user_annotation

    class Trace:
        def key_averages(self) -> list[Event]:
            return [Event("CUDA", 8e5), Event("CUDA", 4e5), Event("CUDA", 9e9, True), Event("CPU", 7e9)]

    found = measurement(tmp_path)
    found.steps, found.counts = [Counter({DATA: 0.5, HOST: 0.1, DEVICE: 1.4})] * 2, {"tracing": 3}
    assert found.shares() == {DATA: 0.25, HOST: pytest.approx(0.05), DEVICE: pytest.approx(0.7)}
    found.profiler = Trace()
    assert found.shares() == {DATA: 0.25, HOST: pytest.approx(0.55), DEVICE: pytest.approx(0.2)}


def test_a_step_that_compiles_for_a_smaller_batch_is_told_apart_and_waiting_is_not(tmp_path: Path) -> None:
    found = measurement(tmp_path)
    steps = [Counter({DEVICE: computing, DATA: data}) for computing, data in ((0.01, 0), (0.02, 0), (3, 0), (0.01, 5))]
    found._take(steps, [8, 8, 5, 8])
    assert found.unusual == [3.0]
    assert (len(found.steps), found.samples) == (3, 24)
    assert found.shares()[DATA] == pytest.approx(5 / 5.04)


def test_the_shares_add_up_and_the_trace_has_our_ranges(profile: Any) -> None:
    found = profile("data.drop_last=true", "warmup_steps=4")
    assert sum(found["shares"].values()) == pytest.approx(1)
    assert min(found["shares"].values()) > 0
    assert found["steps"] == {"warm-up": 4, "timing": 6, "tracing": 2}
    assert found["samples_per_s"] == pytest.approx(8 / (found["step_ms"]["mean"] / 1000))
    assert found["peak_bytes"] > 2**25
    folder = Path(found["folder"])
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    names = [event.get("name") for event in events if event.get("ph") == "X" and event.get("cat") == "user_annotation"]
    assert Counter(names) >= Counter({"step": 2, FORWARD: 2, BACKWARD: 2, OPTIMIZER: 2, PREPARE: 1})
    (line,) = (line for line in (folder / "ops.txt").read_text().splitlines() if "aten::addmm" in line)
    assert line.split()[-1] == "4", "two layers in two steps"
    names = {path.name for path in folder.iterdir()}
    assert names == {"trace.json", "ops.txt", "config.yaml", "profile.json"}


def test_a_slow_data_set_shows_in_the_three_shares(accepted: Any, own_module: Any) -> None:
    own_module("slow_set", SLOW)
    result = accepted(*SMALL, "data.dataset={_target_: slow_set.Slow}", "data.placement=disk", "data.num_workers=0")
    *_, data, host, device, folder = result.out.splitlines()
    found = json.loads((Path(folder) / "profile.json").read_text())
    assert found["shares"]["data"] > 0.8
    assert found["shares"]["data"] * found["step_ms"]["mean"] > 8 * 5, "eight samples of five milliseconds"
    for name, line in (("data", data), ("host", host), ("device", device)):
        assert line.startswith(f"{name}: ")
        assert line.endswith("% of a step")
    assert Path(folder).parent == Path("outputs/profiles")
    for part in ("samples/s", "peak memory", "trace.json"):
        assert part in result.out, part


def test_a_trace_that_torch_could_not_write_leaves_no_part_and_is_an_error(
    run: Any, monkeypatch: pytest.MonkeyPatch, workdir: Path
) -> None:
    def on_a_full_disk(self: Any, path: str) -> None:
        Path(f"{path}.tmp").write_text("{")

    monkeypatch.setattr("torch.profiler.profile.export_chrome_trace", on_a_full_disk)
    result = run(*SMALL, "output=mine")
    assert result.status == 1
    assert "torch could not write mine/trace.json" in result.err
    assert not list(workdir.rglob("*.tmp"))


@pytest.mark.parametrize(
    "words",
    [("amp=fp16", "grad_clip.norm=1.0"), ("accumulate=2", "grad_clip.value=0.1"), ("amp=true", "data.placement=disk")],
    ids=" ".join,
)
def test_it_works_with_what_changes_a_step(profile: Any, words: tuple[str, ...]) -> None:
    found = profile(*words, "data.num_workers=0" if "data.placement=disk" in words else "steps=4")
    assert found["precision"].startswith({"amp=true": "bf16", "amp=fp16": "fp16"}.get(words[0], "float32"))
    assert found["shares"]["device"] > 0
    assert found["accumulate"] == (2 if "accumulate=2" in words else 1)


def test_profiling_leaves_the_next_training_in_the_process_alone(profile: Any, train: Any) -> None:
    words = [word for word in SMALL if not word.startswith(("profile", "warmup", "steps", "trace"))]
    before = train(*words, "epochs=1").summary["weights_sha256"]
    profile()
    assert train(*words, "epochs=1").summary["weights_sha256"] == before


def test_a_budget_that_is_used_up_ends_the_phases_early(profile: Any) -> None:
    found = profile("budget_s=0.0001", "warmup_steps=50", "steps=50")
    assert found["steps"] == {"warm-up": 1, "timing": 1, "tracing": 1}
    assert found["cut_short"] == ["warm-up", "timing", "tracing"]


def test_a_run_that_exists_is_profiled_by_its_checkpoint_into_a_folder(profile: Any, train: Any) -> None:
    done = train("data=synthetic", "data.dataset.samples=30", "data.image_size=8", "model=mlp", "epochs=1")
    short = ("trace_steps=0", "warmup_steps=0", "output=here/there")
    found = profile(f"ckpt_path={done.directory}", "data.batch_size=4", *short)
    assert (found["folder"], found["batch_size"]) == ("here/there", 4)
    assert (found["files"], found["steps"]) == (["config.yaml"], {"timing": 6}), "no phase without steps"
    config = Path("here/there/config.yaml").read_text()
    assert "samples: 54" in config, "the line is on top"
    assert "epochs: 1" in config, "the rest is the checkpoint's"
