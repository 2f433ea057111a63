"""What the process of a sweep keeps of its jobs, and what a job costs beside training.

    python scripts/sweep_leaks.py --jobs 300

Runs a sweep of short jobs on digits, as `python -m runner train --multirun` does, and looks at the process of the sweep when a
job has ended: memory, open files and threads. The exit status is 1 if the last job finds 5% more memory or more files or threads
than the tenth, or if a job takes more than `--most` seconds beside the time from its first step to its end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from runner.cli import main as runner
from runner.sweeps.run import Sweep

MOST_GROWTH = 1.05


def measure(jobs: int, folder: Path, steps: int, further: list[str]) -> list[dict[str, float]]:
    """Run the sweep; for each job, what its end finds, and the seconds since the end before, less those of training."""
    found: list[dict[str, float]] = []
    ended, last = Sweep._ended, time.perf_counter()

    def looked_at(self: Sweep, *given: Any) -> None:
        nonlocal last
        ended(self, *given)
        now = time.perf_counter()
        summary = json.loads((self.folder / str(len(found)) / "summary.json").read_text())
        memory = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
        record = {"memory": memory, "files": len(list(Path("/proc/self/fd").iterdir()))}
        record |= {"threads": threading.active_count()}
        found.append(record | {"beside_s": now - last - (summary["wall_s"] - summary["startup_s"])})
        last = now

    Sweep._ended = looked_at  # type: ignore[method-assign]
    try:
        words = ["model=mlp", "logger=csv", f"max_steps={steps}", "epochs=null", "threads=1", f"output_root={folder}"]
        status = runner(["train", "--multirun", f"seed=range({jobs})", *words, *further])
    finally:
        Sweep._ended = ended  # type: ignore[method-assign]
    if status != 0 or len(found) != jobs:
        raise SystemExit(f"{len(found)} of {jobs} jobs ran, status {status}")
    return found


def main() -> int:
    """Run the sweep, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=300, help="jobs of the sweep")
    parser.add_argument("--first", type=int, default=10, help="the job that the last one is compared with")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps of a job")
    parser.add_argument("--most", type=float, default=0.3, help="seconds that a job may take beside training")
    parser.add_argument("further", nargs="*", metavar="WORD", help="words added to the command")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = measure(asked.jobs, Path(scratch), asked.steps, asked.further)
    first, end = found[asked.first - 1], found[-1]
    beside = statistics.median(record["beside_s"] for record in found[1:])
    print(f"\n| | job {asked.first} | middle | last | last / job {asked.first} |")
    print("|---|---|---|---|---|")
    for name, unit in (("memory", " MiB"), ("files", ""), ("threads", "")):
        values = [record[name] for record in (first, found[len(found) // 2], end)]
        print(f"| {name} | {' | '.join(f'{value:.0f}{unit}' for value in values)} | {values[2] / values[0]:.3f} |")
    start = found[0]["beside_s"]
    print(f"\nbeside training: median {beside:.3f} s a job")
    print(f"until the first job has ended, with imports and {asked.jobs} jobs to validate: {start:.1f} s")
    grown = end["memory"] > MOST_GROWTH * first["memory"] or end["files"] > first["files"]
    return int(bool(grown or end["threads"] > first["threads"] or beside > asked.most))


if __name__ == "__main__":
    sys.exit(main())
