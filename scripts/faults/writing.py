"""SIGKILL inside the writing of a checkpoint: what was reported is there and whole, and what was half written goes."""

from __future__ import annotations

import json
import time
from pathlib import Path

from faults.jobs import directory, whole
from faults.lives import begin, fingerprint, leftovers, live
from faults.slow_disk import counting, dying, slow
from faults.table import Bench, Row

# The state has some megabytes; every third step is a checkpoint, and so is every second evaluation or so.
_LARGE = ("model=mlp", "model.hidden=[512,512]", "model.dropout=0.2", "epochs=2", "evaluate.every_steps=4")


def section(bench: Bench) -> list[Row]:
    """The rows of this section."""
    kinds = {
        "": whole((*_LARGE, "checkpoint.async=false")),
        ", asynchronous": whole((*_LARGE, "checkpoint.async=true")),
    }
    rows = []
    for suffix, words in kinds.items():
        folder = bench.folder / (suffix.strip(", ") or "plain")
        folder.mkdir(parents=True)
        expected, operations = _reference(words, folder)
        at_operation = Row("writing", f"SIGKILL at an operation of checkpoint writing{suffix}")
        on_slow_disk = Row("writing", f"SIGKILL while a temporary file is there, slow disk{suffix}")
        kills = bench.counts["writing"] // len(kinds)
        for number in range(kills):
            run = folder / f"run_{number}"
            if number % 2:
                row, killed = on_slow_disk, _kill_on_slow_disk(words, run, bench)
            else:
                row, killed = at_operation, _kill_at(words, run, bench.draw.randrange(1, operations))
            if killed:  # and not over before
                row.count(_damage(run) or _not_resumed(words, run, expected), bench.say)
        rows += [row for row in (at_operation, on_slow_disk) if row.injected]
    return rows


def _reference(words: tuple[str, ...], folder: Path) -> tuple[str, int]:
    """Final weights of a run that was left alone, and the operations that its checkpoints took."""
    run, counted = folder / "reference", folder / "operations"
    life = live([*words, directory(run)], folder / "reference.log", counting(counted))
    assert life.status == 0, life.said()[-2000:]
    return fingerprint(run), int(counted.read_text())


def _kill_at(words: tuple[str, ...], run: Path, operation: int) -> bool:
    return live([*words, directory(run)], run.with_suffix(".log"), dying(operation)).status == -9


def _kill_on_slow_disk(words: tuple[str, ...], run: Path, bench: Bench) -> bool:
    """Kill a run a moment after one of its temporary files has appeared."""
    life = begin([*words, directory(run)], run.with_suffix(".log"), slow)
    number = bench.draw.randrange(1, 12)
    there, seen = False, 0
    while not life.ended():
        now = any((run / "checkpoints").glob(".*.tmp"))
        seen += now and not there
        there = now
        if seen == number and now:
            time.sleep(bench.draw.uniform(0, 0.02))
            life.kill()
        time.sleep(0.0005)
    return life.status == -9


def _damage(run: Path) -> str:
    """What is wrong with the checkpoints that a kill has left, or an empty string."""
    from runner.base.errors import UserError
    from runner.checkpoint import file

    summary = json.loads((run / "summary.json").read_text()) if (run / "summary.json").exists() else {}
    steps = {}
    for path in sorted((run / "checkpoints").glob("*.safetensors")):
        try:
            steps[path.stem] = file.read(path)["position"]["global_step"]
        except UserError as error:
            return f"{error}"
    reported, best = summary.get("global_step", 0), summary.get("best")
    if reported and steps.get("last", -1) < reported:
        return f"{run}: step {reported} was reported as saved, and last is of step {steps.get('last')}"
    if best is not None and steps.get("best", -1) < best["global_step"]:
        return f"{run}: the best of step {best['global_step']} was reported, and best is of step {steps.get('best')}"
    return ""


def _not_resumed(words: tuple[str, ...], run: Path, expected: str) -> str:
    """What is wrong with a run that is continued in its directory, or an empty string."""
    more = [f"ckpt_path={run}"] if (run / "checkpoints" / "last.safetensors").exists() else []
    if not more and (run / "summary.json").exists():  # a run without a checkpoint is started again, elsewhere
        run = run.with_name(f"{run.name}_anew")
    life = live([*words, *more, directory(run)], run.with_suffix(".rest.log"))
    if life.status != 0:
        return f"{run} ended with status {life.status}: {life.said()[-1500:]}"
    if fingerprint(run) != expected:
        return f"{run} has {fingerprint(run)} instead of {expected}"
    left = leftovers(run)
    return f"{run} still has {', '.join(left)}" if left else ""
