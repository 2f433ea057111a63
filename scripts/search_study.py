"""What pruning saves in a search.

    python scripts/search_study.py                       # 3 seeds of a study of 30 trials, with and without pruning
    python scripts/search_study.py --seeds 0 --trials 8  # a short form

The study: an MLP on digits, 9 epochs a trial, learning rate, weight decay and dropout drawn at random, so that both
studies of a seed have the same 30 configurations, and the pruned one is as good only if it stops no trial that would have
been the best. 40% of the data validate, as a validation split of 180 images does not tell good configurations apart.

`scripts/torture.py sweeps --launcher optuna` kills searches. The exit status is 1 if pruning costs accuracy or saves less than
half of the steps.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True)
class Ended:
    """What a study came to."""

    best: float
    steps: int
    pruned: int
    trials: int

    def __str__(self) -> str:
        return f"{self.best:.4f} | {self.steps:,} | {self.pruned} of {self.trials}"


def ended(folder: Path) -> Ended:
    """Read what a study came to from its storage and its jobs."""
    storage = JournalStorage(JournalFileBackend(str(folder / "search.jsonl")))
    study = optuna.load_study(study_name="search", storage=storage)
    steps = [json.loads(path.read_text())["global_step"] for path in folder.glob("*/summary.json")]
    states = [trial.state.name for trial in study.get_trials()]
    return Ended(study.best_value, sum(steps), states.count("PRUNED"), len(states))


def here(words: list[str]) -> Ended:
    """Run a study in this process."""
    from runner.cli import main

    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = main(["train", *words])
    if status:
        raise SystemExit(said.getvalue()[-3000:])
    return ended(Path(said.getvalue().strip().splitlines()[-1]))


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
        for seed in options.seeds:
            words = [*WORDS, f"seed={seed}", f"search.trials={options.trials}", *options.words]
            whole = here([*words, "search.pruner=none", f"output_root={scratch}/whole_{seed}"])
            print(f"| seed {seed}, all trials to their end | {whole} |", flush=True)
            pruned = here([*words, *PRUNED, f"output_root={scratch}/pruned_{seed}"])
            print(f"| seed {seed}, with pruning | {pruned} |", flush=True)
            if pruned.best < whole.best or 2 * pruned.steps > whole.steps:
                wrong.append(f"seed {seed}: pruning reaches {pruned}, without it {whole}")
    print("\n".join(wrong) or "as promised")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
