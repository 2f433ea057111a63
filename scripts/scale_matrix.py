"""Checkpoints of each layout of processes, resumed in each: the same weights.

python scripts/scale.py matrix             # some minutes on two cores
python scripts/scale.py matrix --only MLP  # of these models
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

from scale_equality import BOUNDS, CASES, COMMON, Runs, scratch

LAYOUTS = {
    "1 process": ("devices=1", "strategy=auto"),
    "ddp, 2": ("devices=2", "strategy=ddp"),
    "fsdp, 2": ("devices=2", "strategy=fsdp"),
    "fsdp, 4": ("devices=4", "strategy=fsdp"),
}
MODELS = ("MLP, accumulate=3", "ViT", "CNN, sync_batchnorm")


@dataclass(frozen=True)
class Resumed:
    """How the end of a resumed run differs from runs that were not interrupted: 0 for the same bits, see `difference`."""

    writer: str
    resumer: str
    from_one: float  # of one process
    from_own: float  # of the resumer's layout

    @property
    def right(self) -> bool:
        """Whether only rounding differs, and nothing where the layout is the writer's."""
        return self.from_one <= BOUNDS["float64"] and (self.writer != self.resumer or self.from_own == 0)


def difference(some: Path, other: Path) -> float:
    """The largest difference of a tensor of two checkpoints, relative to its largest number; infinite for other tensors."""
    ours, theirs = load_file(some), load_file(other)
    if {name: tensor.shape for name, tensor in ours.items()} != {name: tensor.shape for name, tensor in theirs.items()}:
        return float("inf")
    largest = 0.0
    for name, tensor in theirs.items():
        if not torch.equal(ours[name], tensor):
            error = (ours[name].double() - tensor.double()).abs().max() / tensor.double().abs().max()
            largest = max(largest, float(error.nan_to_num(float("inf"))))
    return largest


def resumed(runs: Runs, words: Sequence[str], step: int) -> Iterator[Resumed]:
    """Train in each layout, and resume from the checkpoint of each after `step` in each layout."""
    saving = (f"checkpoint.every_steps={step}", "checkpoint.keep=99", "checkpoint.min_seconds=0")
    whole = {name: runs.finished([*words, *layout, *saving]) for name, layout in LAYOUTS.items()}
    last = "checkpoints/last.safetensors"
    for writer, folder in whole.items():
        checkpoint = f"ckpt_path={folder}/checkpoints/step_{step:010}.safetensors"
        for resumer, layout in LAYOUTS.items():
            end = runs.finished([*words, *layout, *saving, checkpoint])
            differences = [difference(end / last, whole[name] / last) for name in ("1 process", resumer)]
            yield Resumed(writer, resumer, *differences)


def matrix(options: argparse.Namespace) -> int:
    """Compare all pairs of layouts."""
    broken = 0
    print("| model and settings | written by | resumed by | difference from one process | from its own layout |")
    print("|---|---|---|---|---|")
    with scratch() as folder, contextlib.closing(Runs(folder)) as runs:
        for name in (name for name in MODELS if options.only in name):
            words = (*COMMON, *CASES[name], "dtype=float64", f"max_steps={options.steps}", "evaluate.test=false")
            for pair in resumed(runs, words, options.steps // 4 + 2):
                broken += not pair.right
                own = "the same bits" if pair.from_own == 0 else f"{pair.from_own:.1e}"
                print(f"| {name} | {pair.writer} | {pair.resumer} | {pair.from_one:.1e} | {own} |", flush=True)
    print(f"\n{broken} pairs are beyond {BOUNDS['float64']:g}, or have other bits than the same layout without a stop.")
    return int(broken > 0)


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    command = commands.add_parser("matrix", help="checkpoints of each layout, resumed in each")
    command.add_argument("--steps", type=int, default=100)
    command.add_argument("--only", default="", help="a part of the names of cases")
    command.set_defaults(run=matrix)
