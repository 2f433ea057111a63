"""Does the rate that `find-lr` finds train as well as the one that a preset was tuned to?

    python scripts/find_lr_accuracy.py --data-root path/to/data --seeds 2

trains digits and Fashion-MNIST with both, with equal budgets, and prints the test accuracies. Exit status 1 if the mean over
the seeds is more than a point lower with the rate that was found.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

POINT = 0.01
RUNS = {
    "digits": ["epochs=15"],
    "fashion": ["experiment=fashion_cnn", "epochs=1"],
    "digits sgd": ["optimizer=sgd", "epochs=15"],
    "digits mlp": ["model=mlp", "epochs=15"],
    "fashion sgd": ["experiment=fashion_cnn", "optimizer=sgd", "epochs=1"],
}


def printed(verb: str, *words: str) -> str:
    """What a command prints."""
    command = [sys.executable, "-m", "runner", verb, "threads=1", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


def trained(words: list[str], folder: Path) -> tuple[float, float]:
    """Test accuracy and learning rate of a run."""
    quiet = ["logger=none", "log.progress=false", "log.curves=false", f"output_root={folder}"]
    directory = Path(printed("train", *quiet, *words).strip().splitlines()[-1])
    summary = json.loads((directory / "summary.json").read_text())
    config = yaml.safe_load((directory / "config.yaml").read_text())
    return summary["test"]["accuracy"], config["optimizer"]["lr"]


def main() -> int:
    """Run everything; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", default="data", help="folder that holds FashionMNIST/raw")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each kind")
    parser.add_argument("--only", nargs="*", default=list(RUNS), choices=list(RUNS), help="which of the comparisons")
    options = parser.parse_args()
    worse = False
    print(f"{'run':<14}{'seeds':>6}{'preset lr':>11}{'accuracy':>10}{'  find-lr found':<22}{'accuracy':>10}")
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.only:
            results: dict[str, list[tuple[float, float]]] = {"preset": [], "found": []}
            for seed in range(options.seeds):
                words = [*RUNS[name], f"data.root={options.data_root}", f"seed={seed}"]
                results["preset"].append(trained(words, Path(scratch)))
                rate = json.loads(printed("find-lr", *words, f"output_root={scratch}", "json=true"))["recommended"]
                results["found"].append(trained([*words, f"lr={rate}"], Path(scratch)))
            preset, found = (sum(accuracy for accuracy, _ in each) / len(each) for each in results.values())
            rates = ", ".join(f"{rate:g}" for _, rate in results["found"])
            given = results["preset"][0][1]
            print(
                f"{name:<14}{options.seeds:>6}{given:>11g}{preset:>10.4f}{'  ' + rates:<22}{found:>10.4f}", flush=True
            )
            worse |= found < preset - POINT
    return int(worse)


if __name__ == "__main__":
    sys.exit(main())
