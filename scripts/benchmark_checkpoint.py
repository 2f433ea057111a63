"""What writing a checkpoint costs the loop, at once and in the background.

    python scripts/benchmark_checkpoint.py --model resnet50 --rounds 5

A training with AdamW, as `python -m runner train` assembles it, saves the same state in turns: at once, and with
`checkpoint.async=true`. What is timed is how long the loop stands still for a save, and how long a step takes while the thread
writes. The first save in the background, which makes the buffers, is listed separately.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchvision import models

from runner.checkpoint.async_writer import AsyncWriter, Snapshot
from runner.checkpoint.manager import CheckpointManager, size_of
from runner.checkpoint.resume import contents
from runner.engine.state import RunningMean, TrainState
from runner.optim.schedules import Constant


def main() -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50", help="a classification model of torchvision")
    parser.add_argument("--rounds", type=int, default=5, help="saves of each kind")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads of torch")
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder unless told")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    state = trained(models.get_model(asked.model, weights=None))
    with tempfile.TemporaryDirectory(dir=asked.folder) as name:
        stood, first, during, alone = measure(state, CheckpointManager(Path(name), 2), asked.rounds)
    size = size_of(contents(state, {}, {"config": "", "classes": [], "versions": {}}, {})) / 2**20
    print(f"{asked.model}, {size:,.0f} MiB, {asked.threads} threads, {asked.rounds} saves of each kind in turns\n")
    at_once, behind = statistics.median(stood["at once"]), statistics.median(stood["in the background"])
    print("| how | the loop stands still | share |\n|---|---|---|")
    print(f"| at once | {at_once * 1e3:.0f} ms | 100% |")
    print(f"| in the background | {behind * 1e3:.1f} ms | {behind / at_once:.1%} |")
    print(f"| the first in the background | {first * 1e3:.0f} ms | {first / at_once:.0%} |")
    ratio = statistics.median(during) / statistics.median(alone)
    print(f"\nA step takes {ratio:.2f} times as long while the thread writes as it does alone.")
    return 0


def trained(model: nn.Module) -> TrainState:
    """A state after one step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    step(model, optimizer)
    return TrainState(model, optimizer, Constant(1000), None, RunningMean(torch.device("cpu")))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A step on two small images."""
    model(torch.randn(2, 3, 224, 224)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def measure(
    state: TrainState, manager: CheckpointManager, rounds: int
) -> tuple[dict[str, list[float]], float, list[float], list[float]]:
    """Seconds that the loop stood still by kind, in the first background save, of steps during a write, and of steps alone."""
    stood: dict[str, list[float]] = {"at once": [], "in the background": []}
    during: list[float] = []
    alone: list[float] = []
    first = 0.0
    background, snapshot = AsyncWriter(), Snapshot()

    def now() -> dict[str, Any]:
        state.position.global_step += 1
        return contents(state, {}, {"config": "", "classes": [], "versions": {}}, {})

    for number in range(rounds + 1):
        since = time.perf_counter()
        manager.save(now(), state.position.global_step, False)
        if number:
            stood["at once"].append(time.perf_counter() - since)
        alone.append(timed_step(state))
        seconds, waited = behind(state, manager, background, snapshot, now())
        if number:
            stood["in the background"].append(seconds + waited)
            during.append(timed_step(state))
        else:
            first = seconds + waited
        background.wait()
    return stood, first, during, alone


def behind(
    state: TrainState, manager: CheckpointManager, background: AsyncWriter, snapshot: Snapshot, contents: dict[str, Any]
) -> tuple[float, float]:
    """Save as `runner.run.saving` does, then take a step: seconds of the first, and that the update waited for it."""
    waited = 0.0

    def wait(*_: Any) -> None:
        nonlocal waited
        since = time.perf_counter()
        snapshot.complete.wait()
        waited = time.perf_counter() - since

    since = time.perf_counter()
    copy = snapshot.take(contents, lambda place: place.startswith("/optimizer/state/"))

    def work() -> None:
        snapshot.finish()
        manager.save(copy, copy["position"]["global_step"], False)

    background.start(work)
    seconds = time.perf_counter() - since
    hook = state.optimizer.register_step_pre_hook(wait)
    step(state.model, state.optimizer)
    hook.remove()
    return seconds, waited


def timed_step(state: TrainState) -> float:
    """Seconds of a step."""
    since = time.perf_counter()
    step(state.model, state.optimizer)
    return time.perf_counter() - since


if __name__ == "__main__":
    sys.exit(main())
