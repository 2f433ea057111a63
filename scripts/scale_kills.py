"""Kill ranks, all ranks, the launcher, or a rank that writes a checkpoint, and resume: nothing hangs, nothing is lost.

python scripts/scale.py kills --count 20    # of each kind; about ten seconds each on two quiet cores
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from runner.checkpoint.file import read
from runner.config.errors import PREEMPTED

WORDS = (
    "data=synthetic", "data.dataset.samples=200", "data.image_size=8", "data.batch_size=8", "epochs=3", "model=mlp",
    "model.hidden=[64]", "model.dropout=0.2", "threads=1", "logger=none", "log.every_steps=1", "log.curves=false",
    "log.progress=false", "checkpoint.every_steps=2", "checkpoint.min_seconds=0", "evaluate.test=false", "dist.timeout_s=20",
)  # fmt: skip
PATIENCE_S = 120
CONTEXT = multiprocessing.get_context("forkserver")


def program(words: Sequence[str], log: str) -> None:
    """`python -m runner` with these words, in this process."""
    from runner.cli import main

    multiprocessing.set_start_method(None, force=True)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    sys.exit(main(words))


def start(folder: Path, *words: str) -> multiprocessing.process.BaseProcess:
    """Start a run in a folder."""
    process = CONTEXT.Process(target=program, args=(["train", *words, f"hydra.run.dir={folder}"], f"{folder}.log"))
    process.start()
    return process


def ranks_of(launcher: int) -> list[int]:
    """The processes of the ranks: children of a child of the launcher, its fork server."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            text = path.read_text()
            children.setdefault(int(text.rpartition(")")[2].split()[1]), []).append(int(path.parent.name))
    return sorted(rank for server in children.get(launcher, []) for rank in children.get(server, []))


def kill(pids: Sequence[int], number: signal.Signals = signal.SIGKILL) -> None:
    """Send a signal to processes that may be gone."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def gone(pids: Sequence[int]) -> bool:
    """Whether processes end in time."""
    deadline = time.monotonic() + PATIENCE_S
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > deadline:
            kill(pids)
            return False
        time.sleep(0.05)
    return True


def writing(folder: Path) -> bool:
    """Whether a checkpoint is being written."""
    return any((folder / "checkpoints").glob(".*.tmp"))


KINDS: dict[str, Callable[[random.Random, int, list[int]], None]] = {
    "one rank": lambda rng, launcher, ranks: kill([rng.choice(ranks)]),
    "all ranks": lambda rng, launcher, ranks: kill(ranks),
    "launcher": lambda rng, launcher, ranks: kill([launcher]),
    "rank 0, writing": lambda rng, launcher, ranks: kill(ranks[:1]),
    "SIGTERM": lambda rng, launcher, ranks: kill([launcher], signal.SIGTERM),
}


def attempt(kind: str, rng: random.Random, folder: Path, size: int, other: int, expected: dict[int, str]) -> str:
    """Kill once and resume with `other` ranks; returns what went wrong, or an empty string."""
    launcher = start(folder, *WORDS, f"devices={size}")
    assert launcher.pid is not None
    step, deadline = rng.randint(1, 60), time.monotonic() + PATIENCE_S
    metrics = folder / "metrics.jsonl"
    while not (metrics.is_file() and metrics.read_bytes().count(b'"train"') >= step):
        if launcher.exitcode is not None or time.monotonic() > deadline:
            return f"did not come to step {step}: {Path(f'{folder}.log').read_text()[-300:]}"
        time.sleep(0.002)
    while kind == "rank 0, writing" and not writing(folder) and launcher.exitcode is None:
        time.sleep(0.0002)
    ranks = ranks_of(launcher.pid)
    KINDS[kind](rng, launcher.pid, ranks)
    launcher.join(PATIENCE_S)
    if launcher.exitcode is None:
        launcher.kill()
        return "the launcher hangs"
    if not gone(ranks):
        return "a rank is left"
    ended = launcher.exitcode == 0  # it was too late
    if kind == "SIGTERM" and launcher.exitcode not in (0, PREEMPTED):
        return f"status {launcher.exitcode}, not {PREEMPTED}"
    last = folder / "checkpoints/last.safetensors"
    if last.is_file():
        read(last)
    words = [f"ckpt_path={folder}"] if last.is_file() else [*WORDS]
    resumed = start(folder if last.is_file() else folder.with_name(f"{folder.name}_new"), *words, f"devices={other}")
    resumed.join(PATIENCE_S)
    if resumed.exitcode != 0:
        resumed.kill()
        return f"status {resumed.exitcode} when resumed: {Path(f'{folder}.log').read_text()[-300:]}"
    summary = json.loads(
        ((folder if last.is_file() else folder.with_name(f"{folder.name}_new")) / "summary.json").read_text()
    )
    if summary["status"] != "finished":
        return f"it ended as {summary['status']}"
    if size == other and not ended and summary["weights_sha256"] != expected[size]:
        return "other bits"
    return ""


def kills(options: argparse.Namespace) -> int:
    """Kill and resume `options.count` times in each way."""
    CONTEXT.set_forkserver_preload(["runner.verbs.train"])
    rng, broken = random.Random(options.seed), 0
    print("| killed | attempts | ended in the right bits, or with as many steps on another number of processes |")
    print("|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        expected = {}
        for size in (2, 3):
            whole = start(Path(scratch) / f"whole_{size}", *WORDS, f"devices={size}")
            whole.join()
            expected[size] = json.loads((Path(scratch) / f"whole_{size}/summary.json").read_text())["weights_sha256"]
        numbers = itertools.count()
        for kind in KINDS:
            right = 0
            for number in range(options.count):
                size = rng.choice((2, 3))
                other = size if number % 2 == 0 else rng.choice((1, 2, 3))
                wrong = attempt(kind, rng, Path(scratch) / str(next(numbers)), size, other, expected)
                right += not wrong
                if wrong:
                    print(f"{kind}, {size} ranks resumed with {other}: {wrong}", file=sys.stderr, flush=True)
            broken += options.count - right
            print(f"| {kind} | {options.count} | {right} |", flush=True)
    return int(broken > 0)


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    command = commands.add_parser("kills", help="killed at random moments, resumed")
    command.add_argument("--count", type=int, default=20, help="of each kind")
    command.add_argument("--seed", type=int, default=0)
    command.set_defaults(run=kills)
