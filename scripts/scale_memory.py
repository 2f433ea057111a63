"""Measurements of training on several processes, each a subcommand.

    python scripts/scale.py memory --ranks 2 4 --models small_cnn vit_tiny

`memory` compares what `dry_run=true` predicts with what real ranks report: bytes that a rank holds, and bytes that it sends
in a step, as the operating system counts them (with gloo, on Linux). On CUDA it compares the peak of the allocator instead,
which has temporary tensors too. Exit status 1 if a prediction, that of the peak aside, is off by more than 10 %.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from runner.config.command import opened
from runner.config.resolve import resolve_config
from runner.config.schema.train import Train
from runner.distributed.world import world
from runner.instrument.saved_tensors import SavedTensors
from runner.run.dry_run import predict
from runner.train import build_run

HELD = ("parameters", "gradients", "optimizer", "buffers", "activations")
TOLERANCE = 0.1
QUIET = (
    "logger=none",
    "log.progress=false",
    "log.curves=false",
    "log.every_steps=1000",
    "checkpoint.every_epochs=null",
)
DATA = ("data=synthetic", "data.image_size=16", "data.dataset.samples=512", "data.batch_size=24", "threads=1")


class Count:
    """A callback that counts what this rank sends in a step, and what autograd keeps in one, and writes both to a folder.

    Args:
        folder: gets `rank_<number>.json`.
        first: steps before counting, in which DistributedDataParallel sorts its buckets.
        steps: steps whose bytes are counted.
    """

    def __init__(self, folder: str, first: int = 3, steps: int = 4) -> None:
        self._path = Path(folder) / f"rank_{world().rank}.json"
        self._first, self._last = first, first + steps
        self._before, self._sent = 0, 0.0
        self._whole: list[torch.Tensor] = []

    def _note_parameters(self, module: torch.nn.Module, inputs: Any) -> None:
        self._whole += module.parameters(recurse=False)

    def on_step(self, loop: Any) -> None:
        """Read the counter, or observe the next step."""
        step = loop.state.position.global_step
        if step == self._last - 1:  # under fsdp, modules have whole parameters while they compute
            modules = loop.state.model.modules()
            self._hooks = [module.register_forward_pre_hook(self._note_parameters) for module in modules]
        if step == self._first:
            self._before = written()
        elif step == self._last:
            self._sent = (written() - self._before) / (self._last - self._first)
            for hook in self._hooks:
                hook.remove()
            self._saved = SavedTensors(loop.state.model, self._whole)
            self._saved.__enter__()
        elif step == self._last + 1:
            self._saved.__exit__(None, None, None)
            self._path.write_text(json.dumps({"activations": self._saved.activations, "sent": self._sent}))
            loop.request_stop("everything is counted")


def written() -> int:
    """Bytes that this process has written to files and sockets."""
    return int(Path("/proc/self/io").read_text().partition("wchar:")[2].split()[0])


def config_of(words: Sequence[str]) -> Train:
    """The config of `python -m runner train` with these words."""
    with opened("train", words, Train) as command:
        assert not isinstance(command, int)
        return resolve_config(command.composition, Train)


def report(words: Sequence[str]) -> list[dict[str, float]]:
    """Train a few steps on real ranks; returns what each of them reports."""
    with tempfile.TemporaryDirectory() as folder:
        callback = ("callbacks.count._target_=scale_memory.Count", f"callbacks.count.folder={folder}")
        paths = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
        done = subprocess.run(
            [sys.executable, "-m", "runner", "train", *words, *callback, f"output_root={folder}"],
            env=os.environ | {"PYTHONPATH": paths},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"the ranks failed:\n{done.stdout}{done.stderr}")
        summary = json.loads((Path(done.stdout.strip().splitlines()[-1]) / "summary.json").read_text())
        counted = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("rank_*.json"))]
    return [held | more for held, more in zip(summary["memory"], counted, strict=True)]


def compare(words: Sequence[str]) -> list[tuple[str, int, list[float], float]]:
    """(quantity, predicted, reported by each rank, largest reported / predicted) for a run with these words."""
    found = predict(config_of(words), functools.partial(build_run, make_cache=False))
    ranks = report(words)
    for rank in ranks:
        rank["total"] = sum(rank[name] for name in HELD)
    predicted = vars(found.memory) | {"total": found.memory.total - found.memory.gathered - found.memory.average}
    # Gloo reduces and scatters by an all-reduce, which moves twice as much.
    predicted |= {"sent": found.traffic.total + found.traffic.reduce_scatter, "peak": found.memory.total}
    rows = []
    for name in (*HELD, "total", "sent" if config_of(words).device == "cpu" else "peak"):
        reported = [rank[name] for rank in ranks]
        if predicted[name] or any(reported):
            rows.append((name, predicted[name], reported, max(reported) / predicted[name]))
    return rows


def memory(asked: argparse.Namespace) -> int:
    """Print predicted and reported bytes side by side."""
    print("| model | ranks | bytes of a rank | predicted | reported, least | reported, most | ratio |")
    print("|---|---|---|---|---|---|---|")
    off = False
    for model in asked.models:
        for ranks in asked.ranks:
            words = (f"model={model}", f"devices={ranks}", f"strategy={asked.strategy}", *DATA, *QUIET)
            words = (
                *words,
                f"device={asked.device}",
                "evaluate.every_epochs=null",
                "evaluate.test=false",
                *asked.further,
            )
            for name, predicted, reported, ratio in compare(words):
                off |= name != "peak" and abs(ratio - 1) > TOLERANCE
                cells = f"{predicted:,} | {min(reported):,.0f} | {max(reported):,.0f} | {ratio:.3f}"
                print(f"| {model} | {ranks} | {name} | {cells} |", flush=True)
    return int(off)


def memory_options(parser: argparse.ArgumentParser) -> None:
    """The options of `memory`."""
    parser.add_argument("--models", nargs="+", default=["small_cnn", "vit_tiny"], help="options of the group model")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 3, 4], help="numbers of processes")
    parser.add_argument("--strategy", choices=("ddp", "fsdp"), default="ddp", help="how they share the work")
    parser.add_argument("--device", default="cpu", help="cpu or cuda; only on the CPU is the link counted")
    parser.add_argument("--further", nargs="+", default=[], metavar="WORD", help="words added to every command")


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    command = commands.add_parser("memory", help="predicted and reported memory and traffic of each process")
    memory_options(command)
    command.set_defaults(run=memory)
