"""What a job of a sweep leaves behind in its process, and what it costs beside training.

    python scripts/sweep_leaks.py --jobs 300

Runs a sweep of short jobs on digits in one process, as `python -m runner train --multirun` does, and looks at the process
after each job: memory, open files, threads, and the settings of Python and torch that one job could leave to the next. Three
jobs are repeated, each in a separate process, to compare their weights. The exit status is 1 if the last job has 5% more
memory or files than the tenth, or more threads, or other settings, or other weights than alone, or if a job takes more than
`--most` seconds beside its training loop.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from runner.cli import main as runner
from runner.engine.loop import Loop
from runner.verbs import train

TENTH = 9
MOST_GROWTH = 1.05
SETTINGS = {
    "default dtype": torch.get_default_dtype,
    "default device": torch.get_default_device,
    "deterministic algorithms": torch.get_deterministic_debug_mode,
    "matmul precision": torch.get_float32_matmul_precision,
    "threads": torch.get_num_threads,
    "grad mode": torch.is_grad_enabled,
    "inference mode": torch.is_inference_mode_enabled,
    "anomaly detection": torch.is_anomaly_enabled,
    "autocast": lambda: [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")],
    "cudnn": lambda: (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
    "signal handlers": lambda: [str(signal.getsignal(number)) for number in signal.valid_signals()],
    "filters of warnings": lambda: len(warnings.filters),
    "logging": lambda: (logging.root.level, len(logging.root.handlers)),
    "excepthook": lambda: (sys.excepthook, threading.excepthook),
    "working folder": os.getcwd,
    "environment": lambda: dict(os.environ),
    "module search path": lambda: list(sys.path),
    "standard streams": lambda: (sys.stdout, sys.stderr),
}


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def words(folder: Path, steps: int, further: list[str]) -> list[str]:
    """What the jobs have in common."""
    length = [f"max_steps={steps}", "epochs=null", "threads=1"]
    return ["model=mlp", "logger=csv", *length, f"output_root={folder}", *further]


def measure(jobs: int, folder: Path, steps: int, further: list[str]) -> list[dict[str, Any]]:
    """Run the sweep; for each job what there is after it, and the seconds since the one before, less its training loop."""
    found: list[dict[str, Any]] = []
    run_job, run_loop = train.run, Loop.run
    training = 0.0
    last, last_cpu = time.perf_counter(), time.process_time()

    def timed_loop(self: Loop) -> None:
        nonlocal training
        began = time.perf_counter()
        try:
            run_loop(self)
        finally:
            training += time.perf_counter() - began

    def looked_at(cfg: Any) -> float | None:
        nonlocal training, last, last_cpu
        value = run_job(cfg)
        now, cpu = time.perf_counter(), time.process_time()
        files = len(list(Path("/proc/self/fd").iterdir()))
        record = {"memory": resident_bytes(), "files": files, "threads": threading.active_count()}
        record["objects"] = len(gc.get_objects())
        record |= {"beside_s": now - last - training, "cpu_s": cpu - last_cpu}
        record["settings"] = {name: get() for name, get in SETTINGS.items()}
        found.append(record)
        last, last_cpu, training = time.perf_counter(), time.process_time(), 0.0
        return value

    train.run, Loop.run = looked_at, timed_loop  # type: ignore[method-assign]
    try:
        status = runner(["train", "--multirun", f"seed=range({jobs})", *words(folder, steps, further)])
    finally:
        train.run, Loop.run = run_job, run_loop  # type: ignore[method-assign]
    if status != 0 or len(found) != jobs:
        raise SystemExit(f"{len(found)} of {jobs} jobs ran, status {status}")
    return found


def weights(folder: Path) -> str:
    """The digest of the weights of a run."""
    return str(json.loads((folder / "summary.json").read_text())["weights_sha256"])


def alone(seed: int, folder: Path, steps: int, further: list[str]) -> str:
    """The digest of the weights of one job, run in a separate process."""
    command = [sys.executable, "-m", "runner", "train", f"seed={seed}", *words(folder, steps, further)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return weights(Path(done.stdout.splitlines()[-1]))


def main() -> int:
    """Run the sweep, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=300, help="jobs of the sweep, more than ten")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps of a job")
    parser.add_argument("--most", type=float, default=0.3, help="seconds that a job may take beside its training loop")
    parser.add_argument("further", nargs="*", metavar="WORD", help="words added to the command")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = measure(asked.jobs, Path(scratch), asked.steps, asked.further)
        sweep = next(Path(scratch).glob("*/sweeps/*"))
        tried = sorted({0, asked.jobs // 2, asked.jobs - 1})
        others = [n for n in tried if weights(sweep / str(n)) != alone(n, Path(scratch), asked.steps, asked.further)]
    tenth, end = found[TENTH], found[-1]
    beside = statistics.median(record["beside_s"] for record in found[1:])
    changed = [name for name in SETTINGS if end["settings"][name] != tenth["settings"][name]]
    print("\n| | job 10 | middle | last | last / job 10 |")
    print("|---|---|---|---|---|")
    for name, scale, unit in (("memory", 2**20, " MiB"), ("files", 1, ""), ("threads", 1, ""), ("objects", 1, "")):
        values = [record[name] / scale for record in (tenth, found[len(found) // 2], end)]
        print(
            f"| {name} | " + " | ".join(f"{value:.0f}{unit}" for value in values) + f" | {values[2] / values[0]:.3f} |"
        )
    cpu, start = statistics.median(record["cpu_s"] for record in found[1:]), found[0]["beside_s"]
    print(f"\nbeside training: median {beside:.3f} s a job; CPU time with training: median {cpu:.3f} s")
    print(f"until the first job has ended, with imports and {asked.jobs} jobs to validate: {start:.1f} s")
    print(f"settings that changed: {', '.join(changed) or 'none'}")
    print(f"jobs with other weights than alone: {', '.join(map(str, others)) or 'none'} (tried: {tried})")
    grown = [name for name in ("memory", "files") if end[name] > MOST_GROWTH * tenth[name]]
    return int(bool(grown or changed or others or end["threads"] > tenth["threads"] or beside > asked.most))


if __name__ == "__main__":
    sys.exit(main())
