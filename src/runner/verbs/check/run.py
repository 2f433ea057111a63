"""One call of `check`, from the config to the report."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from runner.build.batch_size import auto_batch_size
from runner.build.describe import describe
from runner.build.hardware import set_switches
from runner.checkpoint import find
from runner.config.app import Composition
from runner.config.errors import ConfigError, Problem, UserError, nearest
from runner.config.schema.verbs import Check as Settings
from runner.config.signals import raising_after
from runner.data.build import DataModule, build_data
from runner.engine.errors import Diverged
from runner.runtime.device import choose_device, prepare_repeating
from runner.tracking.console import Console
from runner.train import build_run
from runner.verbs._checkpoint import config_and_checkpoint
from runner.verbs._report import Report
from runner.verbs.check.context import CheckContext
from runner.verbs.check.report import CompletedCheck, images_seen, record, show
from runner.verbs.check.result import NotApplicable, Result, failed, join_names, out_of_time, skipped
from runner.verbs.check.table import BUILD, CHECKS, Check

FAILED, INCOMPLETE = 1, 3  # exit statuses
_TRACEBACK = "HYDRA_FULL_ERROR=1 shows the traceback"
_SAMPLES = 64  # of a batch of an evaluation

T = TypeVar("T")


class OutOfTime(BaseException):
    """The budget is used up. Not an `Exception`: a data set or a model that catches those must not catch this one."""


def run(composition: Composition) -> float:
    """Run the checks and report them.

    Returns:
        The number of checks that failed, for sweepers.

    Raises:
        SystemExit: with exit status 1 if a check failed, 3 if one could not run, unless the job is part of a sweep.
    """
    config, found = config_and_checkpoint(composition, Settings, "best")
    chosen = select_checks(config)
    report, began = Report(config.json), time.monotonic()
    completed, seen = run_checks(config, found, chosen, report)
    bad = sum(each.result.status in (("fail", "warn") if config.strict else ("fail",)) for each in completed)
    seconds = time.monotonic() - began
    if not report.json(record(completed, seen, bad > 0, seconds)):
        show(report, completed, seen, seconds)
    if composition.job_dir is None and (bad or any(each.result.lack for each in completed)):
        raise SystemExit(FAILED if bad else INCOMPLETE)
    return float(bad)


def select_checks(config: Settings) -> list[Check]:
    """The checks that `only` and `skip` select.

    Raises:
        ConfigError: if a name is unknown, if `skip` names the build, or if no check is left.
    """
    always = {BUILD.group, BUILD.name}
    names = [*dict.fromkeys(each.group for each in CHECKS), *(each.name for each in CHECKS)]
    allowed = {"only": [BUILD.group, *names, BUILD.name], "skip": names}
    problems = [
        Problem(key, f"'{name}' always runs, because the others need it", ", ".join(allowed[key]))
        if name in always
        else Problem(key, f"there is no check or group '{name}'", ", ".join(allowed[key]), nearest(name, allowed[key]))
        for key, given in (("only", config.only), ("skip", config.skip))
        for name in given
        if name not in allowed[key]
    ]
    if problems:
        raise ConfigError(problems)
    only, skip = set(config.only), set(config.skip)
    chosen = [
        each for each in CHECKS if (not only or {each.name, each.group} & only) and not {each.name, each.group} & skip
    ]
    if not chosen and not always & only:
        selected = f" of only=[{','.join(config.only)}]" if config.only else ""
        raise ConfigError([Problem("skip", f"leaves no check{selected}", "a shorter list")])
    return chosen


def run_checks(
    config: Settings,
    found: find.LoadedCheckpoint | None,
    chosen: Sequence[Check],
    console: Console,
) -> tuple[list[CompletedCheck], dict[str, dict[str, Any]]]:
    """Build the run, and run the checks: their results, and how many images of each split were read."""
    began = time.monotonic()
    set_switches(config, _device(config))
    late = [CompletedCheck(each, _late(config, "ran out"), 0.0) for each in (BUILD, *chosen)]
    built = _attempt(lambda: _build_data(config), began + config.budget_s - time.monotonic())
    if isinstance(built, OutOfTime):
        return late, {}
    if isinstance(built, Exception):
        others = [CompletedCheck(each, skipped("the data was not built"), 0.0) for each in chosen]
        return [CompletedCheck(BUILD, _build_failed(built), time.monotonic() - began), *others], {}
    config, splits = built
    with contextlib.closing(splits):
        context = CheckContext(config, splits, found, began)
        error = _attempt(context.build, context.left)
        if isinstance(error, OutOfTime):
            return late, {}
        # If the build failed, the data can still be checked.
        result = BUILD.run(context) if error is None else _build_failed(error)
        completed = [CompletedCheck(BUILD, result, time.monotonic() - began)]
        if error is None:
            console.header(f"check of {config.name}  seed {config.seed}", describe(config, context.training))
        errors: dict[str, str] = {}
        for each in sorted(chosen, key=lambda each: each.turn):
            before = time.monotonic()
            completed.append(CompletedCheck(each, run_check(each, context, errors), time.monotonic() - before))
        places = {each.name: place for place, each in enumerate((BUILD, *chosen))}
        return sorted(completed, key=lambda each: places[each.check.name]), images_seen(context)


def run_check(each: Check, context: CheckContext, errors: dict[str, str]) -> Result:
    """The result of one check. A check that raises has failed; later checks that raise the same are skipped.

    Args:
        each: the check.
        context: what it looks at; restored afterwards.
        errors: by error the first check that raised it; added to.
    """
    if context.left <= 0:
        return _late(context.config, "is used up")
    try:
        context.used_stats = False
        with context.restored(), time_limit(context.left):
            result = each.run(context)
            # A fault found in a few images is a fault; that a few images show none proves little.
            few = context.undersampled() if context.used_stats and result.status == "pass" else []
        return Result("skip", f"saw only {join_names(few)}", lack="images") if few else result
    except OutOfTime:
        return _late(context.config, "ran out while it was running")
    except NotApplicable as reason:
        return skipped(str(reason))
    except (MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:  # a custom model, loss or data set can raise anything
        text = _describe(error)
        if errors.setdefault(text, each.name) != each.name:
            return skipped(f"raised the same error as {errors[text]}")
        fix = "a smaller optimizer.lr, or grad_clip.norm=1.0" if isinstance(error, Diverged) else _TRACEBACK
        return failed(text, fix)


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `OutOfTime` in the block after that many seconds.

    A single call into torch is not interrupted. In threads other than the main one, and on systems without timers, nothing is.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
    else:
        with raising_after(seconds, OutOfTime):
            yield


def _late(config: Settings, what: str) -> Result:
    return out_of_time(f"budget_s={config.budget_s:g} {what}")


def _device(config: Settings) -> Any:
    prepare_repeating(config.deterministic)
    return choose_device(config.device)[0]


def _attempt(work: Callable[[], T], seconds: float) -> T | Exception | OutOfTime:
    """What `work` returns or raises within a time; custom data sets and models can raise anything."""
    try:
        with time_limit(seconds):
            return work()
    except (MemoryError, KeyboardInterrupt):
        raise
    except (Exception, OutOfTime) as error:
        return error


def _build_data(config: Settings) -> tuple[Settings, DataModule]:
    """The config, with the batch size that fits if it is auto, and the data."""
    if config.data.batch_size == "auto":
        config, _ = auto_batch_size(config, functools.partial(build_run, make_cache=False))
    size, last = min(config.evaluate.batch_size, _SAMPLES), config.channels_last
    data = dataclasses.replace(config.data, on_error="skip")  # the check `readable` counts images that cannot be read
    return config, build_data(data, config.transform, config.seed, _device(config), size, last, make_cache=False)


def _build_failed(error: Exception) -> Result:
    if isinstance(error, UserError):
        return failed(" ".join(str(error).split()), "as the message says; `train` stops there too")
    return failed(_describe(error), _TRACEBACK)


def _describe(error: Exception) -> str:
    """The error in one line; HYDRA_FULL_ERROR=1 also prints the traceback."""
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        traceback.print_exception(error)
    return " ".join(f"{type(error).__name__}: {error}".split())
