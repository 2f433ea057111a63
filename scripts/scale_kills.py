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
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.base.errors import PREEMPTED
from runner.checkpoint.file import read

WORDS = (
    "data=synthetic", "data.dataset.samples=200", "data.image_size=8", "data.batch_size=8", "epochs=3", "model=mlp",
    "model.hidden=[64]", "model.dropout=0.2", "threads=1", "logger=none", "log.every_steps=1", "log.curves=false",
    "log.progress=false", "checkpoint.every_steps=2", "checkpoint.min_seconds=0", "evaluate.test=false", "dist.timeout_s=20",
)  # fmt: skip
PATIENCE_S = 120
EVALUATING = "evaluating"  # a file
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


class Slow:
    """A callback that makes evaluations slow, and keeps the file `evaluating` in a folder new while there is one.

    Args:
        folder: where the file is.
    """

    def __init__(self, folder: str) -> None:
        self._path = Path(folder) / EVALUATING

    def on_start(self, loop: Any) -> None:
        """Run something before each forward pass of an evaluation."""
        loop.state.model.register_forward_pre_hook(lambda model, images: None if model.training else self._wait())

    def _wait(self) -> None:
        self._path.touch()
        time.sleep(0.05)


def evaluating(folder: Path) -> bool:
    """Whether an evaluation has just begun a batch, see `Slow`."""
    with contextlib.suppress(FileNotFoundError):
        return time.time() - (folder / EVALUATING).stat().st_mtime < 0.02
    return False


@dataclass(frozen=True)
class Kind:
    """A way to end a run early."""

    chosen: Callable[[random.Random, int, list[int]], list[int]]  # of launcher and ranks, which get the signal
    number: signal.Signals = signal.SIGKILL
    awaited: Callable[[Path], bool] = lambda folder: True  # when
    words: tuple[str, ...] = ()  # more of the command line


KINDS = {
    "one rank": Kind(lambda rng, launcher, ranks: [rng.choice(ranks)]),
    "all ranks": Kind(lambda rng, launcher, ranks: ranks),
    "launcher": Kind(lambda rng, launcher, ranks: [launcher]),
    "rank 0, writing": Kind(lambda rng, launcher, ranks: ranks[:1], awaited=writing),
    "SIGTERM": Kind(lambda rng, launcher, ranks: [launcher], signal.SIGTERM),
    "SIGTERM, evaluating": Kind(
        lambda rng, launcher, ranks: [launcher],
        signal.SIGTERM,
        evaluating,
        ("evaluate.every_steps=5", "evaluate.batch_size=1", "+callbacks.slow._target_=scale_kills.Slow"),
    ),
}


@dataclass(frozen=True)
class Layout:
    """How many processes train, and how they share the work."""

    strategy: str
    size: int

    @property
    def words(self) -> tuple[str, ...]:
        """On the command line."""
        return f"devices={self.size}", f"strategy={self.strategy if self.size > 1 else 'auto'}"


def attempt(kind: Kind, rng: random.Random, folder: Path, layout: Layout, other: Layout, expected: str) -> str:
    """End a run early, and resume it in another layout or the same; returns what went wrong, or an empty string.

    `expected` is the SHA-256 of the weights of a run of `layout` that nothing ends.
    """
    words = [*WORDS, "trust=[scale_kills]", *kind.words]
    if kind.words:
        words.append(f"+callbacks.slow.folder={folder}")
    launcher = start(folder, *words, *layout.words)
    assert launcher.pid is not None
    step, deadline = rng.randint(1, 60), time.monotonic() + PATIENCE_S
    metrics = folder / "metrics.jsonl"
    while not (metrics.is_file() and metrics.read_bytes().count(b'"train"') >= step):
        if launcher.exitcode is not None or time.monotonic() > deadline:
            kill([launcher.pid])
            return f"did not come to step {step}: {Path(f'{folder}.log').read_text()[-300:]}"
        time.sleep(0.002)
    while not kind.awaited(folder) and launcher.exitcode is None:
        time.sleep(0.0002)
    ranks = ranks_of(launcher.pid)
    kill(kind.chosen(rng, launcher.pid, ranks), kind.number)
    launcher.join(PATIENCE_S)
    if launcher.exitcode is None:
        launcher.kill()
        return "the launcher hangs"
    if not gone(ranks):
        return "a rank is left"
    ended = launcher.exitcode == 0  # it was too late
    if kind.number == signal.SIGTERM and launcher.exitcode not in (0, PREEMPTED):
        return f"status {launcher.exitcode}, not {PREEMPTED}"
    last = folder / "checkpoints/last.safetensors"
    if last.is_file():
        position = read(last)["position"]
        if kind.awaited is evaluating and not ended and not position["evaluation_due"]:
            return f"the evaluation after step {position['global_step']} was not interrupted"
        words = [f"ckpt_path={folder}", "trust=[scale_kills]"]
    else:
        folder = folder.with_name(f"{folder.name}_new")
    resumed = start(folder, *words, *other.words)
    resumed.join(PATIENCE_S)
    if resumed.exitcode != 0:
        resumed.kill()
        return f"status {resumed.exitcode} when resumed: {Path(f'{folder}.log').read_text()[-300:]}"
    summary = json.loads((folder / "summary.json").read_text())
    if summary["status"] != "finished":
        return f"it ended as {summary['status']}"
    if layout == other and not ended and summary["weights_sha256"] != expected:
        return "other bits"
    return ""


def kills(options: argparse.Namespace) -> int:
    """Kill and resume `options.count` times in each way."""
    CONTEXT.set_forkserver_preload(["runner.launch.processes", "runner.verbs.train"])
    rng = random.Random(options.seed)
    own = [Layout(strategy, size) for strategy in options.strategies for size in (2, 3)]
    every = [Layout("auto", 1), *(Layout(strategy, size) for strategy in ("ddp", "fsdp") for size in (2, 3))]
    cells = [(name, strategy) for name in KINDS if options.only in name for strategy in options.strategies]
    tried, right = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    deadline = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as scratch:
        expected = {}
        for layout in own:
            folder = Path(scratch) / f"whole_{layout.strategy}_{layout.size}"
            start(folder, *WORDS, *layout.words).join()
            expected[layout] = json.loads((folder / "summary.json").read_text())["weights_sha256"]
        for number, (name, strategy) in itertools.product(range(options.count), cells):
            if time.monotonic() > deadline:
                break
            layout = Layout(strategy, rng.choice((2, 3)))
            other = layout if number % 2 == 0 else rng.choice(every)
            folder = Path(scratch) / f"{name} {strategy} {number}".replace(" ", "_").replace(",", "")
            wrong = attempt(KINDS[name], rng, folder, layout, other, expected[layout])
            tried[name, strategy] += 1
            right[name, strategy] += not wrong
            print(f"{name}, {layout} resumed with {other}: {wrong or 'right'}", file=sys.stderr, flush=True)
    print("| strategy | ended early | attempts | ended in the right bits, or with as many steps in another layout |")
    print("|---|---|---|---|")
    for name, strategy in cells:
        print(f"| {strategy} | {name} | {tried[name, strategy]} | {right[name, strategy]} |")
    return int(right != tried)


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    command = commands.add_parser("kills", help="killed at random moments, resumed")
    command.add_argument("--count", type=int, default=20, help="of each kind")
    command.add_argument("--minutes", type=float, default=1000, help="begin no further attempt after so many")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--only", default="", help="a part of the names of kinds")
    command.add_argument("--strategies", nargs="+", default=["ddp", "fsdp"], choices=["ddp", "fsdp"])
    command.set_defaults(run=kills)
