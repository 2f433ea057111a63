"""Whether `report against=` raises alarms when it should: `python scripts/baseline_alarms.py [--repetitions 20]`.

A baseline of short runs on digits is compared with repetitions of the same command with other seeds, none of which may be an
alarm, and with four changes, each of which has to be one that names what changed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

SEEDS = 5
WORDS = (
    "data.shift=0.15",
    "epochs=4",
    "threads=1",
    "logger=none",
    "log.every_steps=5",
    "log.progress=false",
    "log.curves=false",
)
SLOW = "import time\n\n\nclass Slow:\n    def on_step(self, loop):\n        time.sleep(0.01)\n"
# Each change with what the report has to name.
CHANGES = {
    "learning rate halved": (("optimizer.lr=0.0025",), ("training loss", "optimizer.lr was 0.005, now 0.0025")),
    "augmentation off": (("data.shift=0",), ("training loss", "data.shift was 0.15, now 0")),
    "a sleep in the step": (("+callbacks.slow._target_=slow.Slow",), ("time of a step", "callbacks.slow")),
    "a larger model": (("model.width=64",), ("time of a step", "model.width was 32, now 64")),
}


def train(folder: Path, first: int, words: tuple[str, ...]) -> None:
    """One sweep over seeds."""
    seeds = ",".join(str(first + number) for number in range(SEEDS))
    given = [word for word in WORDS if word.partition("=")[0] not in {each.partition("=")[0] for each in words}]
    runner("train", "--multirun", f"seed={seeds}", f"hydra.sweep.dir={folder}", *given, *words)


def runner(*words: str) -> subprocess.CompletedProcess[str]:
    """Call the program; raises unless it exits with 0 or 4."""
    environment = os.environ | {"PYTHONPATH": ".", "COLUMNS": "250"}
    done = subprocess.run(
        [sys.executable, "-m", "runner", *words], capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode not in (0, 4):
        raise SystemExit(done.stdout + done.stderr)
    return done


def alarm(folder: Path) -> tuple[bool, str]:
    """Whether the report of a sweep is an alarm, and the reasons."""
    done = runner("report", str(folder), "against=baseline.json")
    return done.returncode == 4, "\n".join(line for line in done.stdout.splitlines() if line.startswith("worse: "))


def main(repetitions: int) -> int:
    """Print a line for each comparison; returns 1 if one of them is wrong."""
    wrong = 0
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        Path("slow.py").write_text(SLOW)
        train(Path("baseline"), 0, ())
        runner("report", "baseline", "save_baseline=baseline.json")
        for number in range(repetitions):
            train(Path(f"same_{number}"), SEEDS * (number + 1), ())
            raised, reasons = alarm(Path(f"same_{number}"))
            wrong += raised
            print(f"repetition {number + 1}: {'FALSE ALARM ' + reasons if raised else 'no alarm'}", flush=True)
        for name, (words, named) in CHANGES.items():
            folder = Path(name.replace(" ", "_"))
            train(folder, 1000, words)
            raised, reasons = alarm(folder)
            caught = raised and all(each in reasons for each in named)
            wrong += not caught
            print(f"{name}: {'caught' if caught else 'MISSED'}: {reasons}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=20)
    sys.exit(main(parser.parse_args().repetitions))
