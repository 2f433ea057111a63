"""The comparison of runs with a baseline: the mean of each measure over repetitions, with a tolerance.

A measure is worse if its mean changed for the worse by more than the tolerance: the user's, or else the larger of `TOLERANCE` and
`DEVIATIONS` sample standard deviations of the baseline's runs. Times are only worse if the fastest repetition, too, is slower by
more than the tolerance: other programs and virtual machines slow all runs of some minutes. docs/reference/verbs/report.md explains
the rule.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runner.base.errors import UserError, nearest
from runner.base.files import finite
from runner.base.reading import is_number, read_regular
from runner.config.changes import changes_result
from runner.config.keys import within
from runner.lab.report.reading import Run, find_runs
from runner.lab.report.table import differing, differing_keys, repetitions, text_of
from runner.sweeps.rows import FAILED
from runner.sweeps.table import REPEATS, mean_and_deviation
from runner.tracking.formats import plus_minus

FORMAT = 1
TOLERANCE = {"metric": 0.005, "loss": 0.05, "step": 0.2, "memory": 0.05, "startup": 0.5}
"""Allowed changes: of a metric absolute (relative above 1), of the others relative to the baseline's mean."""
DEVIATIONS = 3
"""Standard deviations of the baseline's runs that are allowed in any case, unless the user sets a tolerance."""
_UNITS = {"step": "ms", "memory": "MiB", "startup": "s"}
_LABELS = {"loss": "training loss", "step": "time of a step", "startup": "start-up"}
_LARGEST = 2**26  # bytes
_POINTS = 100
_BUSY = 0.5  # share of the time that a run waited for a core
_LONGEST = 60  # characters of a value
_NOT_SETTINGS = ("ckpt_path", "data.root", *REPEATS)
Samples = dict[str, list[float]]


@dataclass(frozen=True)
class Measure:
    """One comparison, as texts for a table."""

    setting: str
    measure: str
    before: str
    now: str
    change: str
    allowed: str
    verdict: str  # `worse`, `better` or `same`


@dataclass(frozen=True)
class Comparison:
    """Runs compared with a baseline."""

    worse: bool  # whether anything got worse
    measures: list[Measure]  # every comparison
    reasons: list[str]  # what got worse, with what differs in settings and environment
    notes: list[str]  # what was not compared, and why


def measure(runs: Sequence[Run]) -> dict[str, Any]:
    """The content of a baseline file: the measures of each setting's repetitions, its config, and the environment."""
    # Repetitions of one setting are its spread; the seed is not a setting
    varied = [key for key in differing_keys(runs) if key not in _NOT_SETTINGS]
    settings = []
    for text, same in repetitions(runs, varied).items():
        config = next((run.config for run in same if run.config), {})
        kept = {key: each for key, each in config.items() if changes_result(key) and not within(key, _NOT_SETTINGS)}
        measured = [_of_run(run) for run in same if run.status == "finished"]
        failed = sum(run.status in FAILED for run in same)
        settings.append({"varied": json.loads(text), "config": kept, "runs": measured, "failed": failed})
    environment = next((run.environment for run in runs if run.environment), {})
    cpu, torch, git = (environment.get(name) or {} for name in ("cpu", "torch", "git"))
    devices = [device.get("name") for device in environment.get("devices") or []]
    # Times and memory are comparable only on the same machine
    machine = {"cpu": cpu.get("model"), "cores": cpu.get("usable"), "devices": devices, "threads": torch.get("threads")}
    code = {"runner": environment.get("runner"), "python": environment.get("python")}
    code |= {**(environment.get("packages") or {}), "commit": git.get("commit")}
    return {"format": FORMAT, "machine": machine, "code": code, "settings": settings}


def _of_run(run: Run) -> dict[str, Any]:
    """The measures of a run: final metrics, the mean of the training loss's curve, time of a step, memory and start-up."""
    monitor = run.monitor or ""
    names = (monitor, f"test/{monitor.partition('/')[2]}")
    metrics = {name: run.metrics[name] for name in names if name in run.metrics}
    modes = dict.fromkeys(metrics, run.mode)
    train = [record for record in run.records if record.get("split") == "train"]
    curve = [[each["global_step"], each["loss"]] for each in train if is_number(each.get("loss"))]
    # The first record contains start-up, unless there is no other.
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
    """The content of a baseline file."""
    if not any(setting["runs"] for setting in measured["settings"]):
        raise UserError("save_baseline", "needs a run that has finished", "other runs")
    return json.dumps(finite(measured), indent=2, ensure_ascii=False) + "\n"


def read_baseline(place: str | Path) -> dict[str, Any]:
    """The baseline in a file, or made from a run, a sweep or a folder."""
    path = Path(place)
    if not path.is_file():
        return measure(find_runs([path], "against")[0])
    try:
        found = json.loads(read_regular(path, _LARGEST))
        if found["format"] != FORMAT:
            raise ValueError
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        raise UserError("against", f"cannot be {path}: it is not a baseline", "a file from save_baseline=") from None
    return dict(found)


def compare(before: dict[str, Any], now: dict[str, Any], tolerance: Mapping[str, float]) -> Comparison:
    """Decide what got worse: `before` is the baseline, and `now` what `measure` found.

    `tolerance` has changes to allow instead of those in `TOLERANCE` and the spread of the baseline's runs. Raises `UserError` for a
    tolerance of something else, or if no setting is in the baseline.
    """
    # A misspelt tolerance would be no tolerance at all
    for name, value in tolerance.items():
        if name not in TOLERANCE:
            raise UserError(f"tolerance.{name}", "is not a measure", ", ".join(TOLERANCE), nearest(name, TOLERANCE))
        if not isinstance(value, int | float) or not value >= 0:
            raise UserError(f"tolerance.{name}", f"cannot be {value}", "0 or more; inf to allow any change")
    pairs, notes = _pairs(before["settings"], now["settings"])
    # What another machine, or other programs on it, would change is not compared
    skipped: tuple[str, ...] = ()
    if before["machine"] != now["machine"]:
        skipped, changed = tuple(_UNITS), _changes(before["machine"], now["machine"])
        notes.append(f"time, memory and start-up are not compared, because the machine is another: {changed}")
    elif any(
        run.get("waited", 0.0) > _BUSY for side in (before, now) for each in side["settings"] for run in each["runs"]
    ):
        skipped, why = ("step", "startup"), "because other programs used the machine during one of these runs"
        notes.append(f"time and start-up are not compared, {why}")
    if any(len(old["runs"]) == 1 for _, old, _ in pairs):
        notes.append("one run of the baseline shows no spread over seeds: the tolerances alone decide")
    measures, reasons = [], []
    for setting, old, new in pairs:
        was, is_now = _samples(old, new), _samples(new, old)
        modes = {name: mode for run in old["runs"] for name, mode in run["mode"].items()}
        own = list[Measure]()
        for name in [name for name in was if name in is_now and name not in (*skipped, "fastest")]:
            judged = _judge(setting, name, was, is_now, modes=modes, tolerance=tolerance)
            # Metrics come first. A lower loss alone means that the training has become easier, or overfits.
            if name == "loss" and judged.verdict == "better" and all(each.verdict != "better" for each in own):
                why = "lower without a better metric: is augmentation or regularisation missing?"
                judged = replace(judged, change=f"{judged.change}, {why}", verdict="worse")
            own.append(judged)
        measures += own
        bad = [f"{each.measure} {each.before} -> {each.now} ({each.change})" for each in own if each.verdict == "worse"]
        # A setting whose runs fail more often is worse, whatever the others measure
        if new["failed"] > old["failed"]:
            bad.append(f"{new['failed']} runs failed")
        if bad:
            settings, code = _changes(old["config"], new["config"]), _changes(before["code"], now["code"])
            known = {"settings that differ": settings, "environment": code}
            cause = "; ".join(f"{name}: {text}" for name, text in known.items() if text)
            cause = cause or "The settings and versions are the same: the code or the load of the machine changed"
            reasons.append(f"{f'{setting}: ' if setting else ''}{'; '.join(bad)}. {cause}")
    # Nothing was compared, which must not look like success
    if not measures and not reasons:
        allowed_runs = "runs of the same settings that have finished"
        raise UserError("against", "has nothing in common with these runs", allowed_runs)
    return Comparison(bool(reasons), measures, reasons, notes)


def _pairs(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> tuple[list[tuple[str, Any, Any]], list[str]]:
    """(name, setting of the baseline, setting of now), and notes of those that have no counterpart."""
    # One setting on each side is the same one, changed: what changed is the question.
    if len(before) == len(now) == 1:
        return [("", before[0], now[0])], []
    found: list[tuple[str, Any, Any]] = []
    notes: list[str] = []
    for new in now:
        name = " ".join(f"{key}={text_of(value)}" for key, value in new["varied"].items()) or "all"
        # Fewer settings vary in fewer runs, so that the whole config decides too.
        same = [old for old in before if old["varied"] == new["varied"] or old["config"] == new["config"]]
        found += [(name, old, new) for old in same[:1]]
        notes += [] if same else [f"{name} is not in the baseline"]
    return found, notes


def _samples(setting: dict[str, Any], other: dict[str, Any]) -> Samples:
    """The values of each measure, one for each run; the loss up to the step that both sides reach."""
    runs = setting["runs"]
    metrics = dict.fromkeys(name for run in runs for name in run["metric"])
    found = {name: [run["metric"][name] for run in runs if name in run["metric"]] for name in metrics}
    ends = [run["curve"][-1][0] for run in [*runs, *other["runs"]] if run["curve"]]
    # A longer run has a lower mean loss, so that only the steps that all reach count.
    curves = [[loss for step, loss in run["curve"] if step <= min(ends)] for run in runs if run["curve"]]
    found["loss"] = [statistics.fmean(curve) for curve in curves if curve]
    for name in _UNITS:
        found[name] = [run[name] for run in runs if is_number(run.get(name))]
    found["fastest"] = [run.get("fastest", run["step"]) for run in runs if is_number(run.get("step"))]
    return {name: values for name, values in found.items() if values}


def _judge(
    setting: str, name: str, before: Samples, now: Samples, *, modes: Mapping[str, str], tolerance: Mapping[str, float]
) -> Measure:
    """Compare the values of a measure, those of the baseline and those of now."""
    (was, deviation), (is_now, spread) = mean_and_deviation(before[name]), mean_and_deviation(now[name])
    kind = "metric" if name in modes else name
    limit = tolerance.get(kind, TOLERANCE[kind])
    # Accuracies are compared in points, larger numbers in percent
    unit = 1.0 if name in modes and abs(was) <= 1 else abs(was)
    room = limit * unit
    if kind not in tolerance and deviation is not None:
        room = max(room, DEVIATIONS * deviation)
    # For times and memory more is worse; a metric has its own direction
    worse_by = is_now - was if modes.get(name, "min") == "min" else was - is_now
    verdict = "worse" if worse_by > room else "better" if -worse_by > room else "same"
    if verdict == "worse" and name in ("step", "startup"):
        # Other programs slow some repetitions down, so the fastest one counts, too
        fastest, fastest_now = (min(each["fastest" if name == "step" else name]) for each in (before, now))
        verdict = "worse" if fastest_now - fastest > limit * fastest else "same"
    # A change of a mean of 0 has no percentage
    absolute = unit == 1.0 or was == 0
    suffix = f" {_UNITS[name]}" if name in _UNITS else ""
    return Measure(
        setting=setting,
        measure=_LABELS.get(name, name),
        before=f"{plus_minus(was, deviation)}{suffix} (n {len(before[name])})",
        now=f"{plus_minus(is_now, spread)}{suffix} (n {len(now[name])})",
        change=f"{is_now - was:+.3g}" if absolute else f"{(is_now - was) / unit:+.1%}",
        allowed="any" if limit == math.inf else f"{room:.2g}" if absolute else f"{room / unit:.0%}",
        verdict=verdict,
    )


def _changes(old: dict[str, Any], new: dict[str, Any]) -> str:
    def short(value: Any) -> str:
        return text if len(text := text_of(value)) <= _LONGEST else f"{text[:_LONGEST]} ..."

    return ", ".join(f"{key} was {short(was)}, now {short(now)}" for key, was, now in differing(old, new))
