"""Does a small model gain from a trained one? Digits, of which the student sees 200 and the teacher more than a thousand.

    python scripts/distillation.py

trains a teacher and, on the same 200 images, five students of a quarter of its width alone and five with `task=distillation`.
The default temperature and weight are used. Exit status 1 if the gain is less than two standard errors of the difference.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from runner.data.sources.arrays import ImageArrays
from runner.data.sources.digits import digits

VAL, TEST = 100, 600
STUDENT = ["+data.dataset.samples=200", "data.batch_size=32", "model.width=4", "model.dropout=0", "epochs=60"]


def few_digits(samples: int | None = None) -> dict[str, ImageArrays]:
    """Handwritten digits with so many training images, or all; the images of the other splits are always the same."""
    whole = digits()["train"]
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(0))
    rows = {"test": order[:TEST], "val": order[TEST:][:VAL], "train": order[TEST + VAL :][:samples]}
    return {split: ImageArrays(whole.images[each], whole.targets[each], whole.classes) for split, each in rows.items()}


def run(words: list[str], root: str) -> Path:
    """The directory of a run or a sweep."""
    # Weights are evaluated at the end, as the best of many evaluations of 100 images would be chosen by chance
    common = [
        "data.dataset._target_=distillation.few_digits",
        "data.normalize.mean=[0.3053]",
        "data.normalize.std=[0.3761]",
        "model=small_cnn",
        "threads=1",
        "evaluate.every_epochs=60",
    ]
    command = [
        sys.executable,
        "-m",
        "runner",
        "train",
        *words,
        *common,
        "logger=none",
        "log.curves=false",
        f"output_root={root}",
    ]
    print(shlex.join(["python", *command[1:]]), flush=True)
    paths = os.pathsep.join([str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": paths})
    if done.returncode:
        raise SystemExit(done.stderr)
    return Path(done.stdout.strip().splitlines()[-1])


def accuracy(directory: Path) -> float:
    """Of the test images."""
    return float(json.loads((directory / "summary.json").read_text())["test"]["accuracy"])


def main() -> int:
    """Run everything; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2,3,4", help="of the students")
    parser.add_argument("words", nargs="*", help="more overrides of the distilled students, such as task.temperature=2")
    options = parser.parse_args()
    means, errors = [], []
    with tempfile.TemporaryDirectory() as root:
        teacher = run(["model.width=16", "seed=100"], root)
        print(f"teacher: {accuracy(teacher):.4f}")
        told = [
            "task=distillation",
            "model@task.teacher=small_cnn",
            "task.teacher.width=16",
            f"init_from={{teacher: {teacher}}}",
        ]
        for name, words in (("alone", []), ("distilled", [*told, *options.words])):
            sweep = run(["--multirun", f"seed={options.seeds}", *STUDENT, *words], root)
            found = [accuracy(path.parent) for path in sorted(sweep.glob("*/summary.json"))]
            means.append(statistics.mean(found))
            errors.append(statistics.stdev(found) / len(found) ** 0.5)
            print(f"{name}: {means[-1]:.4f}, standard error {errors[-1]:.4f}, of {[round(each, 4) for each in found]}")
    gain, error = means[1] - means[0], (errors[0] ** 2 + errors[1] ** 2) ** 0.5
    print(f"gain: {gain:.4f}, {gain / error:.1f} standard errors")
    return int(gain < 2 * error)


if __name__ == "__main__":
    sys.exit(main())
