"""A report as one HTML page that needs no network: page.html with its style, its script, and the runs as JSON."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import math
import re
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from runner.base.files import finite
from runner.base.reading import is_number, read_json, read_regular
from runner.base.secrets import mask_text, mask_values
from runner.lab.report.reading import Run, continued_by, lines_of
from runner.lab.report.table import by_task, differing_keys, monitored, text_of
from runner.sweeps.rows import WITHOUT_RESULT
from runner.sweeps.table import REPEATS
from runner.tracking.formats import HARDWARE_METRICS, WEIGHTS_STEP, amount, label
from runner.tracking.run_files import parse

_POINTS = 120  # of a curve
_PARSED = 2000  # lines of training in a metrics file; of longer ones, every second, third, ... line
_CURVES = 8
_CONFUSIONS, _CLASSES = 6, 50
_PICTURES, _PICTURE_BYTES = 8, 2_000_000
_NO_CURVES = {*HARDWARE_METRICS, WEIGHTS_STEP, "samples_per_s"}


def page(runs: Sequence[Run]) -> str:
    """The page for runs."""
    here = files("runner.lab.report")
    text = {name: here.joinpath(f"page.{name}").read_text(encoding="utf-8") for name in ("html", "css", "js")}
    tasks = [{"task": task} | content_of(group) for task, group in by_task(runs).items()]
    content = json.dumps(finite(mask_values(tasks)), separators=(",", ":"), default=str)
    # In JSON inside HTML, `<` could end the element.
    parts = {"STYLE": text["css"], "SCRIPT": text["js"], "TITLE": amount(len(runs), "run")}
    parts["DATA"] = content.replace("<", "\\u003c")
    return re.sub("%(STYLE|SCRIPT|TITLE|DATA)%", lambda mark: parts[mark[1]], text["html"])


def content_of(runs: Sequence[Run]) -> dict[str, Any]:
    """The content of `#data` about the runs of a task, which the page's script reads."""
    keys = differing_keys(runs)
    metric, mode = monitored(runs)
    order = {run.path: at for at, run in enumerate(runs)}
    steps: dict[str, int] = {}
    continued = continued_by(runs)
    settings = [key for key in keys if key not in REPEATS]
    rows = []
    for run in runs:
        after = continued.get(run.path)
        given = {key: run.value(key) for key in keys}
        # Values that are lists have to be text for a table
        values = {key: text_of(each) if isinstance(each, list | dict) else each for key, each in given.items()}
        rows.append(
            {
                "name": run.name,
                "path": str(run.path),
                "status": run.status,
                "lost": run.status in WITHOUT_RESULT,
                "error": mask_text(run.error) if run.error else None,
                "again": run.repeat or None,
                "time_s": run.value("time_s"),
                "setting": " ".join(f"{key}={text_of(values[key])}" for key in settings) or "all runs",
                "keys": values,
                # Six digits are enough to read, and keep the page small
                "metrics": {name: float(f"{value:.6g}") for name, value in (run.metrics | run.speed).items()},
                "curves": _curves(run, steps),
                "next": None if after is None else order[after],
                "resumed": run.summary.get("resumed_from"),
            }
        )
    names = dict.fromkeys(name for row in rows for name in row["curves"])
    # Pictures of the best runs are shown, as all of them would be too many
    ended = [run for run in runs if metric in run.metrics and run.status not in WITHOUT_RESULT]
    best_first = sorted(ended, key=lambda run: run.metrics[str(metric)] * (1 if mode == "min" else -1))
    return {
        "metric": metric,
        "mode": mode,
        "keys": keys,
        "settings": settings,
        "curves": sorted(names, key=lambda name: (name != metric, not name.endswith("/loss"), name))[:_CURVES],
        "labels": {name: label(name) for row in rows for name in row["metrics"]},
        "steps": [json.loads(text) for text in steps],
        "runs": rows,
        "confusions": [*itertools.islice(_confusions(best_first), _CONFUSIONS)],
        "pictures": [*itertools.islice(_pictures(best_first), _PICTURES)],
    }


def _curves(run: Run, steps: dict[str, int]) -> dict[str, list[Any]]:
    """For each metric of a split: the number of its list of steps, and its values, averaged over neighbours if there are many."""
    points: dict[str, list[tuple[int, float]]] = {}
    for record in _thinned(run.path / "metrics.jsonl"):
        split, step = record.get("split"), record["global_step"]
        if split not in ("train", "val"):
            continue
        for name, value in record.items():
            if name not in ("global_step", "epoch", "split") and name not in _NO_CURVES and is_number(value):
                points.setdefault(f"{split}/{name}", []).append((step, value))
    found = {}
    for name, curve in points.items():
        # A screen has fewer points than a long run has steps
        size = max(1, math.ceil(len(curve) / _POINTS))
        parts = [curve[at : at + size] for at in range(0, len(curve), size)]
        # Most runs log at the same steps, so that a list of steps is stored once for all of them.
        places = json.dumps([part[-1][0] for part in parts])
        values = [float(f"{math.fsum(value for _, value in part) / len(part):.4g}") for part in parts]
        found[name] = [steps.setdefault(places, len(steps)), values]
    return found


def _thinned(path: Path) -> list[dict[str, Any]]:
    lines = lines_of(path)
    every, found, count = max(1, len(lines) // _PARSED), [], 0
    for line in lines:
        if b'"split": "train"' in line:
            count += 1
            if count % every:
                continue
        if (record := parse(line)) is not None:
            found.append(record)
    return found


def _confusions(runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    """Confusion matrices that `eval` left in the directories of runs."""
    for run in runs:
        for path in sorted(run.path.glob("eval_*.json")):
            content = read_json(path) or {}
            matrix, classes = content.get("confusion"), list(content.get("per_class") or ())
            square = isinstance(matrix, list) and 0 < len(matrix) <= _CLASSES and len(classes) == len(matrix)
            if square and all(isinstance(row, list) and len(row) == len(classes) for row in matrix or ()):
                yield {"run": run.name, "split": content.get("split"), "classes": classes, "matrix": matrix}


def _pictures(runs: Sequence[Run]) -> Iterator[dict[str, str]]:
    """Pictures of runs: wrong predictions that `inspect` drew, and what was drawn while training."""
    for run in runs:
        errors = sorted(run.path.glob("inspect/*/errors.png"))[-1:]
        drawn = (run.path / "pictures" / f"{name}.png" for name in ("predictions", "train_batch"))
        for path in (*errors, *drawn):
            with contextlib.suppress(OSError):
                if (content := read_regular(path, _PICTURE_BYTES)).startswith(b"\x89PNG"):
                    src = f"data:image/png;base64,{base64.b64encode(content).decode()}"
                    yield {"run": run.name, "what": path.stem.replace("_", " "), "src": src}
