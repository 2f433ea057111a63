"""The number of CPU cores that a process may use."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from runner.base import cores as module
from runner.base.cores import cores

SOURCE = Path(__file__).resolve().parents[2] / "src" / "runner"
V1, V2 = "4:cpu,cpuacct:{path}\n0::/\n", "0::{path}\n"


@pytest.fixture
def eight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 8 cores and no limit; gives the folder of its control groups."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.delattr(os, "process_cpu_count", raising=False)
    monkeypatch.setattr(module, "_GROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(module, "_MEMBERSHIP", tmp_path / "membership")
    return tmp_path


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        ("", {}, 8),
        (V2.format(path="/"), {"cpu.max": "max 100000"}, 8),
        (V2.format(path="/"), {"cpu.max": "150000 100000"}, 2),
        (V2.format(path="/"), {"cpu.max": "50000 100000"}, 1),
        (V2.format(path="/"), {"cpu.max": "6400000 100000"}, 8),
        (V2.format(path="/job/step"), {"job/cpu.max": "300000 100000", "job/step/cpu.max": "max 100000"}, 3),
        (V2.format(path="/job/step"), {"job/cpu.max": "300000 100000", "job/step/cpu.max": "200000 100000"}, 2),
        (V1.format(path="/"), {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        (V1.format(path="/"), {"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        (V1.format(path="/docker/1"), {"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4),
        (
            V1.format(path="/job"),
            {"cpu,cpuacct/job/cpu.cfs_quota_us": "100000", "cpu,cpuacct/job/cpu.cfs_period_us": "100000"},
            1,
        ),
        (V2.format(path="/"), {"cpu.max": "garbage"}, 8),
        (V2.format(path="/"), {"cpu.max": ""}, 8),
        (V2.format(path="/"), {"cpu.max": "100 0"}, 8),
        ("not a line of /proc/self/cgroup", {"cpu.max": "200000 100000"}, 2),
    ],
)
def test_the_cpu_limit_of_a_container_counts(
    eight: Path, membership: str, files: dict[str, str], expected: int
) -> None:
    (eight / "membership").write_text(membership)
    for name, text in files.items():
        (eight / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (eight / "cgroup" / name).write_text(text + "\n")
    assert cores() == expected


def test_a_system_without_affinities_has_all_its_cores(eight: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert cores() == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cores() == 1


def test_python_itself_is_asked_where_it_knows(eight: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "process_cpu_count", lambda: 5, raising=False)
    assert cores() == 5


def test_no_other_code_counts_cores() -> None:
    counting = re.compile(r"sched_getaffinity|process_cpu_count|cpu\.max|cfs_quota")
    found = [path.name for path in SOURCE.rglob("*.py") if counting.search(path.read_text())]
    assert found == ["cores.py"]
