"""What a job of a sweep leaves behind in its process: the short form of `scripts/sweep_leaks.py`, counts instead of times."""

from __future__ import annotations

import json
from pathlib import Path

import forked

# In a separate process: other tests leave threads in theirs, which begin and end when they like.
MEASURE = """
import json, sys
from pathlib import Path

sys.path.insert(0, {scripts!r})
import sweep_leaks
from runner.cli import main
from runner.data import build

reads, build_target = [], build.build

def build_and_count(key, *others, **given):
    reads.extend([1] if key == "data.dataset" else [])
    return build_target(key, *others, **given)

build.build = build_and_count
found = sweep_leaks.measure(12, Path.cwd(), 1, {words!r})
once = len(reads)
status = main(["train", f"output_root={{Path.cwd()}}", *{words!r}])
Path("found.json").write_text(json.dumps([found, once, [status, build.kept_source.in_sweep]], default=str))
"""


def test_a_job_leaves_nothing_behind_and_what_jobs_share_is_read_once(workdir, tiny):
    scripts = str(Path(__file__).resolve().parents[2] / "scripts")
    (workdir / "measure.py").write_text(MEASURE.format(scripts=scripts, words=list(tiny)), encoding="utf-8")
    done = forked.run([], script="measure.py")
    assert done.returncode == 0, done.stderr
    found, reads, after = json.loads((workdir / "found.json").read_text())
    first, last = found[1], found[-1]
    assert len(found) == 12
    assert last["objects"] - first["objects"] < 600, "a job has about 8,000"
    assert last["files"] <= first["files"]
    assert last["threads"] <= first["threads"]
    assert last["settings"] == first["settings"]
    assert reads == 1
    assert after == [0, False], "a run that is no job keeps no data set"
