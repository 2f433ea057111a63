"""SIGKILL, SIGTERM and SIGINT of sweeps at random moments, repeated with the same command until all is done."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from pathlib import Path

from faults.jobs import whole
from faults.lives import begin, fingerprint, live
from faults.table import Bench, Row

_STOPS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
_TIMES = 3
_JOBS = ("0", "1", "2", "3")


def section(bench: Bench) -> list[Row]:
    """The rows of this section."""
    words = ("--multirun", *whole(("epochs=2", "seed=0,1", "optimizer.lr=0.003,0.01")))
    row = Row("sweeps", f"sweeps of {len(_JOBS)} jobs, stopped {_TIMES} times at random moments")
    began = time.perf_counter()
    undisturbed = bench.folder / "undisturbed"
    first = live((*words, f"output_root={undisturbed}"), undisturbed.with_suffix(".log"))
    lasted = time.perf_counter() - began
    assert first.status == 0, first.said()[-2000:]
    [folder] = undisturbed.glob("*/sweeps/*")
    expected = {job: fingerprint(folder / job) for job in _JOBS}
    for number in range(bench.counts["sweeps"]):
        root = bench.folder / str(number)
        row.count(_stopped(bench, (*words, f"output_root={root}"), root, lasted, expected), bench.say)
    return [row]


def _stopped(bench: Bench, words: tuple[str, ...], root: Path, lasted: float, expected: dict[str, str]) -> str:
    """Stop a sweep and its repetitions, let the last one end, and say what was not as promised."""
    log = root.with_suffix(".log")
    for _ in range(_TIMES):
        life = begin(words, log)
        until = time.perf_counter() + bench.draw.uniform(0.1, 1) * lasted / 2
        while time.perf_counter() < until and not life.ended():
            time.sleep(0.002)
        number = bench.draw.choice(_STOPS)
        if not life.ended():
            os.kill(life.pid, number)
        if (status := life.wait()) not in (0, 75, 128 + signal.SIGINT, -number):
            return f"{root}: status {status} after {number.name}: {life.said()[-1500:]}"
        for ledger in root.glob("*/sweeps/*/sweep.jsonl"):
            for line in ledger.read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    json.loads(line)
    life = live(words, log)
    folders = list(root.glob("*/sweeps/*"))
    # A stop before the ledger has its first line leaves a folder without jobs.
    [folder] = [folder for folder in folders if (folder / "0").exists()] or [root]
    found = {job: fingerprint(folder / job) for job in _JOBS}
    if life.status != 0 or found != expected:
        return f"{folder}: status {life.status}, {found} instead of {expected}: {life.said()[-1500:]}"
    lines = [
        line for line in (folder / "sweep.jsonl").read_text().splitlines() if line.startswith('{"event": "finished"')
    ]
    ended = Counter(json.loads(line)["folder"] for line in lines)
    return "" if ended == dict.fromkeys(_JOBS, 1) else f"{folder}: jobs ended {dict(ended)} times"
