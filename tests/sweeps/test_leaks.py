"""What a job of a sweep leaves behind in its process: the short form of `scripts/sweep_leaks.py`, counts instead of times."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

import sweep_leaks
from runner.data import build


def test_a_job_leaves_nothing_behind_and_what_jobs_share_is_read_once(run, workdir, tiny, monkeypatch, capsys):
    reads = []
    build_target = build.build

    def build_and_count(key, *others, **given):
        reads.extend([1] if key == "data.dataset" else [])
        return build_target(key, *others, **given)

    monkeypatch.setattr(build, "build", build_and_count)
    found = sweep_leaks.measure(12, workdir, 1, list(tiny))
    first, last = found[1], found[-1]
    assert len(found) == 12
    assert last["objects"] - first["objects"] < 600, "a job has about 8,000"
    assert last["files"] <= first["files"]
    assert last["threads"] <= first["threads"]  # a thread of an earlier test may end meanwhile
    assert last["settings"] == first["settings"]
    assert len(reads) == 1
    assert not build.kept_source.in_sweep or run("train", *tiny).status == 0
    assert not build.kept_source.in_sweep
