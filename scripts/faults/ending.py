"""SIGKILL at every place of a run's end, with every logger: each line is there once, with the numbers of an untouched run."""

from __future__ import annotations

import csv
import functools
import json
import logging
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults.jobs import directory, whole
from faults.lives import OF_THE_CLOCK, Life, Prepare, live, without_clock
from faults.phases import signalling
from faults.table import Bench, Row

_WORDS = (
    "logger=all", "log.every_steps=7", "evaluate.test=true", "epochs=null", "max_steps=20", "evaluate.every_steps=6",
    "model.dropout=0.2", "limit.eval_batches=2",
)  # fmt: skip
_DUE = 5  # micro-batch, counted from 0, after which an evaluation is due
PREEMPTED = 75
Lines = dict[str, list[Any]]
"""What each log file holds, by its name; without numbers that depend on the clock."""


def section(bench: Bench) -> list[Row]:
    """The rows of this section."""
    words, most = whole(_WORDS), bench.counts["endings"]
    reference = bench.folder / "reference"
    places = _counted(words, reference, bench.folder / "places")
    expected = lines(reference)
    once = Row("ending", "SIGKILL at a place of the end of a run, all loggers compared line by line")
    for place in sorted(bench.draw.sample(range(1, places + 1), min(most or places, places))):
        once.count(_different(words, bench.folder / f"once_{place}", [place], expected), bench.say)
    chains = Row("ending", "chains of 2 or 3 SIGKILLs there")
    for number in range(most or 12):
        chain = [bench.draw.randrange(1, places + 1) for _ in range(2 if most else bench.draw.choice((2, 3)))]
        chains.count(_different(words, bench.folder / f"chain_{number}", chain, expected), bench.say)
    due = Row("ending", "SIGKILL after an evaluation that a signal had put off, all loggers compared line by line")
    for number, place in enumerate((3, 5, 7)[: most or None]):
        run = bench.folder / f"due_{number}"
        # The checkpoint is of the step whose evaluation is due, and the next one is never written before the kill.
        seldom = [*words, "checkpoint.every_steps=1000", "checkpoint.min_seconds=1000", directory(run)]
        first = live(seldom, run.with_suffix(".first.log"), signalling("after forward", _DUE, signal.SIGTERM))
        broken = "" if first.status == PREEMPTED else f"status {first.status}: {first.said()[-800:]}"
        second = live([*seldom, f"ckpt_path={run}"], run.with_suffix(".log"), _dying_after_evaluation(place))
        if not broken and second.status != -signal.SIGKILL:
            broken = f"status {second.status}: {second.said()[-800:]}"
        due.count(broken or _different(words, run, [], expected, [f"ckpt_path={run}"]), bench.say)
    return [once, chains, due]


def _counted(words: tuple[str, ...], run: Path, counter: Path) -> int:
    """Run without a fault; how many places its end has."""
    done = [0]

    def tell() -> None:
        done[0] += 1
        counter.write_text(str(done[0]))

    life = live([*words, directory(run)], run.with_suffix(".log"), functools.partial(telling, tell))
    assert life.status == 0, life.said()[-2000:]
    return int(counter.read_text())


def _different(
    words: tuple[str, ...], run: Path, places: list[int], expected: Lines, more: list[str] | None = None
) -> str:
    """Kill a run and its continuations at places of its end, let it end, and say which lines are not as expected."""
    more, log = more or [], run.with_suffix(".log")
    for place in places:
        life = live([*words, *more, directory(run)], log, dying(place))
        if life.status not in (0, -signal.SIGKILL):
            return _failed(run, life)
        if life.status == 0:
            break
        more = [f"ckpt_path={run}"] if (run / "checkpoints" / "last.safetensors").exists() else ["resume=auto"]
    else:
        life = live([*words, *more, directory(run)], log)
        if life.status != 0:
            return _failed(run, life)
    return difference(expected, lines(run))


def _failed(run: Path, life: Life) -> str:
    return f"{run}: status {life.status}: {life.said()[-1500:]}"


def telling(tell: Callable[[], None], armed: Callable[[Any], bool] | None = None) -> None:
    """Call `tell` around everything that touches a file of the run once its last step is taken.

    Args:
        tell: called before and after.
        armed: given the loop, whether to begin; after the last step if it is None.
    """
    from runner.base import files
    from runner.engine.loop import Loop
    from runner.run.run_directory import RunDirectory
    from runner.tracking.console import Console
    from runner.tracking.loggers import Csv, JsonLines, TensorBoard

    at: dict[str, Any] = {"loop": None}
    begin = Loop.__init__
    begins = armed or (lambda loop: loop.state.position.global_step >= loop.total_steps)

    @functools.wraps(begin)
    def begin_watched(self: Any, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        at["loop"] = self

    def tell_if_armed() -> None:
        if at["loop"] is not None and begins(at["loop"]):
            tell()

    Loop.__init__ = begin_watched  # type: ignore[method-assign]
    methods = [(logger, name) for logger in (JsonLines, Csv, TensorBoard) for name in ("log", "flush", "close")]
    others = [(Console, "metrics"), (RunDirectory, "write_summary"), (os, "replace"), (os, "fsync"), (os, "write")]
    for owner, name in [*methods, *others, (files, "write_json")]:
        original = getattr(owner, name)

        def call(*args: Any, original: Callable[..., Any] = original, **options: Any) -> Any:
            tell_if_armed()
            result = original(*args, **options)
            tell_if_armed()
            return result

        setattr(owner, name, call)


def dying(countdown: int) -> Prepare:
    """End the process with SIGKILL at a place of its end, counted from 1."""
    return functools.partial(telling, _dying(countdown))


def _dying_after_evaluation(countdown: int) -> Prepare:
    """End the process with SIGKILL at a place after its first evaluation."""

    def armed(loop: Any) -> bool:
        return bool(loop.state.last_metrics) and not loop.state.position.evaluation_due

    return functools.partial(telling, _dying(countdown), armed)


def _dying(countdown: int) -> Callable[[], None]:
    left = [countdown]

    def tell() -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return tell


def lines(run: Path) -> Lines:
    """What the log files of a run hold."""
    found: Lines = {}
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found["metrics.jsonl"] = [without_clock(record) for record in records]
    for path in sorted(run.glob("metrics_*.csv")):
        with path.open(newline="") as file:
            found[path.name] = [without_clock(row) for row in csv.DictReader(file)]
    return found | _scalars(run / "tensorboard")


def _scalars(folder: Path) -> Lines:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it warns of each restart
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if tag.split("/")[0] not in OF_THE_CLOCK]
    return {f"tensorboard {tag}": [(each.step, each.value) for each in events.Scalars(tag)] for tag in sorted(tags)}


def difference(expected: Lines, found: Lines) -> str:
    """The first difference between the log files of two runs, or an empty string."""
    for name in sorted({*expected, *found}):
        want, got = expected.get(name, []), found.get(name, [])
        for number in range(max(len(want), len(got))):
            pair = [side[number] if number < len(side) else "nothing" for side in (want, got)]
            if pair[0] != pair[1] and not _both_nan(pair):
                return f"{name}, line {number + 1}: {pair[1]} instead of {pair[0]}"
    return ""


def _both_nan(pair: list[Any]) -> bool:
    return all(isinstance(each, tuple) and math.isnan(each[1]) for each in pair)
