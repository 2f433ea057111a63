"""SIGKILL, SIGTERM and SIGINT of sweeps and their jobs at random moments, repeated with the same command until all is done."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections import Counter
from pathlib import Path

from faults.jobs import whole
from faults.lives import begin, fingerprint, leftovers, live
from faults.table import Bench, Row

_STOPS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
_TIMES = 3
_JOBS = ("0", "1", "2", "3")
_LAUNCHERS = {
    "basic": (),
    "pool": ("hydra/launcher=pool", "hydra.launcher.per_device=2"),
    "optuna": (),
    "optuna_pool": ("hydra/launcher=pool", "hydra.launcher.per_device=2"),
    "ranks": (),
}
_SWEEP = ("sweep",)
_GRID = ("--multirun", "epochs=2", "seed=0,1", "optimizer.lr=0.003,0.01")
_SEARCH = (
    *("sweep=optuna", "search.optimizer.lr={log: [1e-4, 1e-1]}", "search.trials=4", "epochs=3"),
    *("search.pruner=halving", "search.reduction=2", "checkpoint.monitor=val/loss"),
)
_LONGER = "epochs=6"  # for jobs side by side, which would be over before a stop comes
_WORDS = {
    "basic": _GRID,
    "ranks": (*_GRID, "devices=2"),  # which adds in another order than one process
    "optuna": _SEARCH,
    # Which trial ends first decides what a pruner does, so that only a search without one has results to compare with.
    "optuna_pool": (*_SEARCH[:3], _LONGER, "search.pruner=none", _SEARCH[-1]),
}


def section(bench: Bench) -> list[Row]:
    """The rows of this section."""
    rows, known, times = [], dict[tuple[str, ...], dict[str, str]](), dict[tuple[str, ...], float]()
    for launcher in bench.launchers:
        words = _WORDS.get(launcher, (*_GRID, _LONGER))
        words = (*words[:1], *whole(words[1:]))
        if words not in known:
            undisturbed = bench.folder / f"undisturbed_{len(known)}"
            times[words] = _lasted(words, undisturbed)
            [folder] = undisturbed.glob("*/sweeps/*")
            known[words] = _found(folder)
        own, expected = (*words, *_LAUNCHERS[launcher]), known[words]
        lasted = times.get(own) or _lasted(own, bench.folder / f"{launcher}_undisturbed")
        name = f"{launcher}: sweeps of {len(_JOBS)} jobs, {_TIMES} stops of the sweep, a job or both at random moments"
        row = Row("sweeps", name)
        hit = Counter[str]()
        for number in range(bench.counts["sweeps"]):
            root = bench.folder / f"{launcher}_{number}"
            row.count(_stopped(bench, (*own, f"output_root={root}"), root, lasted, expected, hit), bench.say)
        row.note = ", ".join(f"{count} {name}" for name, count in sorted(hit.items()))  # others came too late
        rows.append(row)
    return rows


def _lasted(words: tuple[str, ...], root: Path) -> float:
    """Run a sweep that is left alone below `root`; how many seconds it takes."""
    began = time.perf_counter()
    life = live((*words, f"output_root={root}"), root.with_suffix(".log"))
    assert life.status == 0, life.said()[-2000:]
    return time.perf_counter() - began


def _stopped(
    bench: Bench,
    words: tuple[str, ...],
    root: Path,
    lasted: float,
    expected: dict[str, str],
    hit: Counter[str],
) -> str:
    """Stop a sweep and its repetitions, let the last one end, and say what was not as promised; `hit` counts the victims."""
    log = root.with_suffix(".log")
    for _ in range(_TIMES):
        victims = bench.draw.choice((_SWEEP, ("job",), ("sweep", "job")))
        number, delay = bench.draw.choice(_STOPS), bench.draw.uniform(0.1, 1) * lasted / 2
        life = begin(words, log)
        while "job" in victims and not _working(root, life.pid) and not life.ended():
            time.sleep(0.002)  # the delay begins with the first job that works
        until = time.perf_counter() + delay / (1 if victims == _SWEEP else 2)
        while time.perf_counter() < until and not life.ended():
            time.sleep(0.002)
        if "job" in victims and (jobs := _working(root, life.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(bench.draw.choice(jobs), signal.SIGKILL)
                hit["of a job"] += 1
        if "sweep" in victims and not life.ended():
            os.kill(life.pid, number)
            hit[f"of the sweep by {number.name}"] += 1
        if (status := life.wait()) not in (0, 75, 128 + signal.SIGINT, -number, *((1,) if "job" in victims else ())):
            return f"{root}: status {status} after {number.name}: {life.said()[-1500:]}"
        for ledger in root.glob("*/sweeps/*/sweep.jsonl"):
            for line in ledger.read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    json.loads(line)
    life = live(words, log)
    folders = list(root.glob("*/sweeps/*"))
    # A stop before the ledger has its first line leaves a folder without jobs.
    [folder] = [folder for folder in folders if (folder / "0").exists()] or [root]
    found = _found(folder)
    if life.status != 0 or found != expected:
        return f"{folder}: status {life.status}, {found} instead of {expected}: {life.said()[-1500:]}"
    if more := {path.name for path in folder.iterdir() if path.is_dir()} - {*_JOBS, "logs"}:
        return f"{folder}: there is {more} too"
    if left := leftovers(folder):
        return f"{folder}: {left} were left"
    ended = Counter[str]()
    for line in map(json.loads, (folder / "sweep.jsonl").read_text().splitlines()):
        if line["event"] == "started" and ended[line["folder"]]:
            return f"{folder}: {line['folder']} had finished, and started again"
        ended[line.get("folder", "")] += line["event"] in ("finished", "pruned")
    del ended[""]
    return "" if ended == dict.fromkeys(_JOBS, 1) else f"{folder}: jobs ended {dict(ended)} times"


def _found(folder: Path) -> dict[str, str]:
    """What each job came to, and all trials if the sweep is a search."""
    from runner.sweeps.study import JOURNAL, Study, StudySpec

    found = {job: fingerprint(folder / job) for job in _JOBS}
    if (folder / JOURNAL).is_file():
        study = Study(StudySpec(str(folder / JOURNAL), "search", ["min"]))
        found["trials"] = str([(each.state.name, each.params, each.values) for each in study.trials()])
    return found


def _working(root: Path, sweep: int) -> list[int]:
    """Processes of jobs, from the locks of their folders."""
    found = []
    for lock in root.glob("*/sweeps/*/*/.lock"):
        match = re.match(r"process (\d+) on ", lock.read_text())
        if match and int(match[1]) != sweep and Path(f"/proc/{match[1]}").exists():
            found.append(int(match[1]))
    return found
