"""Kill a training with SIGKILL at random moments, resume it, and compare the final weights with an uninterrupted run.

    python scripts/kill_and_resume.py                  # 30 kills of each configuration
    python scripts/kill_and_resume.py --kills 5 --only plain --seed 7

Two thirds of the kills come at a uniformly random moment of the run, start-up included; one third is aimed inside the
writing of a checkpoint: between any two bytes, before or after fsync, rename and link. A run that is killed before its
first checkpoint is started anew. Every second resumed run is killed once more before it may finish. Each training is a
forked process, so the imports are paid once. Exit status 1 if any run ends with other bits.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

CONFIGURATIONS = {
    "plain": ["epochs=12", "checkpoint.every_steps=7"],
    "everything": [
        "epochs=4",
        "checkpoint.every_steps=3",
        "accumulate=3",
        "amp=true",
        "data.residency=disk",
        "data.num_workers=2",
        "data.shift=0.125",
        "transform=strong",
        "model.dropout=0.2",
        "scheduler=onecycle",
        "evaluate.every_steps=5",
    ],
}
COMMON = ["threads=1", "logger=none", "log.progress=false", "evaluate.test=false", "log.every_steps=10"]


def start(words: list[str], log: Path, prepare: Callable[[], None] | None = None) -> int:
    """Fork a process that runs `runner train`; returns its number."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        with log.open("ab", buffering=0) as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        if prepare is not None:
            prepare()
        from runner.cli import main

        status = main(["train", *words])
    finally:
        sys.stdout.flush()
        os._exit(status)


def wait(child: int) -> int:
    """Exit status of a process; negative for the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def die_while_writing(draw: random.Random) -> Callable[[], None]:
    """A change to the checkpoint writer, made in the child: it kills its process at a random one of its operations."""
    countdown = draw.randrange(1, 400)

    def prepare() -> None:
        from runner.checkpoint import file

        left = [countdown]

        def strike() -> None:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

        write = file._Hashing.write

        def write_and_strike(self: file._Hashing, data: bytes) -> int:
            strike()
            half = len(data) // 2
            written = write(self, bytes(data)[:half])
            strike()
            return written + write(self, bytes(data)[half:])

        file._Hashing.write = write_and_strike  # type: ignore[method-assign]
        for name in ("fsync", "replace", "link"):
            original = getattr(os, name)

            def operate(*args: object, original: Callable[..., object] = original) -> object:
                strike()
                result = original(*args)
                strike()
                return result

            setattr(os, name, operate)

    return prepare


def fingerprint(run: Path) -> str:
    """Final weights of a run that has finished."""
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "finished", f"{run} ended as {summary['status']}: {summary['error']}"
    return str(summary["weights_sha256"])


def torture(name: str, words: list[str], kills: int, draw: random.Random, scratch: Path) -> int:
    """Kill and resume one configuration; returns how many runs ended with other bits."""
    log = scratch / f"{name}.log"

    def directory(label: str) -> str:
        return f"hydra.run.dir={scratch / name / label}"

    began = time.perf_counter()
    assert wait(start([*COMMON, *words, directory("reference")], log)) == 0, f"the reference failed, see {log}"
    duration = time.perf_counter() - began
    expected = fingerprint(scratch / name / "reference")
    wrong = hits = aimed_hits = fresh = 0
    for number in range(kills):
        run = scratch / name / f"killed_{number}"
        aimed = number % 3 == 2
        killed = 0
        for life in range(2 if number % 2 else 1):
            resuming = [f"ckpt_path={run}"] if (run / "checkpoints" / "last.pt").exists() else []
            if life and not resuming:
                run = run.with_name(f"{run.name}_again")
            child = start(
                [*COMMON, *words, *resuming, f"hydra.run.dir={run}"], log, die_while_writing(draw) if aimed else None
            )
            if not aimed:
                time.sleep(draw.uniform(0, duration))
                os.kill(child, signal.SIGKILL)
            killed += wait(child) == -signal.SIGKILL
        hits += killed > 0
        aimed_hits += aimed and killed > 0
        if (run / "checkpoints" / "last.pt").exists():
            resumed = run if number % 4 else run.with_name(f"{run.name}_resumed")
            last = [f"ckpt_path={run}", f"hydra.run.dir={resumed}"]
        else:
            fresh += 1
            resumed = run.with_name(f"{run.name}_fresh")
            last = [f"hydra.run.dir={resumed}"]
        status = wait(start([*COMMON, *words, *last], log))
        found = fingerprint(resumed) if status == 0 else f"exit status {status}"
        if found != expected:
            wrong += 1
            print(f"  {name} {number}: {found} instead of {expected}, see {run} and {log}")
    print(
        f"{name:<12} {kills - wrong}/{kills} with the bits of the uninterrupted run "
        f"({hits} killed before they had ended, {aimed_hits} of them inside checkpoint writing; "
        f"{fresh} before the first checkpoint)"
    )
    return wrong


def main() -> int:
    """Run all configurations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30, help="kills of each configuration")
    parser.add_argument("--only", choices=CONFIGURATIONS, help="one configuration")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    options = parser.parse_args()

    import runner.train  # noqa: F401  # imported before forking, so that no child pays for it

    draw = random.Random(options.seed)
    chosen = [options.only] if options.only else list(CONFIGURATIONS)
    with tempfile.TemporaryDirectory() as folder:
        wrong = sum(torture(name, CONFIGURATIONS[name], options.kills, draw, Path(folder)) for name in chosen)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
