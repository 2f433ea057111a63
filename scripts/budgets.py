"""How much of `budget` runs use, and whether their learning rate reaches its end.

    python scripts/budgets.py
    python scripts/budgets.py --only digits --longest 40

Trains runs of 20 seconds to 3 minutes, one after another, on digits, images in memory, JPEG files, two ranks and with slow
evaluations. The time is that of the whole process, from its start to its end. Prints for each the budget, the fraction of it that
was used by the process and by `summary.json`, the steps, and the last learning rate as a fraction of the highest. Figures of a
machine that does other work at the same time mean nothing: `cpu_wait` is the fraction of the time that was lost to it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmark_folder import make_folder

BASE = ("threads=1", "log.progress=false", "logger=csv")
CASES = {
    "digits": (("data=digits",), (20, 40, 90)),
    "memory": (("data=synthetic", "data.dataset.samples=3000", "data.image_size=32"), (30, 60, 180)),
    "jpeg": (("data=image_folder", "data.image_size=64", "data.placement=disk", "data.num_workers=2"), (45, 120)),
    "ranks": (("data=digits", "devices=2", "device=cpu"), (40, 90)),
    "evaluation": (
        ("data=digits", "evaluate.every_steps=40", "evaluate.batch_size=1", "data.split.val=0.4"),
        (60, 150),
    ),
}


def measure(name: str, budget: int, folder: Path) -> str:
    """Train one run; returns a line of the table."""
    place = folder / f"{name}_{budget}"
    words = [*CASES[name][0], *BASE, f"budget={budget}s", f"hydra.run.dir={place}"]
    if name == "jpeg":
        words.append(f"data.root={folder / 'jpeg'}")
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "runner", "train", *words], capture_output=True, text=True, check=False
    )
    seconds = time.perf_counter() - began
    if done.returncode:
        return f"{name:<12}{budget:>5}s  failed: {done.stderr.strip()}"
    summary = json.loads((place / "summary.json").read_text())
    lines = map(json.loads, (place / "metrics.jsonl").read_text().splitlines())
    rates = [line["lr"] for line in lines if line["split"] == "train"]
    used = f"{seconds / budget:>8.3f}{summary['budget_used']:>9.3f}"
    rate = f"{rates[-1] / max(rates):>10.1e}"
    return f"{name:<12}{budget:>5}s{used}{summary['global_step']:>8,}{rate}{summary.get('cpu_wait', 0):>10.0%}"


def main() -> None:
    """Run all cases, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=CASES, default=[*CASES], help="the cases to run")
    parser.add_argument("--longest", type=int, default=180, help="skip budgets of more seconds")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if "jpeg" in options.only:
            make_folder(folder / "jpeg", images=2000, shrink=4)
        print(f"{'case':<12}{'budget':>6}{'process':>8}{'summary':>9}{'steps':>8}{'last rate':>10}{'cpu_wait':>10}")
        for name in options.only:
            for budget in CASES[name][1]:
                if budget <= options.longest:
                    print(measure(name, budget, folder), flush=True)


if __name__ == "__main__":
    main()
