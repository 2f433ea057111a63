"""One call of `check`, from the config to the report."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import pkgutil
import time
import traceback
from collections import Counter, defaultdict
from typing import Any

from runner.base import durations
from runner.base.errors import FAILED, ConfigError, Problem, UserError, nearest
from runner.config.composition import Composition
from runner.config.schema.verbs import Check as Settings
from runner.lab.check import checks
from runner.lab.check.context import OF_DATA, CheckContext
from runner.lab.check.result import GROUPS, REGISTERED, Check, NotApplicable, Result, failed, join_names, need, passed
from runner.lab.check.sample import is_classes
from runner.run.describe import describe
from runner.run.from_checkpoint import config_and_checkpoint
from runner.runtime.device import configure_torch
from runner.tracking.console import Console
from runner.tracking.verb_report import Report

_MOST_CLASSES = 12  # that the report lists
_COSTS = {"build": 5, "readable": 5, "logits": 3, "frozen-parameters": 3, "stale-gradients": 5}  # in those of others
Results = dict[Check, tuple[Result, float]]  # the result of each check, and the seconds that it took


def build(context: CheckContext) -> Result:
    """Data, model, loss and optimizer that do not fit together."""
    context.build()
    return passed("data, model, loss and optimizer fit together")


BUILD = Check("config", build, any_task=True)

# Importing a module of the folder registers its checks: a new file needs no entry anywhere.
for module in sorted(each.name for each in pkgutil.iter_modules(checks.__path__)):
    importlib.import_module(f"{checks.__name__}.{module}")
CHECKS = tuple(sorted(REGISTERED, key=lambda each: GROUPS.index(each.group)))


def run(composition: Composition) -> float:
    """Run the checks and report them; exits with status 1 if some failed, while a job of a sweep returns how many."""
    began = time.monotonic()
    config, found = config_and_checkpoint(composition, Settings, "best")
    # An unknown name of a check is refused before anything is built
    chosen, report = select_checks(config), Report(config.json)
    context = CheckContext(config, found)
    configure_torch(config, context.device)
    with contextlib.closing(context):
        results = run_checks(context, chosen, report)
        seen, seconds = images_seen(context), time.monotonic() - began
    # With strict, a warning fails too, as a pipeline reads only the status
    bad = sum(result.status in (("fail", "warn") if config.strict else ("fail",)) for result, _ in results.values())
    not_run = len(chosen) + 1 - len(results)
    record = {
        "ok": not bad,
        "counts": dict(Counter(result.status for result, _ in results.values())),
        "seconds": round(seconds, 3),
        "seen": seen,
        "checks": [
            {"group": each.group, "name": each.name, "finds": each.finds, **vars(result), "seconds": round(taken, 3)}
            for each, (result, taken) in results.items()
        ],
        "not_run": not_run,
    }
    if not report.json(record):
        show(report, results, seen, seconds)
        if not_run:
            report.line(f"{not_run} checks were not run, as what they look at could not be built")
    if composition.job_dir is None and bad:
        raise SystemExit(FAILED)
    return float(bad)


def select_checks(config: Settings) -> list[Check]:
    """The checks that `only` and `skip` select."""
    names = [*dict.fromkeys(each.group for each in CHECKS), *(each.name for each in CHECKS)]
    allowed = {"only": [BUILD.group, *names, BUILD.name], "skip": names}
    problems = []
    for key, given in (("only", config.only), ("skip", config.skip)):
        for name in (each for each in given if each not in allowed[key]):
            problem, close = f"there is no check or group '{name}'", nearest(name, allowed[key])
            # The check that builds everything cannot be skipped
            if name in (BUILD.group, BUILD.name):
                problem, close = f"'{name}' always runs, because the others need it", ""
            problems.append(Problem(key, problem, ", ".join(allowed[key]), close))
    if problems:
        raise ConfigError(problems)
    only, skip = set(config.only), set(config.skip)
    of_each = {each: {each.name, each.group} for each in CHECKS}
    return [each for each, names in of_each.items() if (not only or names & only) and not names & skip]


def run_checks(context: CheckContext, chosen: list[Check], console: Console) -> Results:
    """Build the run and run the checks. If the build fails, only data that were built are checked."""
    results: Results = {}
    errors: dict[str, str] = {}
    limit = context.config.max_time
    ends = math.inf if limit is None else time.monotonic() + durations.seconds(limit)
    with console.counting("check", 1 + len(chosen), [_COSTS.get(each.name, 1) for each in (BUILD, *chosen)]) as begin:
        for each in (BUILD, *chosen):
            begin(each.name)
            before = time.monotonic()
            if before > ends and each is not BUILD and each.group not in OF_DATA:
                results[each] = Result("skip", f"not begun within max_time={limit}"), 0.0
            # Data are built first, and checked even if the rest could not be built
            elif each is BUILD or context.built or ("splits" in vars(context) and each.group in OF_DATA):
                results[each] = run_check(each, context, errors), time.monotonic() - before
            if each is BUILD and results[each][0].status == "pass":
                config = context.config
                console.header(f"check of {config.name}  seed {config.seed}", describe(config, context.training))
    return results


def run_check(each: Check, context: CheckContext, errors: dict[str, str]) -> Result:
    """The result of one check, after which the context is restored.

    One that raises has failed; later ones that raise the same are skipped: `errors` collects the first check of each.
    """
    try:
        if not each.any_task:
            need(not context.whole, "samples are not pairs of image and target")
            need(each.group in OF_DATA or context.supervised, "the task computes its steps itself")
        try:
            return each.run(context)
        # Each check begins with the same model, whatever the one before did to it
        finally:
            context.restore()
    except NotApplicable as reason:
        return Result("skip", str(reason))
    except MemoryError:
        raise
    except Exception as error:  # a custom model, loss or data set can raise anything
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            traceback.print_exception(error)
        text, fix = f"{type(error).__name__}: {error}", "HYDRA_FULL_ERROR=1 shows the traceback"
        if isinstance(error, UserError):
            text, fix = str(error), "as the message says; `train` stops there too"
        text = " ".join(text.split())
        # One cause often breaks several checks, and is reported once
        if errors.setdefault(text, each.name) != each.name:
            return Result("skip", f"raised the same error as {errors[text]}")
        return failed(text, fix)


def images_seen(context: CheckContext) -> dict[str, dict[str, Any]]:
    """For each split, if any check needed an image: how many `samples` it has, how many were `read`, and how many by class."""
    found: dict[str, dict[str, Any]] = {}
    for split, stats in vars(context).get("stats", {}).items():
        known = len(stats.targets) and is_classes(stats.targets)
        counts = Counter(stats.targets.tolist() if known else ())
        classes = {label: counts[number] for number, label in enumerate(context.splits.classes if known else ())}
        found[split] = {"samples": stats.samples, "read": stats.read, "classes": classes}
    return found


def show(console: Console, results: Results, seen: dict[str, dict[str, Any]], seconds: float) -> None:
    """Print a table of all results, what was seen of the images, and how many results there are of each kind."""
    rows, built = [], results[BUILD][0].status == "pass"
    names: dict[str, list[str]] = {"fail": [], "warn": [], "pass": [], "skip": []}
    skipped: dict[str, list[str]] = defaultdict(list)  # names of checks by the reason
    for check, (result, _) in results.items():
        names[result.status].append(check.name)
        if result.status == "skip":
            skipped[result.evidence].append(check.name)
        elif built or result.fix:  # of what was built in part, only what is wrong is of interest
            rows.append([check.group, check.name, result.status, result.evidence])
        # What a check looks for helps only where it found something
        if result.fix:
            rows.append(["", "", "", f"  looks for: {check.finds[0].lower()}{check.finds[1:]}"])
            rows.append(["", "", "", f"  fix: {result.fix}"])
    console.table("", ["group", "check", "result", "evidence"], rows)
    for reason, checks_skipped in skipped.items() if built else ():
        console.line(f"skipped ({reason}): {', '.join(checks_skipped)}")
    for split, of_split in seen.items():
        line, classes = f"saw {of_split['read']:,} of {of_split['samples']:,} samples of {split}", of_split["classes"]
        fewest = [f"{name} {classes[name]:,}" for name in sorted(classes, key=classes.__getitem__)]
        console.line(f"{line}: {join_names(fewest, most=_MOST_CLASSES)}" if classes else line)
    words = {"fail": "failed", "warn": "warned", "pass": "passed", "skip": "skipped"}
    listed = {status: f" ({', '.join(found)})" if status in ("fail", "warn") else "" for status, found in names.items()}
    counts = [f"{len(found)} {words[status]}{listed[status]}" for status, found in names.items() if found]
    console.line(f"{', '.join(counts)} in {seconds:.1f} s")
