"""SIGKILL, SIGTERM and SIGINT of sweeps and their jobs at random moments, repeated with the same command until all is done.

On SLURM, a cluster of one node on this machine, jobs are cancelled and warned too, and the daemon of the node starts again.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import optuna
import psutil
from optuna.storages.journal import JournalFileBackend, JournalStorage

from faults.jobs import whole
from faults.lives import Life, begin, fingerprint, leftovers, live
from faults.table import Bench, Row
from slurm_local.cluster import cluster, restart_node

_STOPS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
_TIMES = 3
_JOBS = ("0", "1", "2", "3")
_LAUNCHERS = {
    "basic": (),
    "pool": ("hydra/launcher=pool", "hydra.launcher.per_device=2"),
    "optuna": (),
    "optuna_pool": ("hydra/launcher=pool", "hydra.launcher.per_device=2"),
    "ranks": (),
    "ray": ("hydra/launcher=ray",),
    "slurm": ("hydra/launcher=slurm",),
    "slurm_ranks": ("hydra/launcher=slurm", "hydra.launcher.tasks_per_node=2"),
}
_SWEEP = ("sweep",)
_VICTIMS = (_SWEEP, ("job",), ("sweep", "job"))
_VICTIMS_ON_SLURM = (*_VICTIMS, ("cancelled",), ("warned",), ("sweep", "warned"), ("daemon",))
_REPETITIONS = 4  # of the last command on SLURM: a job that was cancelled before it began to wait ends it with 75
_GONE_S = 90.0  # for Ray's own processes to notice that their sweep was killed
_GRID = ("--multirun", "epochs=2", "seed=0,1", "optimizer.lr=0.003,0.01")
_LONGER = "epochs=6"  # for jobs that would be over before a stop comes
_SEARCH = (
    *("sweep=optuna", "search.optimizer.lr={log: [1e-4, 1e-1]}", "search.trials=4", _LONGER),
    *("search.pruner=halving", "search.reduction=2", "checkpoint.monitor=val/loss"),
)
_LONGEST = "epochs=20"  # for jobs whose start takes seconds
_WORDS = {
    "basic": _GRID,
    "ranks": (*_GRID, "devices=2"),  # which adds in another order than one process
    "ray": (*_GRID, _LONGEST),
    "slurm": (*_GRID, _LONGEST),
    "slurm_ranks": (*_GRID, _LONGEST, "devices=2"),
    "optuna": _SEARCH,
    # Which trial ends first decides what a pruner does, so that only a search without one has results to compare with.
    "optuna_pool": (*_SEARCH[:4], "search.pruner=none", _SEARCH[-1]),
}


@dataclass(frozen=True)
class _Case:
    """A sweep that is stopped.

    Attributes:
        words: of its command.
        root: where it and its log lie.
        lasted: how many seconds it takes if it is left alone.
        expected: what each job comes to.
        on_slurm: whether its jobs are those of SLURM.
    """

    words: tuple[str, ...]
    root: Path
    lasted: float
    expected: dict[str, str]
    on_slurm: bool

    @property
    def log(self) -> Path:
        return self.root.with_suffix(".log")


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
        own, on_slurm = (*words, *_LAUNCHERS[launcher]), launcher.startswith("slurm")
        name = f"{launcher}: sweeps of {len(_JOBS)} jobs, {_TIMES} stops of the sweep, a job or both at random moments"
        row, hit = Row("sweeps", name), Counter[str]()
        with contextlib.ExitStack() as stack:
            if on_slurm:
                os.environ.update(stack.enter_context(cluster(bench.folder / "cluster")))
            lasted = times.get(own) or _lasted(own, bench.folder / f"{launcher}_undisturbed")
            for number in range(bench.counts["sweeps"]):
                root = bench.folder / f"{launcher}_{number}"
                case = _Case((*own, f"output_root={root}"), root, lasted, known[words], on_slurm)
                row.count(_stopped(bench, case, hit), bench.say)
        row.note = ", ".join(f"{count} {name}" for name, count in sorted(hit.items()))  # others came too late
        rows.append(row)
    return rows


def _lasted(words: tuple[str, ...], root: Path) -> float:
    """Run a sweep that is left alone below `root`; how many seconds it takes."""
    began = time.perf_counter()
    life = live((*words, f"output_root={root}"), root.with_suffix(".log"))
    assert life.status == 0, life.said()[-2000:]
    return time.perf_counter() - began


def _stopped(bench: Bench, case: _Case, hit: Counter[str]) -> str:
    """Stop a sweep and its repetitions, let the last one end, and say what was not as promised; `hit` counts the victims."""
    root = case.root
    for _ in range(_TIMES):
        # After a trial whose process was killed, the pruner of the next one lacks its evaluations, and may decide otherwise
        possible = (_SWEEP,) if "search.pruner=halving" in case.words else _VICTIMS
        victims = bench.draw.choice(_VICTIMS_ON_SLURM if case.on_slurm else possible)
        number, delay = bench.draw.choice(_STOPS), bench.draw.uniform(0.1, 1) * case.lasted / 2
        number = signal.SIGKILL if "job" in victims else number  # as the system short of memory does it
        life = begin(case.words, case.log)
        while victims != _SWEEP and not _working(root, life.pid) and not life.ended():
            time.sleep(0.002)  # the delay begins with the first job that works
        until = time.perf_counter() + delay / (1 if victims == _SWEEP else 2)
        while time.perf_counter() < until and not life.ended():
            time.sleep(0.002)
        _strike(bench, case, victims, hit)
        if "sweep" in victims and not life.ended():
            os.kill(life.pid, number)
            hit[f"of the sweep by {number.name}"] += 1
        if (status := life.wait()) not in (0, 75, 128 + signal.SIGINT, -number, *((1,) if "job" in victims else ())):
            return f"{root}: status {status} after {number.name}: {life.said()[-1500:]}"
        for ledger in root.glob("*/sweeps/*/sweep.jsonl"):
            for line in ledger.read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    json.loads(line)
    life = live(case.words, case.log)
    for _ in range(_REPETITIONS if case.on_slurm else 0):
        life = life if life.status == 0 else live(case.words, case.log)
    return _broken(case, life) or _left(case)


def _strike(bench: Bench, case: _Case, victims: Sequence[str], hit: Counter[str]) -> None:
    """Kill, cancel or warn a random job, or start the daemon of SLURM's node again."""
    if "job" in victims and (jobs := _working(case.root, 0)):
        for job in jobs if "sweep" in victims else [bench.draw.choice(jobs)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(job, signal.SIGKILL)
        hit["of all jobs" if "sweep" in victims else "of a job"] += 1
    if "daemon" in victims:
        restart_node(bench.folder / "cluster")
        hit["of the node's daemon"] += 1
    running = _queue("--states=RUNNING") if {"cancelled", "warned"} & {*victims} else []
    if running:
        warning = bench.draw.choice(("USR1", "USR2", "TERM"))
        words = ["--signal", warning] if "warned" in victims else []
        subprocess.run(["scancel", *words, bench.draw.choice(running)], check=True)
        hit[f"of a job by scancel {' '.join(words)}".strip()] += 1


def _broken(case: _Case, life: Life) -> str:
    """What is not as promised about the jobs of a sweep that has ended."""
    folders = list(case.root.glob("*/sweeps/*"))
    # A stop before the ledger has its first line leaves a folder without jobs.
    [folder] = [folder for folder in folders if (folder / "0").exists()] or [case.root]
    found = _found(folder)
    if life.status != 0 or found != case.expected:
        return f"{folder}: status {life.status}, {found} instead of {case.expected}: {life.said()[-1500:]}"
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


def _left(case: _Case) -> str:
    """What a sweep left in the queue of SLURM or among the processes of this machine."""
    if case.on_slurm and (queued := _queue()):
        return f"{case.root}: {queued} are still in the queue"
    deadline = time.monotonic() + _GONE_S
    while left := _processes(case.root):
        if time.monotonic() > deadline:
            return f"{case.root}: {left} are left"
        time.sleep(0.1)
    return ""


def _processes(root: Path) -> list[str]:
    """Processes of the jobs below `root`, and Ray's."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            text = " ".join(process.cmdline())
            if f"{root}/" in text or process.name() in ("raylet", "gcs_server") or text.startswith("ray::"):
                found.append(f"{process.pid} {text[:200]}")
    return found


def _queue(*words: str) -> list[str]:
    """The jobs in the queue of SLURM."""
    command = ["squeue", "--noheader", "--array", "--format=%F_%K", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def _found(folder: Path) -> dict[str, str]:
    """What each job came to, and of a search all trials and the best one."""
    found = {job: fingerprint(folder / job) for job in _JOBS}
    if (folder / "search.jsonl").is_file():
        storage = JournalStorage(JournalFileBackend(str(folder / "search.jsonl")))
        trials = optuna.load_study(study_name="search", storage=storage).trials
        found["trials"] = str([(each.state, each.params, each.values, each.intermediate_values) for each in trials])
        found["best"] = (folder / "best.yaml").read_text().replace(str(folder), "").replace(str(folder.parents[2]), "")
    return found


def _working(root: Path, sweep: int) -> list[int]:
    """Processes of jobs, from the locks of their folders."""
    found = []
    for lock in root.glob("*/sweeps/*/*/.lock"):
        match = re.match(r"process (\d+) on ", lock.read_text())
        if match and int(match[1]) != sweep and Path(f"/proc/{match[1]}").exists():
            found.append(int(match[1]))
    return found
