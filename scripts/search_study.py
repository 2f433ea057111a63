"""What pruning saves in a search, and whether a search that is killed ends as one that is not.

    python scripts/search_study.py                       # 3 seeds of a study of 30 trials, with and without pruning
    python scripts/search_study.py --seeds 0 --trials 8  # a short form

The study: an MLP on digits, 9 epochs a trial, learning rate, weight decay and dropout drawn at random, so that both
studies of a seed have the same 30 configurations, and the pruned one is as good only if it stops no trial that would have
been the best. 40% of the data validate, as a validation split of 180 images does not tell good configurations apart.

The last row is the study of the first seed in processes that are killed with SIGKILL five times. It has to end with the
same trials, each of them counted once. The exit status is 1 if pruning costs accuracy or saves less than half of the steps,
or if the killed study differs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.storages.journal import JournalFileBackend, JournalStorage

os.environ.setdefault("OMP_NUM_THREADS", "1")
WORDS = (
    *("threads=1", "device=cpu", "logger=none", "log.progress=false", "log.curves=false", "evaluate.test=false"),
    *("data.split.val=0.4", "data.split.test=0.1", "model=mlp", "epochs=9", "sweep=optuna", "search.sampler=random"),
    *("search.optimizer.lr={log: [1e-5, 1]}", "search.optimizer.weight_decay={log: [1e-4, 1]}"),
    *("search.model.dropout={uniform: [0, 0.7]}",),
)
PRUNED = ("search.pruner=halving", "search.warmup=2", "search.reduction=3")
KILLS = 5


@dataclass(frozen=True)
class Ended:
    """What a study came to."""

    folder: Path
    best: float
    steps: int
    pruned: int
    trials: list[Any]  # state, values by key and result of each

    def __str__(self) -> str:
        return f"{self.best:.4f} | {self.steps:,} | {self.pruned} of {len(self.trials)}"


def ended(folder: Path) -> Ended:
    """Read what a study came to from its storage and its jobs."""
    storage = JournalStorage(JournalFileBackend(str(folder / "search.jsonl")))
    study = optuna.load_study(study_name="search", storage=storage)
    steps = [json.loads(path.read_text())["global_step"] for path in folder.glob("*/summary.json")]
    trials = [(trial.state.name, trial.params, trial.values) for trial in study.get_trials()]
    return Ended(folder, study.best_value, sum(steps), [state for state, *_ in trials].count("PRUNED"), trials)


def here(words: list[str]) -> Ended:
    """Run a study in this process."""
    from runner.cli import main

    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = main(["train", *words])
    if status:
        raise SystemExit(said.getvalue()[-3000:])
    return ended(Path(said.getvalue().strip().splitlines()[-1]))


def killed(words: list[str], root: Path, trials: int) -> Ended:
    """Run a study in processes of which `KILLS` are killed, at random moments of trials spread over the study."""
    draw, command = random.Random(0), [sys.executable, "-m", "runner", "train", *words]
    for kill in range(1, KILLS + 2):
        with (root / "killed.log").open("a") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        while process.poll() is None and kill <= KILLS:
            if len(list(root.glob("*/sweeps/*/*/summary.json"))) >= kill * trials // (KILLS + 1):
                time.sleep(draw.uniform(0, 0.5))
                process.kill()
                break
            time.sleep(0.01)
        if process.wait() != (-signal.SIGKILL if kill <= KILLS else 0):
            raise SystemExit(f"status {process.returncode}: {(root / 'killed.log').read_text()[-3000:]}")
    [folder] = root.glob("*/sweeps/*")
    return ended(folder)


def main() -> int:
    """Print the table, as the first columns of a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--words", nargs="*", default=[], help="further overrides")
    options = parser.parse_args()
    wrong = []
    print("| study | best val/accuracy | optimizer steps | pruned |\n|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        first = None
        for seed in options.seeds:
            words = [*WORDS, f"seed={seed}", f"search.trials={options.trials}", *options.words]
            whole = here([*words, "search.pruner=none", f"output_root={scratch}/whole_{seed}"])
            print(f"| seed {seed}, all trials to their end | {whole} |", flush=True)
            pruned = here([*words, *PRUNED, f"output_root={scratch}/pruned_{seed}"])
            print(f"| seed {seed}, with pruning | {pruned} |", flush=True)
            first = first or pruned
            if pruned.best < whole.best or 2 * pruned.steps > whole.steps:
                wrong.append(f"seed {seed}: pruning reaches {pruned}, without it {whole}")
        root = Path(scratch) / "killed"
        root.mkdir()
        words = [*WORDS, *PRUNED, f"seed={options.seeds[0]}", f"search.trials={options.trials}", *options.words]
        again = killed([*words, f"output_root={root}"], root, options.trials)
        print(f"| seed {options.seeds[0]}, with pruning, killed {KILLS} times | {again} |", flush=True)
        lines = map(json.loads, (again.folder / "sweep.jsonl").read_text().splitlines())
        counts = Counter(line["folder"] for line in lines if line["event"] in ("finished", "pruned", "failed"))
        if first is None or again.trials != first.trials or set(counts.values()) != {1}:
            wrong.append(f"the killed study differs: {again.trials}; its jobs ended {dict(counts)} times")
    print("\n".join(wrong) or "as promised")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
