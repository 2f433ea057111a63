"""The same training by `runner`, by hand-written PyTorch loops and by other libraries: the time of an optimizer step.

    pip install -e ".[peers]"
    python scripts/benchmark_peers.py --case digits --threads 1 2
    python scripts/benchmark_peers.py --case fashion --threads 2 --fashion-root path/to/data
    python scripts/benchmark_peers.py --case resnet18 vit_tiny --threads 2
    python scripts/benchmark_peers.py --case digits --turns 40 --epochs 8 --contenders bare hand

Every measurement is a process of its own with the same number of threads, writing to a terminal of its own; the contenders
take turns, and ratios are taken within a round. What counts is the time from the end of the first epoch to the end of
the last, so that imports, reading the data and warming up are excluded for everybody. Nobody evaluates meanwhile. Every
contender starts from the same weights and is scored afterwards by the same function on the same samples: exit status 1 if
one of them is not as good as the others. Reading pictures from files is measured by `benchmark_folder.py`.

With `--turns`, the others train in the process of `runner`, on the same threads: after every `--epochs` of its epochs, each of
them as many, so that whatever else the machine does meets all of them alike. A ratio is taken within each turn; its median over
the turns is one measurement, of which several are made in separate processes. Garbage is collected automatically in the turns
of the others, as Python does. Nobody is scored.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shlex
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from peers.cases import CASES, CONTENDERS, NEEDS, Job
from peers.machine import installed, load, machine
from peers.processes import MeasurementFailed, measure, turns
from peers.processes import words as words_of
from peers.tables import table, time, unequal

IN_TURNS = ("bare", "hand", "dataloader")  # loops without worker processes, except of `fashion` by `dataloader`


def options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES), help="what to train; all unless told")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, help="who takes part; all that fit unless told")
    parser.add_argument("--repeats", type=int, default=5, help="rounds, in which each contender has one turn")
    parser.add_argument(
        "--threads", nargs="+", type=int, default=[1], help="CPU threads of torch; several for a table each"
    )
    parser.add_argument("--epochs", type=int, help="passes over the samples, the first of them not timed; at least 2")
    parser.add_argument("--turns", type=int, help="turns in each process of `runner`")
    parser.add_argument("--samples", type=int, help="training samples (not for digits)")
    parser.add_argument("--device", default="cpu", help="where to train")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    parser.add_argument(
        "--fashion-root", type=Path, help="folder that holds FashionMNIST/; it is copied, not written to"
    )
    parser.add_argument(
        "--further", nargs="+", default=[], metavar="WORD", help="words added to every command of runner"
    )
    parser.add_argument("--json", type=Path, help="file for every single measurement")
    found = parser.parse_args(words)
    for name in found.case if found.contenders else []:
        if not set(found.contenders) & set(CASES[name].contenders):
            parser.error(f"--contenders: none of them does {name}; allowed: {', '.join(CASES[name].contenders)}")
    if found.epochs is not None and found.epochs < 2 and not found.turns:
        parser.error("--epochs: the first epoch is not timed, so there must be at least 2")
    if found.turns and not {*(found.contenders or ())} <= {*IN_TURNS}:
        parser.error(f"--contenders: with --turns, of {', '.join(IN_TURNS)}")
    if found.repeats < 1 or min(found.threads) < 1:
        parser.error("--repeats and --threads must be at least 1")
    return found


def main() -> int:
    """Measure every case, print the tables, and tell by the exit status whether all did the same work."""
    asked = options()
    report: dict[str, Any] = {"machine": machine(), "command": without_paths(sys.argv[1:]), "cases": []}
    print(f"    python {shlex.join(['scripts/benchmark_peers.py', *without_paths(sys.argv[1:])])}\n")
    print(described(report["machine"]))
    with tempfile.TemporaryDirectory() as scratch:
        root = None
        if "fashion" in asked.case and asked.fashion_root is not None:
            root = fashion_copy(asked.fashion_root, Path(scratch))
        for name in asked.case:
            if name == "fashion" and root is None:
                print("\nfashion: skipped, as it needs --fashion-root, the folder that holds FashionMNIST/")
                continue
            for threads in asked.threads:
                if asked.turns:
                    show_turns(job_of(asked, name, threads, root), asked)
                    continue
                report["cases"].append(measure_case(job_of(asked, name, threads, root), asked))
                if asked.json:
                    asked.json.write_text(json.dumps(report, indent=2) + "\n")
    complaints = [complaint for case in report["cases"] for complaint in case["complaints"]]
    for complaint in complaints:
        print(f"error: {complaint}", file=sys.stderr)
    return 1 if complaints else 0


def without_paths(words: Sequence[str]) -> list[str]:
    """The command line as others would type it: without the place of files on this machine."""
    kept: list[str] = []
    for word in words:
        path = bool(kept) and kept[-1] in ("--fashion-root", "--json")
        kept.append(("path/to/data" if kept[-1] == "--fashion-root" else Path(word).name) if path else word)
    return kept


def described(about: dict[str, Any]) -> str:
    """Machine and versions in a line."""
    versions = [f"{name} {version}" for name, version in about["packages"].items() if version]
    return ", ".join(
        [about["processor"], f"{about['cores']} cores", about["system"], f"Python {about['python']}", *versions]
    )


def fashion_copy(root: Path, scratch: Path) -> Path:
    """A copy of Fashion-MNIST as torchvision wants it: its four files without compression."""
    source, target = root / "FashionMNIST" / "raw", scratch / "FashionMNIST" / "raw"
    target.mkdir(parents=True)
    for path in sorted(source.glob("*-ubyte*")):
        content = path.read_bytes()
        (target / path.name.removesuffix(".gz")).write_bytes(
            gzip.decompress(content) if path.suffix == ".gz" else content
        )
    if len(list(target.iterdir())) != 4:
        raise SystemExit(
            f"--fashion-root: {source} does not hold the four files of Fashion-MNIST, *-ubyte or *-ubyte.gz"
        )
    return scratch


def job_of(asked: argparse.Namespace, name: str, threads: int, root: Path | None) -> Job:
    """The measurement that is asked for, for any contender."""
    case = CASES[name]
    return Job(
        case=name,
        contender="",
        epochs=asked.epochs or case.epochs,
        samples=None if case.samples is None else asked.samples or case.samples,
        threads=threads,
        seed=asked.seed,
        fashion_root=str(root) if root else None,
        further=tuple(asked.further),
        device=asked.device,
    )


def measure_case(job: Job, asked: argparse.Namespace) -> dict[str, Any]:
    """Measure one case with one number of threads, print its table, and return all of it."""
    case = CASES[job.case]
    names = [name for name in case.contenders if not asked.contenders or name in asked.contenders]
    missing = {name: NEEDS[name] for name in names if name in NEEDS and installed(NEEDS[name]) is None}
    names = [name for name in names if name not in missing]
    runs, complaints = rounds(job, names, asked.repeats)
    complaints += unequal(runs, case.loss_tolerance, case.accuracy_tolerance)
    found: dict[str, Any] = {
        "job": asdict(job),
        "runs": runs,
        "missing": missing,
        "complaints": complaints,
        "load": load(),
    }
    samples = f"{job.samples:,} samples, " if job.samples else ""
    print(f"\n### {case.title}: batch {case.batch_size}, {job.threads} thread{'s' * (job.threads > 1)}\n")
    print(
        f"{samples}{job.epochs} epochs, of which {job.epochs - 1} are timed, {asked.repeats} rounds; load {found['load']}.\n"
    )
    print("\n".join(table(runs, missing, "runner" if "runner" in runs else next(iter(runs), ""))))
    print("\n" + "\n".join(f"- `{name}`: {CONTENDERS[name]}." for name in runs))
    return found


def show_turns(job: Job, asked: argparse.Namespace) -> None:
    """Measure one case with one number of threads in turns, and print a table, a row a loop."""
    case, names, runs = CASES[job.case], asked.contenders or IN_TURNS[:2], []
    for _ in range(asked.repeats):
        with tempfile.TemporaryDirectory() as folder:
            epochs, file = asked.epochs or 1, Path(folder) / "job.json"
            job = replace(job, folder=folder, epochs=(asked.turns + 2) * epochs)
            job.write(file)
            command = [word for word in words_of(job, file) if not word.startswith("callbacks.clock")]
            loops = {name: {"loop": f"peers.{name}_loop", "job": file} for name in names}
            runs.append(turns(command, loops, Path(folder), job.threads, epochs))
    print(f"\n### {case.title}: batch {case.batch_size}, {job.threads} thread{'s' * (job.threads > 1)}\n")
    print(f"{len(runs)} processes of {asked.turns} turns; load {load()}.\n")
    print("| loop | a step, median | `runner` takes, median of processes | each of them |\n|---|---|---|---|")
    for name in runs[0][0]:
        step = time(statistics.median(turn[name] for found in runs for turn in found))
        each = [statistics.median(turn["runner"] / turn[name] for turn in found) for found in runs]
        ratios = f"{statistics.median(each):.2f} times as long | {', '.join(f'{ratio:.2f}' for ratio in each)}"
        print(f"| `{name}` | {step} | {ratios if name != 'runner' else ' | '} |", flush=True)


def rounds(job: Job, names: Sequence[str], repeats: int) -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
    """Let every contender have its turn in every round.

    Returns:
        The measurements of each contender that finished all rounds, and what to complain of in the others.
    """
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    complaints = []
    for number in range(repeats):
        for name in list(runs):
            try:
                found = measure(replace(job, contender=name))
            except MeasurementFailed as error:
                complaints.append(str(error))
                del runs[name]
                continue
            runs[name].append(found)
            print(
                f"{job.case} {number + 1}/{repeats} {name}: {time(found['step_s'])} a step", file=sys.stderr, flush=True
            )
    return runs, complaints


if __name__ == "__main__":
    sys.exit(main())
