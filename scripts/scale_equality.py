"""Measure what training with several processes promises.

python scripts/scale.py equality            # the same losses on 1, 2 and 3 processes, some minutes on two cores
python scripts/scale.py equality --only CNN # the rows of these models
python scripts/scale.py matrix              # checkpoints of each layout of processes, resumed in each: the same weights
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is there
sys.path.insert(0, str(Path(__file__).resolve().parent))
os.environ["PYTHONPATH"] = os.pathsep.join([sys.path[0], os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)

import torch
from safetensors.torch import load_file

from rank_pool import RankPool, sample_ids
from runner.base.errors import PREEMPTED
from runner.cli import main as program

BOUNDS = {"float64": 1e-10, "float32": 1e-3}  # largest relative difference of a loss
_GROWN = 10  # or so many times what rounding to float32 changes on one process

# 277 training samples: 13 batches, and the last one has a single sample.
COMMON = (
    "data=synthetic", "data.dataset.samples=308", "data.image_size=8", "data.dataset.channels=1", "data.batch_size=23",
    "evaluate.batch_size=16", "grad_clip.norm=1.0", "ema=0.9", "epochs=null", "evaluate.every_epochs=3",
    "log.every_steps=1", "log.progress=false", "log.curves=false", "logger=none", "threads=1",
)  # fmt: skip
_MLP = ("model=mlp", "model.hidden=[48]")  # without dropout, whose masks depend on the number of ranks
_CNN = ("model=small_cnn", "model.width=8", "model.dropout=0", "sync_batchnorm=true")
_VIT = ("model=vit_tiny", "model.dim=24", "model.depth=2", "model.heads=2")
_NUMBERS = ("data.dataset.kind=regression", "data.dataset.classes=1", "task=regression", "loss=mse")
CASES = {
    "MLP": (*_MLP, "transform=mix"),
    "MLP, accumulate=3": (*_MLP, "transform=mix", "accumulate=3"),
    "MLP, class weights": (*_MLP, "transform=standard", "loss.class_weights=balanced", "accumulate=3"),
    "MLP, focal loss, class weights": (*_MLP, "transform=mix", "loss=focal", "loss.class_weights=balanced"),
    "MLP, regression": (*_MLP, *_NUMBERS, "transform=mix"),
    "ViT": (*_VIT, "transform=mix"),
    "CNN, sync_batchnorm": (*_CNN, "transform=mix"),
    "CNN, sync_batchnorm, accumulate=3": (*_CNN, "transform=mix", "accumulate=3"),
    "ResNet, sync_batchnorm, drop_last": (
        "model=resnet18_cifar",
        "model.width=4",
        "sync_batchnorm=true",
        "data.drop_last=true",
    ),
}


@dataclass(frozen=True)
class Curve:
    """What a run logged."""

    losses: dict[tuple[str, int, str], float]  # by split, step and name
    initial: str  # sha256 of the initial weights
    ids: dict[tuple[int, int], list[int]]  # samples of each batch, by epoch and batch

    def difference(self, other: Curve) -> float:
        """The largest relative difference of a loss; infinite if one of them is missing."""
        if self.losses.keys() != other.losses.keys():
            return float("inf")
        return max(abs(self.losses[key] - value) / abs(value) for key, value in other.losses.items())


class Runs:
    """Trains in this process and the ranks of a pool, each run in a folder of its own below `parent`."""

    def __init__(self, parent: Path) -> None:
        self._pool, self._parent, self._count = RankPool(), parent, 0

    def train(
        self, words: Sequence[str], segments: Sequence[tuple[int | None, Sequence[str]]] = ((None, ()),)
    ) -> Curve:
        """Train once, and again from the checkpoint for each further segment: the step to stop after, and more words."""
        folder = self._new_folder()
        recorder = [
            "+callbacks.ids._target_=rank_pool.Recorder",
            f"+callbacks.ids.folder={folder / 'ids'}",
            "trust=[rank_pool]",
        ]
        for number, (stop_at, more) in enumerate(segments):
            begin = [f"hydra.run.dir={folder}", *([f"ckpt_path={folder}"] if number else [])]
            stop = [f"+callbacks.ids.stop_at={'null' if stop_at is None else stop_at}"]
            self._program([*words, *recorder, *stop, *more, *begin], 0 if stop_at is None else PREEMPTED)
        return _read(folder)

    def finished(self, words: Sequence[str]) -> Path:
        """The directory of a run that has trained to its end."""
        folder = self._new_folder()
        self._program([*words, f"hydra.run.dir={folder}"], 0)
        return folder

    def _new_folder(self) -> Path:
        self._count += 1
        return self._parent / str(self._count)

    def _program(self, words: Sequence[str], expected: int) -> None:
        said = io.StringIO()
        with self._pool.installed(), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            status = program(["train", *words])
        if status != expected:
            raise SystemExit(f"status {status} of {' '.join(words)}\n{said.getvalue()}")

    def close(self) -> None:
        """End the ranks."""
        self._pool.close()


def _read(folder: Path) -> Curve:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = {
        (row["split"], row["global_step"], name): value
        for row in rows
        for name, value in row.items()
        if name in ("loss", "ema_loss", "mae", "ema_mae")
    }
    initial = (folder / "ids" / "initial.txt").read_text()
    return Curve(losses, initial, sample_ids(folder / "ids"))


def equality(options: argparse.Namespace) -> int:
    """Compare the losses of every step on several processes with those of one."""
    broken, lines = 0, list[str]()
    cases = {name: case for name, case in CASES.items() if options.only in name}
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder, contextlib.closing(Runs(Path(folder))) as runs:
        for name, case in cases.items():
            exact = runs.train((*COMMON, *case, "dtype=float64", f"max_steps={options.steps}"))
            for dtype in options.dtypes:
                words = (*COMMON, *case, f"dtype={dtype}", f"max_steps={options.steps}")
                one = exact if dtype == "float64" else runs.train(words)
                rounding = one.difference(exact)
                bound = max(BOUNDS[dtype], _GROWN * rounding)
                for strategy in options.strategies:
                    for what, found in _variants(runs, words, options.steps, strategy):
                        difference = found.difference(one)
                        same_ids, same_start = found.ids == one.ids, found.initial == one.initial
                        broken += not (difference <= bound and same_ids and same_start)
                        yes = (_yes(same_ids), _yes(same_start))
                        cells = (name, dtype, f"{rounding:.1e}", strategy, what, f"{difference:.1e}", *yes)
                        lines.append(f"| {' | '.join(cells)} |")
                        print(lines[-1], file=sys.stderr, flush=True)
    print(f"{options.steps} steps, torch {torch.__version__}, Python {platform.python_version()}, gloo on the CPU\n")
    columns = (
        "model and settings",
        "dtype",
        "one process from float64",
        "strategy",
        "processes",
        "largest relative difference",
    )
    print(f"| {' | '.join((*columns, 'same samples', 'same initial weights'))} |")
    print("|---|---|---|---|---|---|---|---|", *lines, sep="\n")
    print(f"\n{broken} of {len(lines)} rows are beyond the bounds.")
    return int(broken > 0)


def _variants(runs: Runs, words: Sequence[str], steps: int, strategy: str) -> Iterator[tuple[str, Curve]]:
    """The same run on other numbers of processes, and resumed on others, with fsdp also with another strategy."""
    parallel = f"strategy={strategy}"
    for ranks in (2, 3):
        yield f"{ranks}", runs.train([*words, f"devices={ranks}", parallel])
    read, one = ("data.placement=disk", "data.num_workers=1"), ("devices=1", "strategy=auto")
    between = {"ddp": (), "fsdp": (("devices=3", "strategy=ddp"),)}[strategy]
    layouts = (
        (),
        ("devices=2", parallel),
        *between,
        ("devices=3", parallel, *read),
        (*one, "data.placement=auto", "data.num_workers=auto"),
    )
    # Ranks stop two steps after the signal. No stop is then at the end of an epoch, which has 13 batches.
    stops = [steps * number // len(layouts) + 2 for number in range(1, len(layouts))]
    yield (
        "1, 2, 3, 1" if strategy == "ddp" else "1, 2, ddp 3, 3, 1",
        runs.train(words, list(zip([*stops, None], layouts, strict=True))),
    )


def _yes(value: bool) -> str:
    return "yes" if value else "no"


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
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder, contextlib.closing(Runs(Path(folder))) as runs:
        for name in (name for name in MODELS if options.only in name):
            words = (*COMMON, *CASES[name], "dtype=float64", f"max_steps={options.steps}", "evaluate.test=false")
            for pair in resumed(runs, words, options.steps // 4 + 2):
                broken += not pair.right
                own = "the same bits" if pair.from_own == 0 else f"{pair.from_own:.1e}"
                print(f"| {name} | {pair.writer} | {pair.resumer} | {pair.from_one:.1e} | {own} |", flush=True)
    print(f"\n{broken} pairs are beyond {BOUNDS['float64']:g}, or have other bits than the same layout without a stop.")
    return int(broken > 0)


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommands."""
    command = commands.add_parser("equality", help="the same losses on any number of processes")
    command.add_argument("--strategies", nargs="+", default=["ddp", "fsdp"], choices=["ddp", "fsdp"])
    command.add_argument("--dtypes", nargs="+", default=list(BOUNDS), choices=list(BOUNDS))
    command.add_argument("--steps", type=int, default=100)
    command.add_argument("--only", default="", help="a part of the names of cases")
    command.set_defaults(run=equality)
    command = commands.add_parser("matrix", help="checkpoints of each layout, resumed in each")
    command.add_argument("--steps", type=int, default=100)
    command.add_argument("--only", default="", help="a part of the names of cases")
    command.set_defaults(run=matrix)
