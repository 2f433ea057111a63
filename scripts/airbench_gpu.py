"""The recipe for CIFAR-10 and the file that it follows, on the same GPU: seconds of training and accuracy, each of several runs.

    python scripts/airbench_gpu.py path/to/airbench94_muon.py path/to/data --runs 5

The first argument is `airbench94_muon.py` of github.com/KellerJordan/cifar10-airbench, the second a folder with torchvision's
CIFAR10 in it. Seconds are those in which batches are trained: without imports, reading the data and the evaluation after each
epoch; the file adds its last evaluation. Its first run, which compiles the network for several minutes, does not count.
Accuracies are those with test-time augmentation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import yaml

from recipes import records, runner

WORDS = ("experiment=cifar10_airbench", "evaluate.test=false", "evaluate.every_epochs=null", "logger=none")

Result = tuple[float, float]
"""Seconds and accuracy of a run."""


def of_file(lines: Iterable[str]) -> Iterator[Result]:
    """The runs that the file prints, with the first."""
    for line in lines:
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 6 and cells[1] == "eval":
            yield float(cells[5]), float(cells[4])


def airbench(file: Path, data: Path, runs: int) -> list[Result]:
    """Run the file until it has finished so many runs."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "cifar10").symlink_to(data.resolve())  # where it looks for the data
        command = [sys.executable, "-u", str(file.resolve())]
        with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                return list(islice(of_file(process.stdout), 1, 1 + runs))
            finally:
                process.kill()


def seconds_of(lines: list[dict[str, Any]], batch_size: int) -> float:
    """Seconds in which the batches of a run were trained, from its log lines."""
    steps = [0, *(line["global_step"] for line in lines)]
    return sum(
        (b - a) * batch_size / line["samples_per_s"] for (a, b), line in zip(pairwise(steps), lines, strict=True)
    )


def recipe(data: Path, runs: int, words: Sequence[str]) -> list[Result]:
    """Run the recipe."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(runs):
            run = Path(folder) / str(seed)
            runner("train", *WORDS, f"data.root={data.resolve()}", f"hydra.run.dir={run}", f"seed={seed}", *words)
            last = f"ckpt_path={run}/checkpoints/last.safetensors"
            evaluated = json.loads(runner("eval", last, "split=val", "tta=[flip,shifts]", "json=true"))
            batch_size = yaml.safe_load((run / "config.yaml").read_text())["data"]["batch_size"]
            seconds = seconds_of(records(run, "train"), batch_size)
            found.append((seconds, evaluated["tta"]["metrics"]["accuracy"]))
    return found


def main() -> None:
    """Run both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("data", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("words", nargs="*", help="overrides of the recipe")
    given = parser.parse_intermixed_args()
    print("| training | seconds, median | accuracy, mean | runs |\n|---|---|---|---|")
    for name, measure in (
        ("`experiment=cifar10_airbench`", lambda: recipe(given.data, given.runs, given.words)),
        (f"`{given.file.name}`", lambda: airbench(given.file, given.data, given.runs)),
    ):
        seconds, accuracies = zip(*measure(), strict=True)
        print(
            f"| {name} | {statistics.median(seconds):.2f} | {statistics.mean(accuracies):.4f} | {len(seconds)} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
