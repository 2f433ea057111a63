"""One call of `check`, from the config to the last line."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

from runner.build.batch_size import settle_batch_size
from runner.build.describe import describe
from runner.build.run import build_training, set_switches
from runner.checkpoint import find
from runner.config.app import Composition
from runner.config.errors import ConfigError, Problem, UserError, nearest
from runner.config.schema.check import Check as Settings
from runner.data.build import DataModule, build_data
from runner.engine.errors import Diverged
from runner.runtime.device import choose_device, prepare_repeating
from runner.tracking.console import Console
from runner.tracking.files import finite
from runner.verbs._checkpoint import resolve_config
from runner.verbs.check import (
    baselines,
    batches,
    data,
    labels,
    loop,
    loss,
    model,
    objective,
    outputs,
    reach,
    settings,
    shortcuts,
    splits,
    steps,
)
from runner.verbs.check.context import CheckContext, NotApplicable
from runner.verbs.check.deadline import OutOfTime, stop_after
from runner.verbs.check.report import CompletedCheck, Seen, record, seen_of, show
from runner.verbs.check.result import Check, Result, failed, join_names, out_of_time, passed, skipped, too_few

BAD, INCOMPLETE = 1, 3
_WHERE = "HYDRA_FULL_ERROR=1 shows where it was raised"
_SAMPLES = 64  # of a batch that is evaluated
_GROUPS = (
    *(data, labels, model, outputs, loss, loop, baselines),
    *(batches, splits, shortcuts, reach, objective, settings, steps),
)
CHECKS = [made for module in _GROUPS for made in vars(module).values() if isinstance(made, Check)]
# Groups and checks: first those that need no model, then a pass or two through it, then a few steps, then many.
_ORDER = (
    *("", "loss-of-samples", "loss-axis", "loss-broadcast", "learnable", "class-meaning"),
    *(
        "outputs",
        "loss",
        "reach",
        "objective",
        "model",
        "stale-gradients",
        "mode-in-training",
        "evaluation-leaves-state",
    ),
    *("steps", "overfit", "learning-rate", "training", "zero-input", "repeatability", "beats-baselines"),
)
_BUILD = Check("build", "config", "Data, model, loss and optimizer that do not go together", lambda _: passed(""))


def run(composition: Composition) -> float:
    """Make the checks.

    Returns:
        The number of checks that failed, for sweepers.

    Raises:
        SystemExit: with exit status 1 if a check failed, 3 if one was not decided, unless the job is one of a sweep.
    """
    config, values, found = resolve_config(composition, Settings, "best")
    chosen = select_checks(config)
    # With json=true, standard output is one JSON object and nothing else.
    console = Console(None, progress=False, stream=sys.stderr if config.json else None)
    began = time.monotonic()
    results, seen = run_checks(config, values, found, chosen, console, began)
    wrong = ("fail", "warn") if config.strict else ("fail",)
    bad = sum(result.verdict.status in wrong for result in results)
    seconds = time.monotonic() - began
    if config.json:
        print(json.dumps(finite(record(results, seen, bad > 0, seconds))))
    else:
        show(console, results, seen, seconds)
    lacking = any(result.verdict.lack for result in results)
    if (bad or lacking) and composition.job_dir is None:
        raise SystemExit(BAD if bad else INCOMPLETE)
    return float(bad)


def select_checks(config: Settings) -> list[Check]:
    """The checks that are asked for.

    Raises:
        ConfigError: if there is none of such a name, if one cannot be left out, or if none is left.
    """
    always = {_BUILD.group, _BUILD.name}
    names = [*dict.fromkeys(each.group for each in CHECKS), *(each.name for each in CHECKS)]
    allowed = {"only": [_BUILD.group, *names, _BUILD.name], "skip": names}
    problems = [
        Problem(key, f"'{name}' is always made, as the others need it", ", ".join(allowed[key]))
        if name in always
        else Problem(key, f"there is no check or group '{name}'", ", ".join(allowed[key]), nearest(name, allowed[key]))
        for key, given in (("only", config.only), ("skip", config.skip))
        for name in given
        if name not in allowed[key]
    ]
    if problems:
        raise ConfigError(problems)
    chosen = [
        each
        for each in CHECKS
        if (not config.only or {each.name, each.group} & set(config.only))
        and not {each.name, each.group} & set(config.skip)
    ]
    if not chosen and not always & set(config.only):
        left = f" of only=[{','.join(config.only)}]" if config.only else ""
        raise ConfigError([Problem("skip", f"leaves no check{left} to be made", "a shorter list")])
    return chosen


def run_checks(
    config: Settings,
    values: dict[str, Any],
    found: find.LoadedCheckpoint | None,
    chosen: Sequence[Check],
    console: Console,
    began: float,
) -> tuple[list[CompletedCheck], list[Seen]]:
    """Build what the run would, and make the checks: their results, and what was seen of each split."""
    set_switches(config, _device(config))
    until, late = began + config.budget_s, out_of_time(f"budget_s={config.budget_s:g} ran out")
    try:
        with stop_after(until - time.monotonic()):
            if config.data.batch_size == "auto":
                settle_batch_size(config, values, functools.partial(build_training, make_cache=False))
            splits = _assembled(config)
    except OutOfTime:
        return [CompletedCheck(each, late, 0.0) for each in (_BUILD, *chosen)], []
    except (MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:  # what a data set or a model of one's own raises has no end
        return [
            _built(began, error),
            *(CompletedCheck(each, skipped("the data was not built"), 0.0) for each in chosen),
        ], []
    with contextlib.closing(splits):
        context = CheckContext(config, values, splits, found, began)
        try:
            with stop_after(until - time.monotonic()):
                context.build()
        except OutOfTime:
            return [CompletedCheck(each, late, 0.0) for each in (_BUILD, *chosen)], []
        except (MemoryError, KeyboardInterrupt):
            raise
        except Exception as error:  # as above; the data are checked nevertheless
            results = [_built(began, error)]
        else:
            results = [_built(began)]
            console.header(f"check of {config.name}  seed {config.seed}", describe(config, context.training))
        broken: dict[str, str] = {}  # what the check raised that first raised it
        for each in sorted(chosen, key=_turn):
            before = time.monotonic()
            results.append(CompletedCheck(each, run_check(each, context, broken), time.monotonic() - before))
        places = {each.name: place for place, each in enumerate((_BUILD, *chosen))}
        return sorted(results, key=lambda result: places[result.check.name]), seen_of(context)


def _device(config: Settings) -> Any:
    prepare_repeating(config.deterministic)
    return choose_device(config.device)[0]


def _assembled(config: Settings) -> DataModule:
    size, last = min(config.evaluate.batch_size, _SAMPLES), config.channels_last
    data = dataclasses.replace(config.data, on_error="skip")  # what cannot be read is counted here, and not fatal
    return build_data(data, config.transform, config.seed, _device(config), size, last, make_cache=False)


def _built(start: float, error: Exception | None = None) -> CompletedCheck:
    if error is None:
        verdict = passed("data, model, loss and optimizer go together")
    elif isinstance(error, UserError):
        verdict = failed(" ".join(str(error).split()), "as the message says; `train` stops there too")
    else:
        verdict = failed(_describe(error), _WHERE)
    return CompletedCheck(_BUILD, verdict, time.monotonic() - start)


def _describe(error: Exception) -> str:
    """An error in one line; HYDRA_FULL_ERROR=1 shows all of it."""
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        traceback.print_exception(error)
    return " ".join(f"{type(error).__name__}: {error}".split())


def _turn(each: Check) -> int:
    """Checks are made in the order of what they find for their time: those that take many steps come last."""
    return _ORDER.index(each.name if each.name in _ORDER else each.group if each.group in _ORDER else "")


def run_check(each: Check, context: CheckContext, broken: dict[str, str]) -> Result:
    """What a check says; one that breaks off has failed, with what it raised, and others that raise the same are skipped."""
    if context.left <= 0:
        return out_of_time(f"budget_s={context.config.budget_s:g} is used up")
    try:
        context.used_stats = False
        with context.restored(), stop_after(context.left):
            verdict = each.run(context)
            # What was found was found; but that nothing was says little of a handful of images.
            few = context.too_few() if context.used_stats and verdict.status == "pass" else []
        return too_few(f"saw only {join_names(few)}") if few else verdict
    except OutOfTime:
        return out_of_time(f"budget_s={context.config.budget_s:g} ran out while it was running")
    except NotApplicable as error:
        return skipped(str(error))
    except (MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:  # what a model, a loss or a data set of one's own raises has no end
        told = _describe(error)
        if broken.setdefault(told, each.name) != each.name:
            return skipped(f"broke off like {broken[told]}")
        return failed(told, "a smaller optimizer.lr, or grad_clip.norm=1.0" if isinstance(error, Diverged) else _WHERE)
