"""Whether runs got worse than a baseline: statistics over repetitions, with a tolerance for each measure.

A measure is worse if its mean changed for the worse by more than the tolerance, and Welch's t-test finds the change significant:
its one-sided p-value is below `ALPHA`, divided by the number of comparisons (Bonferroni). Times are only worse if the fastest
repetition, too, is slower by more than the tolerance: other programs and virtual machines slow all runs of some minutes, which
are therefore not independent. docs/reference/verbs/report.md explains the rule.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runner.config.changes import changes_result
from runner.config.errors import UserError, nearest
from runner.config.keys import within
from runner.config.reading import is_number, read_regular
from runner.reports.difference import differing
from runner.reports.reading import Run, find_runs
from runner.reports.table import differing_keys, less_is_better, repetitions, text_of
from runner.sweeps.rows import FAILED
from runner.sweeps.table import REPEATS, mean_and_deviation
from runner.tracking.files import finite
from runner.tracking.formats import plus_minus

FORMAT = 1
ALPHA = 0.01
TOLERANCE = {"metric": 0.005, "loss": 0.05, "step": 0.2, "memory": 0.05, "startup": 0.5}
"""Allowed changes: of a metric absolute (relative above 1), of the others relative to the baseline's mean."""
_UNITS = {"step": "ms", "memory": "MiB", "startup": "s"}
_OF_MACHINE = tuple(_UNITS)
_LARGEST = 2**26  # bytes
_POINTS = 100
_BUSY = 0.5  # share of the time that a run waited for a core
_LONGEST = 60  # characters of a value
_NOT_SETTINGS = ("ckpt_path", "data.root", *REPEATS)


@dataclass(frozen=True)
class Measure:
    """One comparison, as texts for a table."""

    setting: str
    measure: str
    before: str
    now: str
    change: str
    allowed: str
    verdict: str  # `worse`, `better`, `same`, or `not compared`
    p: float | None = None


@dataclass(frozen=True)
class Comparison:
    """Runs compared with a baseline.

    Attributes:
        worse: whether anything got worse.
        measures: every comparison.
        reasons: what got worse, with what differs in settings and environment.
        notes: what was not compared, and why.
    """

    worse: bool
    measures: list[Measure]
    reasons: list[str]
    notes: list[str]

    @property
    def title(self) -> str:
        """The result in a few words."""
        if self.worse:
            return "worse than the baseline"
        return "no worse than the baseline"


def measure(runs: Sequence[Run]) -> dict[str, Any]:
    """What a baseline file contains: the measures of each setting's repetitions, its config, and the environment."""
    varied = [key for key in differing_keys(runs) if key not in _NOT_SETTINGS]
    settings = []
    for text, same in repetitions(runs, varied).items():
        config = next((run.config for run in same if run.config), {})
        kept = {key: value for key, value in config.items() if changes_result(key) and not within(key, _NOT_SETTINGS)}
        measured = [_of_run(run) for run in same if run.status == "finished"]
        ended_badly = [run for run in same if run.status in FAILED]
        settings.append({"varied": json.loads(text), "config": kept, "runs": measured, "failed": len(ended_badly)})
    environment = next((run.environment for run in runs if run.environment), {})
    torch, packages = environment.get("torch") or {}, environment.get("packages") or {}
    machine = {
        "cpu": (environment.get("cpu") or {}).get("model"),
        "cores": (environment.get("cpu") or {}).get("usable"),
        "devices": [device.get("name") for device in environment.get("devices") or []],
        "threads": torch.get("threads"),
    }
    code = {"runner": environment.get("runner"), "python": environment.get("python"), **packages}
    code["commit"] = (environment.get("git") or {}).get("commit")
    return {"format": FORMAT, "machine": machine, "code": code, "settings": settings}


def _of_run(run: Run) -> dict[str, Any]:
    """The measures of a run: final metrics, the mean of the training loss's curve, time of a step, memory and start-up."""
    monitor = run.monitor or ""
    metrics = {
        name: run.metrics[name] for name in (monitor, f"test/{monitor.partition('/')[2]}") if name in run.metrics
    }
    modes = dict.fromkeys(metrics, run.mode)
    train = [record for record in run.records if record.get("split") == "train"]
    curve = [[each["global_step"], each["loss"]] for each in train if is_number(each.get("loss"))]
    rates = [each["samples_per_s"] for each in train[1:] or train if is_number(each.get("samples_per_s"))]
    found: dict[str, Any] = {"seed": run.config.get("seed"), "metric": metrics, "mode": modes}
    found["curve"] = curve[:: max(1, math.ceil(len(curve) / _POINTS))]
    if rates and min(rates) > 0:
        # Without the time in which other programs had the core.
        waited = run.summary.get("cpu_wait")
        alone = 1.0 - waited if is_number(waited) else 1.0
        found["step"] = 1000 * run.samples_per_step * alone * statistics.fmean(1 / rate for rate in rates)
        found["waited"] = 1 - alone
        found["fastest"] = 1000 * run.samples_per_step / max(rates)
    memory = [each["peak_memory_mib"] for each in train if is_number(each.get("peak_memory_mib"))]
    return found | {"memory": max(memory, default=None), "startup": run.metrics.get("startup_s")}


def baseline_text(measured: dict[str, Any]) -> str:
    """The content of a baseline file.

    Raises:
        UserError: if no run has finished.
    """
    if not any(setting["runs"] for setting in measured["settings"]):
        raise UserError("save_baseline", "needs a run that has finished", "other runs")
    return json.dumps(finite(measured), indent=2, ensure_ascii=False) + "\n"


def read_baseline(place: str | Path) -> dict[str, Any]:
    """The baseline in a file, or made from a run, a sweep or a folder.

    Raises:
        UserError: if there is none.
    """
    path = Path(place)
    if not path.is_file():
        return measure(find_runs([path], "against")[0])
    try:
        found = json.loads(read_regular(path, _LARGEST))
        if found["format"] != FORMAT:
            raise ValueError
        _check(found)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise UserError("against", f"cannot be {path}: it is not a baseline", "a file from save_baseline=") from None
    return dict(found)


def _check(found: dict[str, Any]) -> None:
    for setting in found["settings"]:
        for part in (found["machine"], found["code"], setting["config"], setting["varied"]):
            part.items()
        for run in setting["runs"]:
            values = [*run["metric"].values(), *(step for point in run["curve"] for step in point)]
            if not all(is_number(value) for value in values) or set(run["metric"]) != set(run["mode"]):
                raise ValueError


def compare(before: dict[str, Any], now: dict[str, Any], tolerance: Mapping[str, float]) -> Comparison:
    """Decide what got worse.

    Args:
        before: the baseline.
        now: what `measure` found.
        tolerance: changes to allow instead of those in `TOLERANCE`.

    Raises:
        UserError: for a tolerance of something else, or if no setting is in the baseline.
    """
    for name, value in tolerance.items():
        if name not in TOLERANCE:
            raise UserError(f"tolerance.{name}", "is not a measure", ", ".join(TOLERANCE), nearest(name, TOLERANCE))
        if not isinstance(value, int | float) or not value >= 0:
            raise UserError(f"tolerance.{name}", f"cannot be {value}", "0 or more; inf to allow any change")
    allowed = TOLERANCE | dict(tolerance)
    pairs, notes = _pairs(before["settings"], now["settings"])
    same_machine = before["machine"] == now["machine"]
    busy = same_machine and any(
        is_number(run.get("waited")) and run["waited"] > _BUSY for each in (before, now) for setting in each["settings"]
        for run in setting["runs"]
    )  # fmt: skip
    if busy:
        notes.append(
            "time and start-up are not compared, because other programs used the machine during one of these runs"
        )
    if not same_machine:
        changed = _changes(before["machine"], now["machine"])
        notes.append(f"time, memory and start-up are not compared, because the machine is another: {changed}")
    skipped = _OF_MACHINE if not same_machine else ("step", "startup") if busy else ()
    samples = [(_samples(old, new), _samples(new, old)) for _, old, new in pairs]
    shared = [[name for name in was if name in now_ and name not in skipped] for was, now_ in samples]
    measures, reasons, count = [], [], sum(map(len, shared))
    for (setting, old, new), (was, now_), names in zip(pairs, samples, shared, strict=True):
        own = [_judge(setting, name, [was[name], now_[name]], allowed, count, old, new) for name in names]
        own = _with_fit(own)
        measures += own
        bad = [f"{each.measure} {each.before} -> {each.now} ({each.change})" for each in own if each.verdict == "worse"]
        if new["failed"] > old["failed"]:
            bad.append(f"{new['failed']} runs failed")
        if bad:
            where = f"{setting}: " if setting else ""
            reasons.append(f"{where}{'; '.join(bad)}. {_cause(before, now, old, new)}")
    if not count and not reasons:
        raise UserError(
            "against", "has nothing in common with these runs", "runs of the same settings that have finished"
        )
    return Comparison(bool(reasons), measures, reasons, notes)


def _pairs(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> tuple[list[tuple[str, Any, Any]], list[str]]:
    """(name, setting of the baseline, setting of now), and what has no counterpart."""
    if len(before) == len(now) == 1:
        return [("", before[0], now[0])], []
    found, notes = [], []
    for new in now:
        name = " ".join(f"{key}={text_of(value)}" for key, value in new["varied"].items()) or "all"
        old = [each for each in before if each["varied"] == new["varied"]] or [
            each for each in before if each["config"] == new["config"]
        ]
        if old:
            found.append((name, old[0], new))
        else:
            notes.append(f"{name} is not in the baseline")
    return found, notes


def _samples(setting: dict[str, Any], other: dict[str, Any]) -> dict[str, list[float]]:
    """The values of each measure, one for each run; the loss up to the step that both sides reach."""
    runs = setting["runs"]
    found: dict[str, list[float]] = {}
    for run in runs:
        for name, value in run["metric"].items():
            found.setdefault(name, []).append(value)
    ends = [run["curve"][-1][0] for run in [*runs, *other["runs"]] if run["curve"]]
    curves = [[loss for step, loss in run["curve"] if step <= min(ends)] for run in runs if run["curve"]]
    found["loss"] = [statistics.fmean(curve) for curve in curves if curve]
    for name in _OF_MACHINE:
        found[name] = [run[name] for run in runs if is_number(run.get(name))]
    return {name: values for name, values in found.items() if values}


def _judge(
    setting: str, name: str, both: list[list[float]], allowed: dict[str, float], count: int, old: Any, now_: Any
) -> Measure:
    before, now = both
    is_metric = name in old["runs"][0]["metric"]
    was, new = statistics.fmean(before), statistics.fmean(now)
    up_is_worse = old["runs"][0]["mode"][name] == "min" if is_metric else True
    if is_metric and name != next(iter(old["runs"][0]["metric"])) and less_is_better(name):
        up_is_worse = True
    limit = allowed["metric" if is_metric else name]
    absolute = is_metric and abs(was) <= 1
    room = limit if absolute else limit * abs(was)
    worse_by = new - was if up_is_worse else was - new
    p_worse, p_better = _p(before, now, up_is_worse), _p(before, now, not up_is_worse)
    # One run on each side has no spread, so that only a large change counts.
    factor = 2 if p_worse is None else 1
    verdict, p = "same", p_worse
    if (
        _fastest_is_slower(name, old, now_, limit)
        and worse_by > factor * room
        and (p_worse is None or p_worse < ALPHA / count)
    ):
        verdict = "worse"
    elif -worse_by > factor * room and (p_better is None or p_better < ALPHA / count):
        verdict, p = "better", p_better
    change = f"{new - was:+.3g}" if absolute or was == 0 else f"{(new - was) / abs(was):+.1%}"
    told = f"{change}, p {p:.1g}" if p is not None else change
    unit = f" {_UNITS[name]}" if name in _UNITS else ""
    label = {"loss": "training loss", "step": "time of a step", "startup": "start-up"}.get(name, name)
    texts = (_spread(before) + unit, _spread(now) + unit, told)
    return Measure(
        setting,
        label,
        *texts,
        f"{factor * limit:g}" if absolute else f"{factor * limit:.0%}" if limit < 1e6 else "any",
        verdict,
        p,
    )


def _fastest_is_slower(name: str, old: Any, new: Any, limit: float) -> bool:
    """Whether the fastest repetition, too, is slower than allowed; true for measures that are not times."""
    if name not in ("step", "startup"):
        return True
    key = {"step": "fastest"}.get(name, name)
    was, now = (min(run.get(key, run[name]) for run in each["runs"] if is_number(run.get(name))) for each in (old, new))
    return bool(now - was > limit * was)


def _with_fit(measures: list[Measure]) -> list[Measure]:
    """A lower training loss without a better metric counts as worse: augmentation or regularisation may be missing."""
    if any("/" in each.measure and each.verdict == "better" for each in measures):
        return measures
    told = "lower without a better metric: is augmentation or regularisation missing?"
    return [
        replace(each, change=f"{each.change}, {told}", verdict="worse")
        if each.measure == "training loss" and each.verdict == "better"
        else each
        for each in measures
    ]


def _p(before: list[float], now: list[float], greater: bool) -> float | None:
    """One-sided p-value of Welch's t-test that `now` is greater (or smaller); None with one run on each side."""
    difference = statistics.fmean(now) - statistics.fmean(before)
    difference = difference if greater else -difference
    if len(before) == len(now) == 1:
        return None
    parts = [(statistics.variance(each), len(each)) if len(each) > 1 else None for each in (before, now)]
    both = [part or next(other for other in parts if other) for part in parts]
    errors = [variance / len(each) for (variance, _), each in zip(both, (before, now), strict=True)]
    error = math.fsum(errors)
    if error == 0:
        return 0.0 if difference > 0 else 1.0
    # Welch and Satterthwaite; a side with one run has the variance of the other one and brings no degree of freedom.
    freedom = error**2 / math.fsum(own**2 / (count - 1) for own, (_, count) in zip(errors, both, strict=True))
    if None in parts:
        freedom = both[0][1] - 1
    from scipy.special import stdtr

    return float(stdtr(freedom, -difference / math.sqrt(error)))


def _spread(values: list[float]) -> str:
    return plus_minus(*mean_and_deviation(values))


def _cause(before: dict[str, Any], now: dict[str, Any], old: dict[str, Any], new: dict[str, Any]) -> str:
    """What differs in settings and environment."""
    settings, code = _changes(old["config"], new["config"]), _changes(before["code"], now["code"])
    parts = [f"settings that differ: {settings}"] if settings else []
    parts += [f"environment: {code}"] if code else []
    return "; ".join(parts) or "The settings and versions are the same: the code or the load of the machine changed"


def _changes(old: dict[str, Any], new: dict[str, Any]) -> str:
    return ", ".join(f"{key} was {_short(was)}, now {_short(now)}" for key, was, now in differing(old, new))


def _short(value: Any) -> str:
    text = text_of(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
