"""What the graph keeps for backward is counted to the byte, and peaks are those of the block that is measured."""

from __future__ import annotations

import contextlib
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from runner.runtime import memory
from runner.runtime.memory import memory_history, peak_memory, reset_peak_memory

CPU = torch.device("cpu")
MIB = 2**20


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def test_the_peak_on_the_cpu_is_that_since_the_reset() -> None:
    reset_peak_memory(CPU)
    before = resident()
    block = torch.ones(64 * MIB // 4)
    high = peak_memory(CPU)
    assert 60 * MIB < high.bytes - before < 80 * MIB
    assert "process" in high.what
    del block
    assert peak_memory(CPU).bytes > high.bytes - 4 * MIB, "a peak stays"
    reset_peak_memory(CPU)
    assert peak_memory(CPU).bytes < high.bytes - 40 * MIB


def test_without_proc_the_peak_is_that_of_the_whole_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise OSError

    monkeypatch.setattr(memory.Path, "read_bytes", refuse)
    monkeypatch.setattr(memory.Path, "write_text", refuse)
    reset_peak_memory(CPU)
    assert peak_memory(CPU).bytes > 0.9 * resident()


@pytest.mark.parametrize("ask", [peak_memory, reset_peak_memory])
def test_on_cuda_the_allocator_is_asked(ask: Callable[[torch.device], object], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    for name in ("max_memory_allocated", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device, name=name: asked.append((name, str(device))) or 7)
    ask(torch.device("cuda", 1))
    assert [device for _, device in asked] == ["cuda:1"]


@pytest.mark.parametrize("fails", [False, True])
def test_a_snapshot_is_written_when_the_block_ends_well_and_recording_ends_in_any_case(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **keys: calls.append(keys), raising=False)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", calls.append, raising=False)
    with contextlib.suppress(ValueError), memory_history(Path("memory.pickle")):
        calls.append("block")
        if fails:
            raise ValueError
    dumped = [] if fails else ["memory.pickle"]
    assert calls == [{"max_entries": 200_000}, "block", *dumped, {"enabled": None}]


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (-5, "0 B"), (1023, "1,023 B"), (1024, "1 KiB"), (1023 * 2**20, "1,023 MiB"), (251_000_000, "239.4 MiB"),
     (3 * 2**50, "3,072 TiB")],
)  # fmt: skip
def test_bytes_are_told_in_the_unit_that_reads_best(size: int, text: str) -> None:
    assert memory.readable(size) == text


PROGRAM = """
import resource, sys
import torch
from runner.runtime.memory import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.zeros(2**23).add_(1)  # 32 MiB: 8192 pages
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.zeros(2**23)
usual = faults()
keep_freed_memory()
faults()
print(usual, faults())
"""


@pytest.mark.extended
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be told")
def test_the_system_is_not_asked_for_the_same_memory_at_every_step() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    usual, kept = map(int, done.stdout.split())
    assert kept * 20 < usual
