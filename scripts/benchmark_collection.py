"""What Python's garbage collector costs a training step, left automatic or run by the loop between steps.

    python scripts/benchmark_collection.py --threads 1

Trains the digits MLP in one process by the real loop, a few epochs automatic, a few epochs controlled, and so on; prints
the median of a step, its 99th percentile and its maximum under both, and the ratio of neighbouring turns.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence

import torch

import runner.engine.loop as loop_module
from runner.cli import main as command_line


class Finished(BaseException):
    """Ends the run from inside once everything is measured."""


def measure(loop: loop_module.Loop, turns: int, epochs: int) -> dict[str, list[list[float]]]:
    """For each turn of each way: seconds of the turn, then of each of its steps."""
    controlled = loop_module.collecting_between_steps
    ways: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
        "automatic": contextlib.nullcontext,
        "controlled": controlled,
    }
    loop.state.model.train()
    loop.emit("on_start")
    times: dict[str, list[list[float]]] = {name: [] for name in ways}
    seconds: list[float] = []
    plain = loop.step

    def timed(*args: object) -> None:
        began = time.perf_counter()
        plain(*args)  # type: ignore[arg-type]
        seconds.append(time.perf_counter() - began)

    loop.step = timed  # type: ignore[assignment]
    for turn in range(turns + 1):
        for name, way in ways.items():
            seconds.clear()
            began = time.perf_counter()
            with way():
                for _ in range(epochs):
                    loop._epoch()
            if turn:  # the first one warms up
                times[name].append([time.perf_counter() - began, *seconds])
    return times


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--epochs", type=int, default=40, help="epochs of a turn")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(words)
    found: dict[str, list[list[float]]] = {}

    def instead(loop: loop_module.Loop) -> None:
        found.update(measure(loop, options.turns, options.epochs))
        raise Finished

    loop_module.Loop.run = instead  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(Finished):
        command_line(
            f"train model=mlp optimizer=sgd data.split.val=0 evaluate.test=false epochs=1000000 logger=none "
            f"log.every_steps=1000000000 checkpoint.every_epochs=null threads={options.threads} output_root={folder}".split()
        )
    gc.enable()
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {options.threads} threads")
    for name, turns in found.items():
        every = sorted(second * 1e6 for turn in turns for second in turn[1:])
        print(
            f"{name:<11} median {statistics.median(every):7.1f} us   99% {every[int(0.99 * len(every))]:7.1f} us   "
            f"mean {statistics.fmean(every):7.1f} us   longest {every[-1]:9.1f} us"
        )
    ratios = [a[0] / b[0] for a, b in zip(found["controlled"], found["automatic"], strict=True)]
    print(f"controlled / automatic, whole turns: median {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
