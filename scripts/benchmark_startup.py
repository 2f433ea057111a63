"""Time from the start of the process to the first optimizer step, against a bare script and against the bare imports.

    python scripts/benchmark_startup.py --runs 7

In alternation: `python -c "import torch, torchvision"`; a script that imports the libraries that `runner` does, makes the
same model and optimizer and takes one step on random images; and `runner train` on digits until the first step is done.
The time that reading the data takes is measured inside each run and subtracted. Prints the median of each and of the
ratios of neighbouring runs. The commands that must never import torch are timed as well.

    python scripts/benchmark_startup.py smoke --runs 7

In alternation, the CPU time (user and system, by the resource usage of the process) of `runner train debug=smoke`, a run of
two steps with its evaluations and checkpoints, and of a script that imports only torch and torchvision and takes two steps
with the same model and optimizer. Prints the medians and the median ratio of neighbouring runs.
"""

from __future__ import annotations

import argparse
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

IMPORTS = "import torch, torchvision"
BARE_STEP = """
import os
import hydra, omegaconf, pydantic, rich.console
import torch, torchvision
from runner.models.small_cnn import SmallCNN

model = SmallCNN(in_channels=1, num_classes=10)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
torch.nn.functional.cross_entropy(model(torch.randn(64, 1, 8, 8)), torch.randint(10, (64,))).backward()
optimizer.step()
os._exit(0)
"""
BARE_RUN = """
import torch, torchvision
from torch import nn

# The layers of runner.models.small_cnn.SmallCNN, as debug=smoke builds it.
def block(width, out):
    return [nn.Conv2d(width, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]

layers = [*block(1, 32), nn.MaxPool2d(2), *block(32, 64), nn.MaxPool2d(2), *block(64, 128)]
model = nn.Sequential(*layers, nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05, fused=True)
for _ in range(2):
    loss = nn.functional.cross_entropy(model(torch.randn(64, 1, 8, 8)), torch.randint(10, (64,)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
# Stops the process right after the first step and prints how long reading the data took.
FIRST_STEP = """
import importlib, os, sys, time
import runner.cli
import runner.verbs._launch as launch

def stop_after_first_step():
    train = importlib.import_module("runner.train")
    read_data, seconds = train.read_data, []

    def timed(*args, **named):
        began = time.perf_counter()
        splits = read_data(*args, **named)
        seconds.append(time.perf_counter() - began)
        return splits

    def stop(global_step, epoch):
        print(f"data {seconds[0]}", file=sys.__stdout__, flush=True)
        os._exit(0)

    progress = train.Progress
    train.read_data, train.Progress = timed, lambda advance: progress(stop)

run_job = launch.run_job

def patched(*given):
    stop_after_first_step()
    return run_job(*given)

launch.run_job = patched
sys.exit(runner.cli.main(["train", "log.progress=false"]))
"""


def timed(command: list[str], folder: Path) -> tuple[float, str]:
    """Wall time of a command in seconds, and what it printed."""
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=True)
    return time.perf_counter() - began, done.stdout


def cpu_seconds(command: list[str], folder: Path) -> float:
    """CPU time of a command and its processes in seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, capture_output=True, cwd=folder, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def smoke(runs: int) -> None:
    """Compare `debug=smoke` with a bare script of two steps, by CPU time."""
    ours, bare = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number in range(runs + 1):
            pair = (
                cpu_seconds([sys.executable, "-c", BARE_RUN], folder),
                cpu_seconds([sys.executable, "-m", "runner", "train", "debug=smoke"], folder),
            )
            if number:  # the first pair warms the disk cache
                bare.append(pair[0])
                ours.append(pair[1])
    ratios = [one / other for one, other in zip(ours, bare, strict=True)]
    print(f"Python {platform.python_version()}, {platform.machine()}, CPU time, median of {runs} alternating runs")
    print(f"{'a bare script of two steps':<40} {statistics.median(bare):6.2f} s")
    print(f"{'runner train debug=smoke':<40} {statistics.median(ours):6.2f} s")
    print(f"{'ratio, pair by pair':<40} {statistics.median(ratios):6.2f}  ({min(ratios):.2f} to {max(ratios):.2f})")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["first_step", "smoke"], default="first_step")
    parser.add_argument("--runs", type=int, default=7)
    arguments = parser.parse_args()
    if arguments.what == "smoke":
        smoke(arguments.runs)
    else:
        first_step(arguments.runs)


def first_step(runs: int) -> None:
    """Time from the start of the process to the first step."""
    bare, stepped, first, to_imports, to_script = [], [], [], [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        script = folder / "first_step.py"
        script.write_text(FIRST_STEP)
        for number in range(runs + 1):
            bare_s, _ = timed([sys.executable, "-c", IMPORTS], folder)
            stepped_s, _ = timed([sys.executable, "-c", BARE_STEP], folder)
            first_s, out = timed([sys.executable, str(script)], folder)
            data_s = next(float(line.split()[1]) for line in out.splitlines() if line.startswith("data "))
            if number:  # the first pair warms the disk cache
                bare.append(bare_s)
                first.append(first_s - data_s)
                stepped.append(stepped_s)
                to_imports.append((first_s - data_s) / bare_s)
                to_script.append((first_s - data_s) / stepped_s)
        light = {
            verb: statistics.median(
                timed([sys.executable, "-m", "runner", *verb.split()], folder)[0] for _ in range(runs)
            )
            for verb in ("--help", "list", "show model=vit_tiny", "train --help")
        }
    print(f"Python {platform.python_version()}, {platform.machine()}, median of {runs} alternating runs")
    print(f"{IMPORTS:<40} {statistics.median(bare):6.2f} s")
    print(f"{'a bare script to its first step':<40} {statistics.median(stepped):6.2f} s")
    print(f"{'start to first step, less reading data':<40} {statistics.median(first):6.2f} s")
    print(f"{'ratio to the bare script':<40} {statistics.median(to_script):6.2f}")
    print(f"{'ratio to the imports':<40} {statistics.median(to_imports):6.2f}")
    for verb, seconds in light.items():
        print(f"{'runner ' + verb:<40} {seconds:6.2f} s")


if __name__ == "__main__":
    main()
