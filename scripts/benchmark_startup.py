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


def cost(command: list[str], folder: Path) -> tuple[float, float, str]:
    """Wall and CPU seconds of a command with its processes, and what it printed."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=True)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def smoke(folder: Path) -> dict[str, float]:
    """CPU seconds of `debug=smoke` and of a bare script of two steps."""
    bare = cost([sys.executable, "-c", BARE_RUN], folder)[1]
    ours = cost([sys.executable, "-m", "runner", "train", "debug=smoke"], folder)[1]
    return {"a bare script of two steps, CPU s": bare, "runner train debug=smoke, CPU s": ours, "ratio": ours / bare}


def first_step(folder: Path) -> dict[str, float]:
    """Seconds from the start of the process to the first step, and of the commands that do not import torch."""
    (folder / "first_step.py").write_text(FIRST_STEP)
    imports = cost([sys.executable, "-c", IMPORTS], folder)[0]
    script = cost([sys.executable, "-c", BARE_STEP], folder)[0]
    wall, _, out = cost([sys.executable, "first_step.py"], folder)
    first = wall - next(float(line.split()[1]) for line in out.splitlines() if line.startswith("data "))
    light = {
        f"runner {verb}, s": cost([sys.executable, "-m", "runner", *verb.split()], folder)[0]
        for verb in ("--help", "list", "show model=vit_tiny", "train --help")
    }
    return {
        f"{IMPORTS}, s": imports, "a bare script to its first step, s": script, "start to first step, less reading data, s": first,
        "ratio to the bare script": first / script, "ratio to the imports": first / imports, **light,
    }  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["first_step", "smoke"], default="first_step")
    parser.add_argument("--runs", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        measure = smoke if options.what == "smoke" else first_step
        # The first turn warms the disk cache.
        turns = [measure(Path(name)) for _ in range(options.runs + 1)][1:]
    print(f"Python {platform.python_version()}, {platform.machine()}, median of {options.runs} alternating runs")
    for what in turns[0]:
        found = [turn[what] for turn in turns]
        print(f"{what:<45} {statistics.median(found):6.2f}  ({min(found):.2f} to {max(found):.2f})")


if __name__ == "__main__":
    main()
