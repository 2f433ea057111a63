"""`audit`: two runs or checkpoints compared bit by bit, which it trains itself where none are given."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runner.base.errors import FAILED, ConfigError, UserError
from runner.checkpoint import find
from runner.config import keys, stored
from runner.config.composition import Composition
from runner.config.load import problems_with, resolve_config
from runner.config.schema.verbs import Audit
from runner.config.space import text_of
from runner.config.validate import shown
from runner.lab.short_runs import Stopwatch, callback, run_short, words_of
from runner.run.from_checkpoint import config_and_checkpoint
from runner.tracking.formats import HARDWARE_METRICS, amount, number
from runner.tracking.run_files import read_records
from runner.tracking.verb_report import Report

# Parts of a checkpoint that have to be the same, in the order in which one follows from the other.
PARTS = ("position", "model", "optimizer", "scheduler", "scaler", "averaged", "rng", "metrics", "classes")
_MISSING = object()
_MOST_ROWS = 40


def run(composition: Composition) -> float:
    """Compare two runs, or two checkpoints; a job of a sweep returns 1.0 if something differs, others exit with status 1."""
    report = Report(composition.values.get("json") is True)
    # Two runs that there are need no training
    if any(composition.values.get(side) is not None for side in ("a", "b")):
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
    given = keys.flatten(config.vary)
    now = keys.flatten(keys.to_plain(config))
    varied = {key: value if isinstance(value, list) else [now.get(key), value] for key, value in given.items()}
    sides = [{key: value[side] for key, value in given.items() if isinstance(value, list)} for side in (0, 1)]
    sides[1] |= {key: value for key, value in given.items() if not isinstance(value, list)}
    for settings in sides:
        if problems := problems_with(config, settings, composition):
            side = ", ".join(f"{key}={shown(value)}" for key, value in settings.items())
            raise UserError(f"vary: {side} cannot be run\n{ConfigError(problems)}") if side else ConfigError(problems)
    texts = [" ".join(f"{key}={shown(pair[side])}" for key, pair in varied.items()) for side in (0, 1)]
    title = f"a: {texts[0]}  b: {texts[1]}" if varied else "twice the same"
    report.line(f"audit of {config.name}  seed {config.seed}  {amount(config.steps, 'step')}  {title}")
    every_step = ("checkpoint.every_steps=1", f"checkpoint.keep={config.steps}", "log.every_steps=1")
    resumed = () if start is None else (f"ckpt_path={text_of(str(start.path))}",)
    words = words_of(composition, Audit, *every_step, *resumed, callback(Stopwatch, steps=config.steps))
    root = Path(config.output_root)
    root.mkdir(parents=True, exist_ok=True)
    # Beside the runs, as there is room for checkpoints
    with tempfile.TemporaryDirectory(prefix=".audit-", dir=root) as scratch:
        folders = []
        with report.counting("audit", 2) as begin:
            for name, settings in zip("ab", sides, strict=True):
                begin()
                folders.append(run_short(words, settings, Path(scratch) / name))
        record, warnings = compare(str(folders[0]), str(folders[1]), root)
    if start is not None and record["step"] == start.contents["position"]["global_step"]:
        allowed = "an earlier checkpoint, or a larger epochs or max_steps"
        raise UserError("ckpt_path", f"{start.path} is the end of its run: no step is left to compare", allowed)
    report.warnings(warnings)
    return record | {"a": texts[0], "b": texts[1], "vary": varied}


def _show(report: Report, record: Mapping[str, Any]) -> None:
    """Show what comparing two runs or checkpoints showed."""
    for title in ("config", "versions"):
        if rows := record[title]:
            report.table(title, ["key", "a", "b"], rows[:_MOST_ROWS])
    rows = [[part, str(count["differ"]), str(count["of"])] for part, count in record["parts"].items() if count["of"]]
    report.table(f"checkpoint of step {record['step']}", ["part", "differ", "of"], rows)
    if difference := record["difference"]:
        report.line(f"first difference: {difference['phase']} {difference['name']} at step {record['step']}")
        a, b = ("missing" if difference[side] is None else difference[side] for side in ("a", "b"))
        rows = [["shape", a if a == b else f"a {a}, b {b}"]] if a or b else []
        if apart := difference["amount"]:
            rows.append(["elements that differ", f"{apart['differing']:,} of {apart['elements']:,}"])
            for title, size in (("largest difference", apart["largest"]), ("largest, relative", apart["relative"])):
                rows.append([title, "not finite" if size is None else number(size)])
            rows.append([f"first, at {apart['place']}", f"a {apart['values'][0]!r}, b {apart['values'][1]!r}"])
        report.table("", ["what", "value"], rows or [["state", "is not the same"]])
    if at := record["log"]:
        values = f"a {at['a']!r}, b {at['b']!r}"
        report.line(f"logs differ first at step {at['global_step']}: {at['split']} {at['name']} {values}")
    if record["same"]:
        logs = f", and so are {record['log_lines']} lines of the logs" if record["log_lines"] else ""
        report.line(f"no difference: both checkpoints of step {record['step']} are the same bits{logs}")


def compare(a: str, b: str, runs: Path) -> tuple[dict[str, Any], list[str]]:
    """Compare two checkpoints; of two runs the first step that both have saved and that differs, and the logs.

    `a` and `b` are a file, a run directory, `last` or `best`, and `runs` is the folder with the runs of one name. Returns the
    record, and warnings. `same` is whether what was saved and logged is the same; settings and versions may differ. `step` is that
    of the checkpoints compared last, and `log` the first logged loss that differs, or another value where no loss does.
    """
    both = [find.load(path, runs, prefer="last", key=key) for key, path in (("a", a), ("b", b))]
    warnings = [*both[0].warnings, *both[1].warnings]
    folders = [None if Path(given).is_file() else found.path.parent for given, found in zip((a, b), both, strict=True)]
    first, parts = _differences(both[0].contents, both[1].contents)
    # Everything after the first step that differs follows from it, so earlier checkpoints tell more
    if first and folders[0] is not None and folders[1] is not None:
        others = {path.name: path for path in find.step_files(folders[1])}
        for path in reversed(find.step_files(folders[0])):
            if path.name not in others:
                continue
            pair = [find.load(str(each), runs, prefer="last") for each in (path, others[path.name])]
            earlier, counts = _differences(pair[0].contents, pair[1].contents)
            if earlier:
                both, first, parts = pair, earlier, counts
                break
    contents = [each.contents for each in both]
    settings = stored.differences(*(stored.load(each.contents["config"], str(each.path)) for each in both))
    log, lines = _logs(*folders)
    record = {
        "same": not first and log is None,
        "a": str(both[0].path),
        "b": str(both[1].path),
        "step": contents[0]["position"]["global_step"],
        "parts": parts,
        "difference": first,
        "config": [list(row) for row in settings],
        "versions": [list(row) for row in stored.differences(*(each["versions"] for each in contents))],
        "log": log,
        "log_lines": lines,
    }
    return record, warnings


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[dict[str, Any] | None, dict[str, dict[str, int]]]:
    """The first difference of the contents of two checkpoints, and for each part how many of its values differ.

    Of the difference the part, the place in it, both sides as shape and dtype, and the amount.
    """
    first: dict[str, Any] | None = None
    counts = dict[str, dict[str, int]]()
    for part in PARTS:
        whole = [side[part] for side in (a, b)]
        if part == "metrics":  # the loss summed up since the last line of the log depends on how often is logged
            whole = [{name: value for name, value in side.items() if name != "train"} for side in whole]
        ours, theirs = (dict(_leaves(side, "")) for side in whole)
        pairs = {at: (ours.get(at, _MISSING), theirs.get(at, _MISSING)) for at in dict.fromkeys([*ours, *theirs])}
        unlike = [at for at, pair in pairs.items() if not same(*pair)]
        counts[part] = {"differ": len(unlike), "of": len(pairs)}
        if unlike and first is None:
            x, y = pairs[unlike[0]]
            kinds = {"a": kind_of(x), "b": kind_of(y)}
            first = {"phase": part, "name": unlike[0] or part, **kinds, "amount": amount_of(x, y)}
    return first, counts


def _leaves(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Every tensor and every other value, by its dotted place."""
    if isinstance(value, Mapping):
        items: Any = value.items()
    elif isinstance(value, list | tuple) and any(isinstance(item, Tensor | Mapping | list | tuple) for item in value):
        items = enumerate(value)
    else:
        yield place, value
        return
    for key, item in items:
        yield from _leaves(item, f"{place}.{key}".lstrip("."))


def same(a: Any, b: Any) -> bool:
    """True if two values agree in every bit; any NaN is the same as any other."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return type(a) is type(b) and repr(a) == repr(b)
    return kind_of(a) == kind_of(b) and not bool(_unequal(*map(_plain, (a, b))).any())


def _plain(tensor: Tensor) -> Tensor:
    """A dense tensor on the CPU, complex numbers as pairs."""
    dense = tensor.detach().to("cpu")
    dense = dense if dense.layout == torch.strided else dense.to_dense()
    return torch.view_as_real(dense) if dense.is_complex() else dense


def _unequal(a: Tensor, b: Tensor) -> Tensor:
    """Where the bits of two plain tensors differ; 0.0 equals -0.0, but not its bits."""
    signs = a.signbit() != b.signbit() if a.is_floating_point() else False
    return ((a != b) | signs) & ~(a.isnan() & b.isnan())


def kind_of(value: Any) -> str | None:
    """Shape and dtype of a tensor, an empty string for another value, None for a missing one."""
    if isinstance(value, Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return None if value is _MISSING else ""


def amount_of(a: Any, b: Any) -> dict[str, Any] | None:
    """By how much two tensors or numbers differ; None if they cannot be subtracted.

    `elements` of each; `differing`, how many are not the same; `largest` absolute difference, and `relative`, the largest share of
    the larger of the two, each None if one of them is not finite; `place`, index of the first element that differs; `values` of
    both there.
    """
    if all(isinstance(each, int | float) for each in (a, b)):
        a, b = (torch.tensor(float(each), dtype=torch.float64) for each in (a, b))
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or kind_of(a) != kind_of(b):
        return None
    a, b = map(_plain, (a, b))
    unequal = _unequal(a, b)
    if not bool(unequal.any()):
        return None
    x, y = a[unequal].double(), b[unequal].double()
    apart, scale = (x - y).abs(), torch.maximum(x.abs(), y.abs())
    finite = math.isfinite(float(apart.max()))
    return {
        "elements": unequal.numel(),
        "differing": int(unequal.sum()),
        "largest": float(apart.max()) if finite else None,
        "relative": float(torch.where(scale > 0, apart / scale, 0.0).max()) if finite else None,
        "place": unequal.nonzero()[0].tolist(),
        "values": [float(x[0]), float(y[0])],
    }


def _logs(a: Path | None, b: Path | None) -> tuple[dict[str, Any] | None, int]:
    """The first logged value that differs, and how many lines both runs have; nothing of files that stand for themselves."""
    if a is None or b is None:
        return None, 0
    ours, theirs = _logged(a), _logged(b)
    unlike = [
        {"global_step": at[0], "split": at[1], "name": name, "a": value, "b": theirs[at][name]}
        for at, values in ours.items()
        for name, value in values.items()
        if value != theirs.get(at, {}).get(name, value)
    ]
    # The loss first: another metric can differ in a step at which no loss was logged
    unlike.sort(key=lambda value: value["name"] != "loss")
    return unlike[0] if unlike else None, len(ours.keys() & theirs.keys())


def _logged(checkpoints: Path) -> dict[tuple[int, str], dict[str, Any]]:
    """The log of a run by step and split, without what the clock says."""
    folder = checkpoints.parent if checkpoints.name == "checkpoints" else checkpoints
    skipped, found = (*HARDWARE_METRICS, "global_step", "split"), {}
    for line in read_records(folder / "metrics.jsonl"):
        kept = {name: value for name, value in line.items() if name not in skipped and not name.endswith("_per_s")}
        found[line["global_step"], line.get("split", "")] = kept
    return found
