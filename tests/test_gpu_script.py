"""`scripts/gpu.py`: without a GPU it lists what it would run, each of its commands is valid, and it reads what they print."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import airbench_gpu
import benchmark_loop
import benchmark_peers
import gpu
from peers.cases import CASES
from peers.processes import words as words_of_peer

NONE = Path()


def test_without_a_gpu_it_lists_what_it_would_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu, "run", None)
    assert gpu.main([]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("there is no CUDA device")
    assert all(f"  {entry.name}, at most" in printed for entry in gpu.ENTRIES)


@pytest.mark.parametrize("entry", gpu.ENTRIES, ids=lambda entry: entry.name)
def test_every_command_is_valid(
    entry: gpu.Entry, problems: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = entry.words("cuda", str(tmp_path))
    assert not [word for word in words if "{" in word]
    if words[:2] == ["-m", "runner"]:
        assert problems(*words[3:], verb=words[2]) == {}
    elif words[0] == "scripts/benchmark_loop.py":
        monkeypatch.setattr(sys, "argv", words)
        asked = benchmark_loop.options()
        assert set(asked.contenders) <= set(benchmark_loop.OTHERS)
        peer = benchmark_peers.options(["--case", *asked.case, "--device", "cuda"])
        job = replace(benchmark_peers.job_of(peer, asked.case[0], 1, None), contender="runner")
        assert problems(*words_of_peer(job, tmp_path / "job.json")[1:]) == {}
    elif words[0] == "scripts/benchmark_peers.py":
        asked = benchmark_peers.options(words[1:])
        assert asked.device == "cuda"
        assert set(asked.contenders) <= set(CASES[asked.case[0]].contenders)
    else:
        assert words[:2] == ["-m", "pytest"]


def test_a_failure_and_a_limit_are_rows() -> None:
    def ends(code: str, limit_s: float = 30.0) -> list[gpu.Row]:
        return gpu.run(
            gpu.Entry("it", ("-c", code), limit_s, lambda printed, folder: [("a", "b", printed, "")]), "", 30.0
        )

    assert ends("print(1, end='')") == [("a", "b", "1", "")]
    ((name, _, result, reason),) = ends("raise SystemExit('error: no such thing')")
    assert (name, result, reason) == ("it", "not measured", "status 1: error: no such thing")
    slow = gpu.Entry("it", ("-c", "import time; time.sleep(60)"), 1.0, gpu.of_tests)
    assert gpu.run(slow, "", 1.0) == [("it", "", "not measured", "not finished after 1 s")]
    unread = gpu.Entry("it", ("-c", "print('nothing')"), 30.0, gpu.of_bench)
    assert "cannot be read" in gpu.run(unread, "", 30.0)[0][3]


PYTEST = "..F\nFAILED tests/test_gpu.py::test_one - AssertionError\n=== 1 failed, 2 passed in 3.00s ===\n"
LOOPS = """### digits: batch 64

| loop | a step |
|---|---|
| `runner` | 1 µs | | |
| `bare` | 2 µs | 1.06 times as long | 1.05, 1.06 |"""
PEERS = """### digits
| `runner` | 1 µs | 1 µs | 1.00 | 1.00 to 1.00 | 0.1 | 98% |
| `hand` | 2 µs | 1 µs | 1.30 | 1.20 to 1.40 | 0.1 | 98% |
| `timm` | not measured: timm is not installed | | | | | |"""
AIRBENCH = "| training | seconds, median |\n|---|---|\n| `a.py` | 2.60 | 0.9405 | 5 |"


@pytest.mark.parametrize(
    ("read", "printed", "rows"),
    [
        (gpu.of_tests, PYTEST, [("tests with `-m gpu`", "", "1 failed, 2 passed in 3.00s", "FAILED tests/test_gpu.py::test_one")]),
        (gpu.of_loops, LOOPS, [("`runner`, digits: batch 64", "`bare`", "1.06 times as long",
                                "each process: 1.05, 1.06; `bare` takes 2 µs a step")]),
        (gpu.of_peers, PEERS, [("`hand`, digits", "`runner`", "1.30 times as long (1.20 to 1.40)", "2 µs a step"),
                               ("`timm`, digits", "`runner`", "not measured", "not measured: timm is not installed")]),
        (gpu.of_airbench, AIRBENCH, [("`a.py`", "", "2.60 s, accuracy 0.9405", "5 runs")]),
    ],
)  # fmt: skip
def test_what_a_command_prints_is_rows(read: Any, printed: str, rows: list[gpu.Row]) -> None:
    assert read(printed, NONE) == rows


def test_what_bench_prints_is_rows(accepted: Any) -> None:
    found = accepted("bench", "model=mlp", "threads=1", "json=true", "toggles=[optimizer.fused,tf32]",
                "budget_s=20", "steps=2", "repeats=2")  # fmt: skip
    rows = gpu.of_bench(found.out, NONE)
    assert [row[0] for row in rows] == ["`optimizer.fused=false`", "`tf32`"], rows
    fused, tf32 = rows
    assert "times as fast (" in fused[2]
    assert tf32[2] == "not measured"


def test_waits_are_counted_within_the_steps(tmp_path: Path) -> None:
    def event(name: str, ts: float, dur: float = 1.0, cat: str = "cuda_runtime") -> dict[str, Any]:
        return {"name": name, "ts": ts, "dur": dur, "cat": cat}

    steps = [event("step", 10, 5, "user_annotation"), event("step", 20, 5, "user_annotation")]
    waits = [event(gpu.SYNC[0], 12), event(gpu.SYNC[1], 21), event(gpu.SYNC[1], 30), event("cudaLaunchKernel", 11)]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [*steps, *waits]}))
    expected = "cudaStreamSynchronize 1, cudaDeviceSynchronize 1"
    assert gpu.of_syncs("", tmp_path) == [("host waits for the GPU", "", "2 in 2 steps", expected)]


def test_both_trainings_of_cifar10_are_rows(tmp_path: Path) -> None:
    lines = [
        "|  run     |  epoch  |  train_acc  |  val_acc  |  tta_val_acc  |  time_seconds  |",
        "|  warmup  |      1  |     0.8000  |   0.7000  |               |        0.3000  |",
        "|          |   eval  |     0.9300  |   0.9290  |       0.9390  |        9.1234  |",
        "|       0  |      1  |     0.8000  |   0.7000  |               |        0.3000  |",
        "|          |   eval  |     0.9400  |   0.9310  |       0.9405  |        2.6000  |",
    ]
    file = tmp_path / "airbench.py"
    text = "\n".join(lines)
    file.write_text(f"import os, time\nassert os.path.isdir('cifar10/there')\nprint({text!r})\ntime.sleep(60)")
    (tmp_path / "data" / "there").mkdir(parents=True)
    assert airbench_gpu.airbench(file, tmp_path / "data", 1) == [(2.6, 0.9405)], "without the run that warms up"
    logged = [{"global_step": 50, "samples_per_s": 1000.0}, {"global_step": 60, "samples_per_s": 500.0}]
    assert airbench_gpu.seconds_of(logged, 100) == 50 * 100 / 1000 + 10 * 100 / 500
