"""`audit`: two runs or checkpoints compared, which it trains itself where none are given."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runner.base.errors import FAILED, ConfigError, UserError
from runner.config import keys
from runner.config.composition import Composition
from runner.config.frozen import to_plain
from runner.config.load import resolve_changes, resolve_config
from runner.config.schema.verbs import Audit
from runner.config.space import text_of
from runner.config.validate import shown
from runner.lab.audit.compare import compare
from runner.lab.short_runs import StopAfter, callback, run_short, words_of
from runner.run.from_checkpoint import config_and_checkpoint
from runner.tracking.formats import amount, number
from runner.tracking.verb_report import Report

_MOST_ROWS = 40


def run(composition: Composition) -> float:
    """Compare two runs, or two checkpoints.

    Returns:
        0.0 if nothing differs, otherwise 1.0, for sweepers.

    Raises:
        SystemExit: with exit status 1 if something differs, unless the job is one of a sweep.
    """
    values = composition.values
    report = Report(values.get("json") is True)
    # Two runs that there are need no training
    if values.get("a") is not None or values.get("b") is not None:
        config = resolve_config(composition, Audit)
        record, warnings = compare(str(config.a), str(config.b), Path(config.output_root) / config.name)
        report.warnings(warnings)
        report.lines(f"a: {record['a']}", f"b: {record['b']}")
    else:
        record = _trained(composition, report)
    _show(report, record)
    report.json(record)
    if not record["same"] and composition.job_dir is None:
        raise SystemExit(FAILED)
    return float(not record["same"])


def _trained(composition: Composition, report: Report) -> dict[str, Any]:
    """Train both sides for some steps, each in a separate process, and compare all that they save and log."""
    config, start = config_and_checkpoint(composition, Audit)
    # The keys of `vary`, however they are nested, with the values of both sides; a single value is that of b
    given = keys.flatten(config.vary) if config.vary else {}
    now = keys.flatten(to_plain(config))
    varied = {key: value if isinstance(value, list) else [now.get(key), value] for key, value in given.items()}
    sides = [{key: value[side] for key, value in given.items() if isinstance(value, list)} for side in (0, 1)]
    sides[1] |= {key: value for key, value in given.items() if not isinstance(value, list)}
    for settings in sides:
        _check(composition, config, settings)
    texts = [" ".join(f"{key}={shown(pair[side])}" for key, pair in varied.items()) for side in (0, 1)]
    title = f"a: {texts[0]}  b: {texts[1]}" if varied else "twice the same"
    report.line(f"audit of {config.name}  seed {config.seed}  {amount(config.steps, 'step')}  {title}")
    every_step = ("checkpoint.every_steps=1", f"checkpoint.keep={config.steps}", "log.every_steps=1")
    resumed = () if start is None else (f"ckpt_path={text_of(str(start.path))}",)
    words = words_of(composition, Audit, *every_step, *resumed, callback(StopAfter, steps=config.steps))
    root = Path(config.output_root)
    root.mkdir(parents=True, exist_ok=True)
    # Beside the runs, as there is room for checkpoints
    with tempfile.TemporaryDirectory(prefix=".audit-", dir=root) as scratch:
        folders = []
        with report.counting("audit", 2) as begin:
            for name, settings in zip("ab", sides, strict=True):
                begin()
                own = [f"{key}={text_of(value)}" for key, value in settings.items()]
                folders.append(run_short([*words, *own], Path(scratch) / name))
        record, warnings = compare(str(folders[0]), str(folders[1]), root)
    if start is not None and record["step"] == start.contents["position"]["global_step"]:
        allowed = "an earlier checkpoint, or a larger epochs or max_steps"
        raise UserError("ckpt_path", f"{start.path} is the end of its run: no step is left to compare", allowed)
    report.warnings(warnings)
    return record | {"a": texts[0], "b": texts[1], "vary": varied}


def _check(composition: Composition, config: Audit, settings: Mapping[str, Any]) -> None:
    """Refuse settings of a side that cannot be run."""
    _, problems = resolve_changes(config, settings, composition, "vary.")
    if problems:
        given = ", ".join(f"{key}={shown(value)}" for key, value in settings.items())
        raise UserError(f"vary: {given} cannot be run\n{ConfigError(problems)}") if settings else ConfigError(problems)


def _show(report: Report, record: Mapping[str, Any]) -> None:
    """Show what comparing two runs or checkpoints showed."""
    for title in ("config", "versions"):
        if rows := record[title]:
            report.table(title, ["key", "a", "b"], rows[:_MOST_ROWS])
    rows = [[part, str(count["differ"]), str(count["of"])] for part, count in record["parts"].items() if count["of"]]
    report.table(f"checkpoint of step {record['step']}", ["part", "differ", "of"], rows)
    if difference := record["difference"]:
        _show_difference(report, difference, record["step"])
    if at := record["log"]:
        values = f"a {at['a']!r}, b {at['b']!r}"
        report.line(f"logs differ first at step {at['global_step']}: {at['split']} {at['name']} {values}")
    if record["same"]:
        logs = f", and so are {record['log_lines']} lines of the logs" if record["log_lines"] else ""
        report.line(f"no difference: both checkpoints of step {record['step']} are the same bits{logs}")


def _show_difference(report: Report, difference: Mapping[str, Any], step: int) -> None:
    report.line(f"first difference: {difference['phase']} {difference['name']} at step {step}")
    a, b = ("missing" if difference[side] is None else difference[side] for side in ("a", "b"))
    rows = [["shape", a if a == b else f"a {a}, b {b}"]] if a or b else []
    if apart := difference["amount"]:
        largest, relative = (
            "not finite" if apart[name] is None else number(apart[name]) for name in ("largest", "relative")
        )
        rows += [
            ["elements that differ", f"{apart['differing']:,} of {apart['elements']:,}"],
            ["largest difference", largest],
            ["largest, relative", relative],
            [f"first, at {apart['place']}", f"a {apart['values'][0]!r}, b {apart['values'][1]!r}"],
        ]
    report.table("", ["what", "value"], rows or [["state", "is not the same"]])
