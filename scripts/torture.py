"""Do to runs what machines, schedulers and untrusted files do to them, and count how often nothing was lost.

    python scripts/torture.py                                  # everything, about an hour on two cores
    python scripts/torture.py kills sweep --kills 200 --seed 7
    python scripts/torture.py --short                          # a few of each, under a minute

Every section ends in a table of what was injected, how often, and how often the program did what it promises. The exit
status is 1 if a promise was broken. Each run is a forked process of the program; torch computes on one thread.
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
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is there; no thread pool may exist when we fork
sys.path.insert(0, str(Path(__file__).resolve().parent))

from faults.table import Bench, Row, markdown_table, text_table

SECTIONS = {
    "kills": "SIGKILL at random moments, over all configurations",
    "budgets": "SIGKILL at random moments of runs with a budget, also while they measure",
    "writing": "SIGKILL inside the writing of a checkpoint, on a slow disk",
    "disk": "a disk that is full while checkpoints, logs and caches are written",
    "damage": "truncated and altered checkpoints",
    "cache": "damage to the cache of data.cache=disk before a run, and its removal while it is used",
    "hostile": "files made by somebody who means harm",
    "memory": "small files that want to become large, and the peak of memory",
    "downloads": "an untrusted config that would download or write, in every section",
    "special": "named pipes, devices and the like in every place that is listed or opened",
    "same_bits": "settings that must not change a bit",
    "signals": "SIGTERM, SIGHUP and the other signals that stop a run, in every phase",
    "ending": "SIGKILL at every place of a run's end, all loggers compared line by line",
    "sweep": "SIGKILL at every micro-batch in every phase, and chains of kills",
    "sweeps": "SIGKILL, SIGTERM and SIGINT of sweeps and their jobs at random moments, repeated with the same command",
}
COUNTS = {
    "kills": (200, 1, "SIGKILLs at random moments"),
    "configurations": (0, 1, "how many configurations to kill; 0 for all"),
    "budgets": (10, 2, "SIGKILLs of each run with a budget, which has two seconds more for each"),
    "writing": (50, 2, "kills inside checkpoint writing"),
    "disks": (0, 2, "how many ways to fill the disk; 0 for all"),
    "truncations": (100, 10, "truncated checkpoints"),
    "flips": (1000, 30, "altered bytes"),
    "cache": (50, 1, "damages to a cache before a run, and again removals while it is used"),
    "settings": (0, 1, "settings that must not change a bit; 0 for all"),
    "hostile": (0, 2, "malicious files; 0 for all"),
    "memory": (0, 2, "small files that want to become large; 0 for all"),
    "downloads": (0, 2, "targets in sections that would download or write; 0 for all"),
    "endings": (0, 1, "places of a run's end; 0 for all"),
    "special": (0, 2, "special files; 0 for all"),
    "signals": (0, 1, "phases that a signal comes in; 0 for all"),
    "places": (0, 1, "places of the kill sweep; 0 for all"),
    "chains": (60, 1, "chains of kills"),
    "sweeps": (20, 1, "sweeps of four jobs that are stopped three times each, with each launcher"),
}


def run(
    sections: list[str],
    counts: dict[str, int],
    seed: int,
    folder: Path,
    launchers: tuple[str, ...] = ("basic", "pool", "optuna"),
) -> list[Row]:
    """Run sections one after the other; each has random numbers of its own, so that any can be repeated alone."""
    import importlib

    import runner.verbs.train  # noqa: F401  # before anything forks, so that no child pays for it
    from faults.jobs import directory, whole
    from faults.lives import preload

    folder.mkdir(parents=True, exist_ok=True)
    job = whole(("max_steps=2", "logger=all", directory(folder / "preload")))
    evaluates = {"hostile", "memory", "downloads"} & {*sections}
    preload(folder, ["train", *job], *([["eval", f"ckpt_path={folder / 'preload'}", "split=val"]] if evaluates else []))

    rows = []
    for name in sections:
        began = time.perf_counter()
        bench = Bench(folder / name, random.Random(f"{seed} {name}"), counts, lambda line: print(line, flush=True))
        bench.launchers = launchers
        bench.folder.mkdir(parents=True)
        found = importlib.import_module(f"faults.{name}").section(bench)
        rows += found
        print(f"\n{SECTIONS[name]} ({time.perf_counter() - began:.0f} s)\n{text_table(found)}\n", flush=True)
    return rows


def main(argv: list[str] | None = None) -> int:
    """Run what the command line asks for."""
    for stopped in (signal.SIGHUP, signal.SIGQUIT, signal.SIGXCPU):
        signal.signal(stopped, signal.SIG_DFL)  # `nohup` and background jobs ignore some, and so would every run
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "sections", nargs="*", metavar="SECTION", help=f"of {', '.join(SECTIONS)}; all if none is given"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of moments and places")
    parser.add_argument("--short", action="store_true", help="a few of each")
    parser.add_argument("--folder", type=Path, help="keep all runs in this folder; without it they are removed")
    parser.add_argument(
        "--launcher",
        choices=("basic", "pool", "optuna", "optuna_pool", "ranks", "ray", "slurm", "slurm_ranks"),
        help="of the section sweeps, optuna_pool for a search on the pool; without it basic, pool and optuna",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there as well")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table there as well")
    for name, (long, short, what) in COUNTS.items():
        parser.add_argument(f"--{name}", type=int, help=f"{what} (default {long}, short {short})")
    options = parser.parse_args(argv)
    for name in options.sections:
        if name not in SECTIONS:
            parser.error(f"'{name}' is not a section; there are {', '.join(SECTIONS)}")
    defaults = {name: short if options.short else long for name, (long, short, _) in COUNTS.items()}
    counts = {name: given if (given := getattr(options, name)) is not None else defaults[name] for name in COUNTS}
    # In memory, where there is such a place: a kill leaves there what it leaves on a disk, and flushing costs nothing.
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place, ignore_cleanup_errors=True) as scratch:
        rows = run(
            options.sections or list(SECTIONS),
            counts,
            options.seed,
            options.folder or Path(scratch),
            (options.launcher,) if options.launcher else ("basic", "pool", "optuna"),
        )
    if options.json:
        options.json.write_text(json.dumps([row.plain() for row in rows], indent=2) + "\n")
    if options.markdown:
        options.markdown.write_text(markdown_table(rows) + "\n")
    broken = [row for row in rows if row.broken]
    print(f"{sum(row.kept for row in rows)} of {sum(row.injected for row in rows)} as promised")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
