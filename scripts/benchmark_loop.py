"""The loop of `runner` beside hand-written ones, turn by turn in one process: the time of an optimizer step.

    python scripts/benchmark_loop.py --case digits --threads 1 2 --repeats 5
    python scripts/benchmark_loop.py --case resnet18 vit_tiny --threads 2 --samples 256 --turns 6

The process is that of `python -m runner train`, writing to a terminal, with its logging, live progress and checkpoints. After
every few epochs the other loops train as many, in the same process and on the same threads, so that whatever else the machine
does meets all of them alike. A ratio is taken within each turn; its median over the turns is one measurement, of which
several are made in separate processes. Garbage is collected automatically in the turns of the others, as Python does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from benchmark_peers import described, fashion_copy
from peers.cases import CASES, Job
from peers.contenders import CONTENDERS
from peers.machine import load, machine
from peers.processes import MeasurementFailed, run, words
from peers.tables import time

OTHERS = ("bare", "hand", "dataloader")  # loops without worker processes, which would go on outside their turns


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=CASES, default=["digits"], help="what to train")
    parser.add_argument("--contenders", nargs="+", choices=OTHERS, default=["bare", "hand"], help="the other loops")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], help="CPU threads; a table each")
    parser.add_argument("--repeats", type=int, default=5, help="processes for each table")
    parser.add_argument("--turns", type=int, default=60, help="turns that count in each process")
    parser.add_argument("--epochs", type=int, help="epochs of a turn; 8 for digits, else 1")
    parser.add_argument("--samples", type=int, help="training samples (not for digits)")
    parser.add_argument("--device", default="cpu", help="where to train")
    parser.add_argument("--fashion-root", type=Path, help="folder that holds FashionMNIST/; it is copied")
    parser.add_argument("--further", nargs="+", default=[], metavar="WORD", help="words added to runner's command")
    return parser.parse_args()


def main() -> int:
    """Measure and print the tables."""
    asked = options()
    print(described(machine()))
    with tempfile.TemporaryDirectory() as scratch:
        root = fashion_copy(asked.fashion_root, Path(scratch)) if asked.fashion_root else None
        for case in asked.case:
            if case == "fashion" and root is None:
                raise SystemExit("--case fashion needs --fashion-root, the folder that holds FashionMNIST/")
            for threads in asked.threads:
                show(case, threads, asked, [measure(case, threads, asked, root) for _ in range(asked.repeats)])
    return 0


def measure(case: str, threads: int, asked: argparse.Namespace, root: Path | None) -> list[dict[str, float]]:
    """Seconds of a step by contender in every turn of one process."""
    others = [name for name in asked.contenders if name != "dataloader" or not CASES[case].shift]
    epochs = asked.epochs or (8 if case == "digits" else 1)
    warmup = 2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = Job(
            case=case,
            contender="runner",
            epochs=(asked.turns + warmup) * epochs,
            samples=None if CASES[case].samples is None else asked.samples or CASES[case].samples,
            threads=threads,
            seed=0,
            fashion_root=str(root) if root else None,
            further=tuple(asked.further),
            device=asked.device,
            folder=name,
            result=str(folder / "result.json"),
        )
        file = folder / "job.json"
        job.write(file)
        command = [word for word in words(job, file) if not word.startswith("callbacks.clock")]
        command += [
            "callbacks.turns._target_=peers.turns.Turns",
            f"callbacks.turns.job={file}",
            f"callbacks.turns.contenders=[{','.join(others)}]",
            f"callbacks.turns.epochs={epochs}",
            f"callbacks.turns.warmup={warmup}",
        ]
        status, printed = run([sys.executable, "-m", "runner", *command], folder, threads)
        if status != 0 or not Path(job.result).exists():
            raise MeasurementFailed(f"runner ended with status {status}:\n{printed[-3000:]}")
        turns: list[dict[str, float]] = json.loads(Path(job.result).read_text())
        return turns


def show(case: str, threads: int, asked: argparse.Namespace, runs: list[list[dict[str, float]]]) -> None:
    """Print a table, a row a loop."""
    print(f"\n### {CASES[case].title}: batch {CASES[case].batch_size}, {threads} thread{'s' * (threads > 1)}\n")
    print(f"{len(runs)} processes of {len(runs[0])} turns; load {load()}.\n")
    print("| loop | a step, median | `runner` takes, median of processes | each of them |\n|---|---|---|---|")
    for name in runs[0][0]:
        step = time(statistics.median(turn[name] for turns in runs for turn in turns))
        ratios = [statistics.median(turn["runner"] / turn[name] for turn in turns) for turns in runs]
        each = "" if name == "runner" else ", ".join(f"{ratio:.2f}" for ratio in ratios)
        told = "" if name == "runner" else f"{statistics.median(ratios):.2f} times as long"
        print(f"| `{name}` | {step} | {told} | {each} |", flush=True)
    print("\n" + "\n".join(f"- `{name}`: {CONTENDERS[name]}." for name in runs[0][0]))


if __name__ == "__main__":
    sys.exit(main())
