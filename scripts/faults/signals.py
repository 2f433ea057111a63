"""Every signal that asks a run to stop, in every phase: the step is saved, the status says so, and the run goes on exactly."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from faults import phases, slow_disk
from faults.jobs import HARDEST, directory, whole
from faults.lives import Prepare, fingerprint, live
from faults.table import Bench, Row

PREEMPTED = 75
SIGNALS = (
    signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU,
)  # fmt: skip
SHORT = SIGNALS[:1]
# What one cause sends: a closed terminal (the shell and the kernel), a service manager, used up CPU time.
TOGETHER: dict[str, tuple[int, ...]] = {
    "SIGHUP twice": (signal.SIGHUP, signal.SIGHUP),
    "SIGTERM and SIGHUP": (signal.SIGTERM, signal.SIGHUP),
    "SIGXCPU three times": (signal.SIGXCPU,) * 3,
}
# Micro-batches are 20 an epoch, 3 a step; the last step of an epoch has 2.
PLACES: dict[str, tuple[str, int]] = {
    "data loading": ("while loading", 10),
    "forward": ("after forward", 12),
    "backward": ("after backward", 14),
    "the last step of an epoch": ("after forward", 19),
    "evaluation": ("while evaluating", 0),
    "the evaluation after the last step": ("while evaluating", 4),
    "restoring": ("while restoring", 0),
}


def section(bench: Bench) -> list[Row]:
    """The rows of this section."""
    words = whole(HARDEST)
    first = live([*words, directory(bench.folder / "reference")], bench.folder / "reference.log")
    assert first.status == 0, first.said()[-2000:]
    expected = fingerprint(bench.folder / "reference")
    names = ["checkpoint writing", *PLACES][: bench.counts["signals"] or None]
    rows = []
    for name in names:
        row = Row("signals", f"{len(SIGNALS)} signals that stop a run, during {name}")
        for number in SHORT if bench.counts["signals"] else SIGNALS:
            run = bench.folder / f"{name.replace(' ', '_')}_{number}"
            row.count(_not_obeyed(words, run, _sending(name, number), expected, name == "restoring"), bench.say)
        rows.append(row)
    twice = Row("signals", "two signals at once: the process ends, and the run goes on from its last checkpoint")
    twice.count(_second(words, bench.folder / "twice", expected), bench.say)
    together = Row("signals", f"as one cause sends them: {', '.join(TOGETHER)}")
    for name, numbers in list(TOGETHER.items())[: bench.counts["signals"] or None]:
        prepare = phases.signalling("after forward", 13, *numbers)
        together.count(_not_obeyed(words, bench.folder / name.replace(" ", "_"), prepare, expected, False), bench.say)
    return [*rows, twice, together]


def _sending(name: str, number: int) -> Prepare:
    if name != "checkpoint writing":
        return phases.signalling(*PLACES[name], number)

    def prepare() -> None:
        left = [17]  # operations, inside the second checkpoint or so

        def tell() -> None:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), number)

        slow_disk.telling(tell)

    return prepare


def _not_obeyed(words: tuple[str, ...], run: Path, prepare: Prepare, expected: str, resuming: bool) -> str:
    """What was not as promised, or an empty string."""
    more: list[str] = []
    if resuming:
        stopped = live(
            [*words, directory(run)], run.with_suffix(".first.log"), phases.signalling("after update", 8, 15)
        )
        if stopped.status != PREEMPTED:
            return f"status {stopped.status} before restoring: {stopped.said()[-800:]}"
        more = [f"ckpt_path={run}"]
    life = live([*words, *more, directory(run)], run.with_suffix(".log"), prepare)
    if life.status != PREEMPTED:
        return f"status {life.status} instead of {PREEMPTED}: {life.said()[-800:]}"
    summary = json.loads((run / "summary.json").read_text())
    if summary["status"] != "preempted":
        return f"its summary says {summary['status']}"
    from runner.checkpoint import file

    saved = file.read(run / "checkpoints" / "last.safetensors")["position"]["global_step"]
    if saved != summary["global_step"]:
        return f"step {saved} was saved, and the run stopped after step {summary['global_step']}"
    rest = live([*words, f"ckpt_path={run}", directory(run)], run.with_suffix(".rest.log"))
    found = fingerprint(run) if rest.status == 0 else f"status {rest.status}: {rest.said()[-800:]}"
    return "" if found == expected else f"{run}: {found} instead of {expected}"


def _second(words: tuple[str, ...], run: Path, expected: str) -> str:
    twice = phases.signalling("after forward", 31, signal.SIGTERM, signal.SIGTERM)
    life = live([*words, directory(run)], run.with_suffix(".log"), twice)
    if life.status != 128 + signal.SIGTERM:
        return f"status {life.status} instead of {128 + signal.SIGTERM}"
    rest = live([*words, f"ckpt_path={run}", directory(run)], run.with_suffix(".rest.log"))
    found = fingerprint(run) if rest.status == 0 else f"status {rest.status}: {rest.said()[-800:]}"
    return "" if found == expected else f"{run}: {found} instead of {expected}"
