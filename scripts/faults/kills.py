"""SIGKILL at random moments: every run ends with the bits of one that was left alone."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from faults.jobs import ANY_WORKERS, SLOW, configurations, directory
from faults.lives import Life, begin, fingerprint, live, marking
from faults.table import Bench, Row


@dataclass
class Reference:
    """A run that was left alone.

    Attributes:
        words: its configuration.
        weights: SHA-256 of its final weights.
        seconds: from the beginning of its loop to the end of its process.
        saved_s: from the beginning of its loop to its first checkpoint.
    """

    words: tuple[str, ...]
    weights: str
    seconds: float
    saved_s: float


def reference(words: tuple[str, ...], folder: Path) -> Reference:
    """Run a configuration without a fault."""
    mark = folder / "reference.began"
    folder.mkdir(parents=True, exist_ok=True)
    own = with_workers(words, random.Random(0))
    life = begin([*own, directory(folder / "reference")], folder / "reference.log", marking(mark))
    while not mark.exists() and not life.ended():
        time.sleep(0.002)
    began = time.perf_counter()
    while not _last(folder / "reference").exists() and not life.ended():
        time.sleep(0.002)
    saved = time.perf_counter()
    status = life.wait()
    assert status == 0, f"the run that was to be left alone ended with status {status}: {life.said()[-2000:]}"
    weights = fingerprint(folder / "reference")
    return Reference(words, weights, time.perf_counter() - began, saved - began)


def kills(bench: Bench) -> list[Row]:
    """Kill runs of every configuration in turn."""
    known = configurations()
    names = [name for name in known if bench.counts["configurations"] == 0 or name not in SLOW]
    if bench.counts["configurations"]:
        names = names[-bench.counts["configurations"] :]
    rounds = _shared_out(bench.counts["kills"], names)
    rows = []
    for name in names:
        if not rounds[name]:
            continue
        row = Row("kills", f"SIGKILL, {name}")
        began = time.perf_counter()
        early = _torment(known[name], rounds[name], row, bench, bench.folder / name.replace(",", "").replace(" ", "_"))
        row.note = f"{early} before the first checkpoint" if early else ""
        bench.say(f"  kills, {name}: {row.kept} of {row.injected} in {time.perf_counter() - began:.0f} s")
        rows.append(row)
    return rows


def same_as_from_the_shell(bench: Bench) -> Row:
    """What a forked run computes is what `python -m runner` computes."""
    row = Row("kills", "no fault: forked against python -m runner")
    words = configurations()["augmentation"]
    forked = reference(words, bench.folder / "forked").weights
    command = [sys.executable, "-m", "runner", "train", *words, directory(bench.folder / "shell")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = fingerprint(bench.folder / "shell") if done.returncode == 0 else done.stderr
    row.count("" if found == forked else f"{found} instead of {forked}", bench.say)
    return row


def _shared_out(kills: int, names: list[str]) -> dict[str, int]:
    """How many kills each configuration gets; the slow ones at most two."""
    shares = dict.fromkeys(names, 0)
    quick = [name for name in names if name not in SLOW]
    for name in SLOW:
        if name in shares:
            shares[name] = min(2, kills // len(names))
    left = kills - sum(shares.values())
    for number in range(left):
        shares[quick[number % len(quick)]] += 1
    return shares


def _torment(words: tuple[str, ...], kills: int, row: Row, bench: Bench, folder: Path) -> int:
    """Kill runs of one configuration; returns how many of the kills came before the first checkpoint."""
    left_alone = reference(words, folder)
    early = number = 0
    while row.injected < kills:
        number += 1
        run, killed = folder / f"run_{number}", 0
        # Every third run is killed again after it was resumed.
        for _ in range(min(2 if number % 3 == 0 else 1, kills - row.injected)):
            run, struck = _killed_once(left_alone, run, bench, folder / f"run_{number}.log")
            killed += struck
            early += struck and not _last(run).exists()
        run, life = _resumed(with_workers(words, bench.draw), run, number, folder)
        found = fingerprint(run) if life.status == 0 else f"status {life.status}: {life.said()[-1500:]}"
        broken = "" if found == left_alone.weights else f"{run} has {found} instead of {left_alone.weights}"
        for _ in range(killed):
            row.count(broken, bench.say)
        if broken and not killed:
            row.count(broken, bench.say)
    return early


def _last(run: Path) -> Path:
    return run / "checkpoints" / "last.safetensors"


def continued(run: Path, number: int = 0) -> tuple[list[str], Path]:
    """The words that resume a run, in its own directory or in another one, or that start it again if nothing was saved."""
    if not _last(run).exists():
        fresh = run.with_name(f"{run.name}_anew") if run.exists() else run
        return [directory(fresh)], fresh
    target = run if number % 2 else run.with_name(f"{run.name}_on")
    return [f"ckpt_path={run}", directory(target)], target


def with_workers(words: tuple[str, ...], draw: random.Random) -> list[str]:
    """The words of a life, with a number of workers of its own if the run may have any."""
    return [f"data.num_workers={draw.randrange(3)}" if word == ANY_WORKERS else word for word in words]


def _killed_once(left_alone: Reference, run: Path, bench: Bench, log: Path) -> tuple[Path, bool]:
    """Start or continue a run and kill it at a random moment; tells where it is, and whether it was not over by then.

    A quarter of the moments are of the whole loop, the others after the first checkpoint: before it nothing is resumed.
    """
    more, run = continued(run, 1)
    mark = log.with_suffix(".began")
    mark.unlink(missing_ok=True)
    life = begin([*with_workers(left_alone.words, bench.draw), *more], log, marking(mark))
    while not mark.exists() and not life.ended():
        time.sleep(0.002)
    begin_s = 0.0
    if bench.draw.random() > 0.25:
        while not _last(run).exists() and not life.ended():
            time.sleep(0.002)
        begin_s = left_alone.saved_s
    moment = time.perf_counter() + bench.draw.uniform(0, left_alone.seconds - begin_s)
    while time.perf_counter() < moment and not life.ended():
        time.sleep(0.0005)
    life.kill()
    return run, life.status == -9


def _resumed(words: list[str], run: Path, number: int, folder: Path) -> tuple[Path, Life]:
    more, run = continued(run, number)
    return run, live([*words, *more], folder / f"run_{number}_rest.log")


def section(bench: Bench) -> list[Row]:
    """The rows of this section."""
    rows = kills(bench)
    return rows if bench.counts["configurations"] else [same_as_from_the_shell(bench), *rows]
