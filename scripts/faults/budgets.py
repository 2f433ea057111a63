"""SIGKILL of runs with a budget, also while they measure: all end with the bits of a run that was told their number of steps."""

from __future__ import annotations

import math
import time
from pathlib import Path

import yaml
from safetensors.torch import load_file

from faults.jobs import BUDGETS, directory, whole
from faults.kills import with_workers
from faults.lives import begin, live
from faults.table import Bench, Row
from runner.checkpoint.weights import weights_sha256

_MEASURING = 0.4  # share of the kills that come before the first checkpoint


def _last(run: Path) -> Path:
    return run / "checkpoints" / "last.safetensors"


def steps_of(run: Path) -> int | None:
    """The number of steps that a run stored; None before that."""
    path = run / "config.yaml"
    return yaml.safe_load(path.read_text())["max_steps"] if path.exists() else None


def _killed(words: tuple[str, ...], run: Path, bench: Bench, longest: float, measuring: bool) -> str:
    """Start or continue a run, and kill it after up to `longest` seconds, of training unless `measuring`; tells what it did."""
    stored = run / "config.yaml"  # which the run that counts writes before its first step
    before = stored.stat().st_mtime_ns if stored.exists() else 0

    def trains() -> bool:
        return stored.exists() and stored.stat().st_mtime_ns != before

    more = ["resume=auto"] if not _last(run).exists() or bench.draw.random() < 0.5 else [f"ckpt_path={run}"]
    life = begin([*with_workers(words, bench.draw), *more, directory(run)], run.with_suffix(".log"))
    while not measuring and not trains() and not life.ended():
        time.sleep(0.002)
    moment = time.perf_counter() + bench.draw.uniform(0, longest)
    while time.perf_counter() < moment and not life.ended():
        time.sleep(0.0005)
    life.kill()
    if life.status != -9:
        return "over" if life.status == 0 else f"status {life.status}: {life.said()[-1500:]}"
    return "training" if trains() or more != ["resume=auto"] else "measuring"


def _torment(words: tuple[str, ...], run: Path, bench: Bench) -> tuple[dict[str, int], str]:
    """Kill a run as often as `counts` says, and let it end; returns the kills by where they came, and what was broken."""
    kills, numbers = bench.counts["budgets"], set[int | None]()
    struck, began = {"measuring": 0, "training": 0}, time.perf_counter()
    told = [*with_workers(words, bench.draw), "epochs=3", directory(run.with_name(f"{run.name}_short"))]
    life = live(told, run.with_suffix(".log"))
    assert life.status == 0, life.said()[-1500:]
    short = time.perf_counter() - began  # on a busy machine a budget has to be longer
    seconds = math.ceil(kills + 3 * short)
    measured = (*words, "epochs=null", f"budget={seconds}s")
    for number in range(kills):
        measuring = number < _MEASURING * kills
        came = _killed(measured, run, bench, short / 2 if measuring else 1 + short / kills, measuring)
        if came not in struck:
            if came != "over":
                return struck, came
            break
        struck[came] += 1
        if _last(run).exists():
            numbers.add(steps_of(run))
    life = live([*with_workers(measured, bench.draw), "resume=auto", directory(run)], run.with_suffix(".log"))
    numbers.add(steps_of(run))
    if life.status or len(numbers) != 1:
        return struck, f"status {life.status}, steps {numbers}: {life.said()[-1500:]}"
    left = run.with_name(f"{run.name}_left_alone")
    told = [*with_workers(words, bench.draw), "epochs=null", f"max_steps={numbers.pop()}", directory(left)]
    life = live(told, left.with_suffix(".log"))
    if life.status:
        return struck, f"status {life.status}: {life.said()[-1500:]}"
    found, expected = (weights_sha256(load_file(_last(each))) for each in (run, left))
    others = sorted(str(path.relative_to(run)) for path in run.rglob(".*") if path.name != ".lock")
    return struck, f"{found} instead of {expected}" if found != expected else ", ".join(others)


def section(bench: Bench) -> list[Row]:
    """The rows of this section."""
    rows = []
    for name in list(BUDGETS)[: bench.counts["configurations"] or None]:
        row, began = Row("budgets", f"SIGKILL, {name}"), time.perf_counter()
        struck, broken = _torment(whole(BUDGETS[name]), bench.folder / name.replace(",", "").replace(" ", "_"), bench)
        for _ in range(max(1, sum(struck.values()))):
            row.count(broken, bench.say)
        row.note = f"{struck['measuring']} while it measured"
        bench.say(f"  budgets, {name}: {row.kept} of {row.injected} in {time.perf_counter() - began:.0f} s, {row.note}")
        rows.append(row)
    return rows
