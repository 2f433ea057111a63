"""The time of a step on two processes, against a hand-written loop and against two runs that do not know of each other.

python scripts/scale.py speed    # ResNet-18 at 32 pixels, one thread a process; some minutes on two quiet cores
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from recipes import records

MODEL = ("model=resnet18_cifar", "model.width=32")
DATA = ("data=synthetic", "data.dataset.samples=4000", "data.dataset.channels=3", "data.image_size=32",
        "transform=none")  # fmt: skip
REST = ("optimizer=sgd", "optimizer.lr=0.01", "threads=1", "logger=none", "log.progress=false", "log.curves=false",
        "evaluate.every_epochs=null", "evaluate.test=false", "checkpoint.every_epochs=null", "epochs=null")  # fmt: skip


def of_runner(folder: Path, options: argparse.Namespace, devices: int, batch: int, copies: int = 1) -> float:
    """Seconds per step of `copies` runs at a time, from what they log after the first steps."""
    steps = options.first + options.steps
    words = [*MODEL, *DATA, *REST, f"max_steps={steps}", f"log.every_steps={options.first}", f"data.batch_size={batch}"]
    command = [sys.executable, "-m", "runner", "train", *words, f"devices={devices}"]
    runs = [folder / str(number) for number in range(copies)]
    started = [
        subprocess.Popen([*command, f"hydra.run.dir={run}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for run in runs
    ]
    assert {process.wait() for process in started} == {0}
    return batch / statistics.median(line["samples_per_s"] for run in runs for line in records(run, "train")[1:])


def bare(rank: int, meeting: str, options: argparse.Namespace, batch: int) -> float:
    """A hand-written loop with DistributedDataParallel on the same model, with images in memory."""
    import torch
    import torch.distributed as dist
    from torch import nn

    from runner.models.resnet_cifar import ResNet18

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(ResNet18(3, 10, width=32), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=True)
    images, targets = torch.randint(0, 256, (4000, 3, 32, 32), dtype=torch.uint8), torch.randint(0, 10, (4000,))
    criterion, times, began = nn.CrossEntropyLoss(), [], time.perf_counter()
    for step in range(1, options.first + options.steps + 1):
        chosen = torch.randint(0, 4000, (batch // 2,))
        prepared = images[chosen].float().div_(255).sub_(0.5).div_(0.25)
        loss = criterion(model(prepared), targets[chosen])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % options.first == 0:
            now = time.perf_counter()
            times.append((now - began) / options.first)
            began = now
    dist.destroy_process_group()
    return statistics.median(times[1:])


def of_bare(folder: Path, options: argparse.Namespace, batch: int) -> float:
    """Seconds per step of the hand-written loop."""
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        return next(pool.map(bare, (0, 1), (str(folder / "ranks"),) * 2, (options,) * 2, (batch,) * 2))


def speed(options: argparse.Namespace) -> int:
    """Measure in alternating rounds, and print medians of the ratios."""
    batch, by_hand, alone = options.batch, [], []
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory() as scratch:
            together = of_runner(Path(scratch) / "together", options, 2, batch)
            hand = of_bare(Path(scratch), options, batch)
            single = of_runner(Path(scratch) / "alone", options, 1, batch // 2, copies=2)
        by_hand.append(together / hand)
        alone.append(together / single)
        line = f"round {number}: runner {together:.4f} s, by hand {hand:.4f} s, two alone {single:.4f} s"
        print(line, file=sys.stderr, flush=True)
    print("| a step of `devices=2` against | ratio, median (smallest, largest) |\n|---|---|")
    for what, ratios in (
        ("a hand-written DistributedDataParallel loop", by_hand),
        ("two independent processes", alone),
    ):
        print(f"| {what} | {statistics.median(ratios):.3f} ({min(ratios):.3f}, {max(ratios):.3f}) |")
    return 0


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the subcommand."""
    command = commands.add_parser("speed", help="the time of a step on two processes")
    command.add_argument("--rounds", type=int, default=5)
    command.add_argument("--batch", type=int, default=64, help="samples of both processes together")
    command.add_argument("--first", type=int, default=5, help="steps to warm up, and between two readings")
    command.add_argument("--steps", type=int, default=20)
    command.set_defaults(run=speed)
