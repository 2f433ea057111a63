"""SIGKILL at every micro-batch in every phase, and chains of kills, on the hardest configuration."""

from __future__ import annotations

from pathlib import Path

from faults.jobs import HARDEST, directory, whole
from faults.kills import continued
from faults.lives import fingerprint, live
from faults.phases import OTHER_PHASES, STEP_PHASES, dying
from faults.table import Bench, Row

_MICRO_BATCHES = 40


def section(bench: Bench) -> list[Row]:
    """The rows of this section."""
    words = whole(HARDEST)
    first = live([*words, directory(bench.folder / "reference")], bench.folder / "reference.log")
    assert first.status == 0, first.said()[-2000:]
    expected = fingerprint(bench.folder / "reference")
    places = [(phase, number) for number in range(_MICRO_BATCHES) for phase in STEP_PHASES]
    if bench.counts["places"]:
        places = bench.draw.sample(places, bench.counts["places"])
    rows = {phase: Row("sweep", f"SIGKILL {phase}, every micro-batch of 2 x 20") for phase in STEP_PHASES}
    for phase, number in places:
        run = bench.folder / f"{phase.replace(' ', '_')}_{number}"
        rows[phase].count(_chain(words, run, [(phase, number)], expected, must_strike=True), bench.say)
        _progress(bench, list(rows.values()), len(places))
    longest = 2 if bench.counts["places"] else 6
    chains = Row("sweep", f"chains of 2 to {longest} SIGKILLs, also while restoring and evaluating")
    for number in range(bench.counts["chains"]):
        chain = [_anywhere(bench) for _ in range(bench.draw.randint(2, longest))]
        chains.count(_chain(words, bench.folder / f"chain_{number}", chain, expected), bench.say)
        _progress(bench, [chains], bench.counts["chains"])
    return [row for row in [*rows.values(), chains] if row.injected]


def _progress(bench: Bench, rows: list[Row], total: int) -> None:
    done = sum(row.injected for row in rows)
    if done % 20 == 0:
        bench.say(f"  sweep: {sum(row.kept for row in rows)} of {done} as promised, {total - done} to come")


def _anywhere(bench: Bench) -> tuple[str, int]:
    """A place, counted from where a life starts."""
    phase = bench.draw.choice((*STEP_PHASES, *OTHER_PHASES))
    return phase, bench.draw.randrange(2) if phase in OTHER_PHASES else bench.draw.randrange(16)


def _chain(
    words: tuple[str, ...], run: Path, places: list[tuple[str, int]], expected: str, must_strike: bool = False
) -> str:
    """Kill a run and its continuations at the places, let it end, and say what was not as promised."""
    logs = run.with_suffix(".log")
    for place in places:
        more, run = continued(run, 1)
        life = live([*words, *more], logs, dying(*place))
        if life.status not in (0, -9) or (must_strike and life.status == 0):
            return f"{run}: status {life.status} at {place}: {life.said()[-1500:]}"
    more, run = continued(run, 1)
    life = live([*words, *more], logs)
    found = fingerprint(run) if life.status == 0 else f"status {life.status}: {life.said()[-1500:]}"
    return "" if found == expected else f"{run} after {places}: {found} instead of {expected}"
