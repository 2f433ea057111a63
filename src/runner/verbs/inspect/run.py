"""One call of `inspect`, from the config to the last line."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runner.build.describe import describe
from runner.build.run import Run
from runner.checkpoint import find, resume
from runner.config.app import Composition
from runner.config.resolve import resolve_config
from runner.config.schema.inspect import FEATURE_FILES, Inspect
from runner.config.secrets import mask_words
from runner.engine.position import Position
from runner.instrument.no_trace import evaluating
from runner.models.features import Extractor
from runner.tracking.console import Console
from runner.tracking.files import finite, write_atomically, write_json
from runner.tracking.formats import compact
from runner.tracking.run_directory import claim, timestamp
from runner.train import build_run
from runner.verbs._checkpoint import (
    ResolvedCheckpoint,
    check_classes,
    output_folder,
    resolve_checkpoint,
    run_directory_of,
)
from runner.verbs.inspect.errors import batches_of
from runner.verbs.inspect.features_file import write_features
from runner.verbs.inspect.layers import shape_text
from runner.verbs.inspect.page import Table, page
from runner.verbs.inspect.parts import PARTS, Inspection, split_of

_MOST_ROWS = 60


def run(composition: Composition) -> float:
    """Inspect a model.

    Returns:
        The number of parameters, for sweepers.
    """
    resolved: ResolvedCheckpoint[Inspect] | None = None
    if composition.values.get("ckpt_path") is None:
        config = resolve_config(composition, Inspect)
    else:
        resolved = resolve_checkpoint(composition, Inspect)
        config = resolved.config
    found = resolved.found if resolved else None
    # With json=true, standard output is one JSON object and nothing else.
    console = Console(None, progress=False, stream=sys.stderr if config.json else None)
    # Compiled code calls no hooks, and what is computed again in backward would be observed twice.
    plain = dataclasses.replace(config, compile=False, activation_checkpointing=False)
    # Batches are those of the epoch that the checkpoint stands in, from its beginning.
    start = dataclasses.replace(resume.made_of(found, "position", Position), batch=0) if found else None
    training = build_run(plain, start, make_cache=False)
    training.state.position = start or Position()  # which says what is frozen
    with contextlib.closing(training.data):
        training.data.bad_samples.open(None, console.warn)
        kind = ""
        if resolved is not None:
            check_classes(resolved.classes, training.data.classes)
            resolved.load_weights(training.model)
            kind = resolved.weights[1]
        where = (
            "untrained" if found is None else f"{found.path}{'' if kind == 'raw' else f', averaged weights ({kind})'}"
        )
        console.header(f"{config.name}  seed {config.seed}  {where}", describe(plain, training)[:2])
        for warning in [*(found.warnings if found else []), *training.warnings]:
            console.warn(warning)
        record: dict[str, Any] = {
            "checkpoint": str(found.path) if found else None,
            "global_step": found.contents["position"]["global_step"] if found else 0,
            "weights_are": kind or None,
            "overrides": mask_words(composition.overrides),
        }
        if config.features:
            record |= _written_features(config, training, found, composition, console)
        if not config.features or config.what is not None:
            record |= _inspected(config, training, found, composition, console)
        if said := training.data.bad_samples.summary():
            console.warn(said)
    if config.json:
        print(json.dumps(finite(record)))
    elif "folder" in record:
        print(record["folder"], flush=True)
    return float(sum(parameter.numel() for parameter in training.model.parameters()))


def _inspected(
    config: Inspect, training: Run, found: find.LoadedCheckpoint | None, composition: Composition, console: Console
) -> dict[str, Any]:
    """Inspect the parts that the config names; returns the content of `inspect.json`."""
    parts: list[str] = [*(config.what or (name for name in PARTS if name != "errors" or found is not None))]
    folder = _folder(config, found, composition)
    seen = Inspection(config, training, folder)
    for name in PARTS:
        if name in parts:
            PARTS[name](seen)
    tables = [part for part in seen.parts if isinstance(part, Table)]
    for line in seen.lines:
        console.line(line)
    for table in tables:
        _show(console, table)
    for note in seen.skipped:
        console.line(note)
    title = f"{config.name}: {type(training.model).__name__}"
    where = str(found.path) if found is not None else "untrained, as a run with this config and seed begins"
    lines = [where, *seen.lines, *seen.skipped]
    pictures = [part[0] for part in seen.parts if not isinstance(part, Table)]
    record = {"folder": str(folder), "what": [name for name in PARTS if name in parts], **seen.record}
    record["files"] = [path.name for path in pictures] + ["report.html"]
    write_atomically(folder / "report.html", page(title, lines, seen.parts).encode())
    write_json(folder / "inspect.json", record)
    for path in [*pictures, folder / "report.html", folder / "inspect.json"]:
        console.line(str(path))
    return record


def _show(console: Console, table: Table) -> None:
    """Show a table; of a long one the beginning, and the last row, which is the sum where there is one."""
    for note in table.notes:
        console.line(note)
    rows = [list(row) for row in table.rows]
    shown = rows if len(rows) <= _MOST_ROWS else [*rows[: _MOST_ROWS - 1], rows[-1]]
    console.table(table.title, list(table.columns), shown)
    if len(shown) < len(rows):
        console.line(f"{len(rows) - len(shown):,} more rows are in report.html")


def _folder(config: Inspect, found: find.LoadedCheckpoint | None, composition: Composition) -> Path:
    chosen = config.output if not config.features else None
    run = run_directory_of(found.path) if found is not None else None
    given = composition.job_dir or composition.run_dir
    if chosen is None and given is None and run is not None:
        return claim(run / "inspect", timestamp())
    return output_folder(chosen, given, config.output_root, "inspections")


def _written_features(
    config: Inspect, training: Run, found: find.LoadedCheckpoint | None, composition: Composition, console: Console
) -> dict[str, Any]:
    """Write features of a split, with the targets and the place of each sample in its data set."""
    split = split_of(config, training)
    features = Extractor(training.model, config.features).rows
    output = Path(config.output) if config.output is not None else None
    if output is not None and output.suffix in FEATURE_FILES:
        path = output_folder(str(output.parent), None, "", "") / output.name
    else:
        folder = _folder(config, found, composition) if output is None else output_folder(config.output, None, "", "")
        path = folder / f"features_{config.split}.npz"

    def batches() -> Iterator[dict[str, Tensor]]:
        with evaluating(training.model):
            for batch in batches_of(split, config.limit.eval_batches):
                with training.precision.autocast():
                    here = features(batch.images)
                yield {**here, "targets": batch.targets, "indices": batch.indices}

    shapes = write_features(batches(), path)
    rows = [[name, shape_text(shape), compact(float(torch.Size(shape).numel()))] for name, shape in shapes.items()]
    console.table(f"features of {config.data.name} {config.split}", ["array", "shape", "elements"], rows)
    console.line(str(path))
    return {"features": {"file": str(path), "split": config.split, "shapes": {n: list(s) for n, s in shapes.items()}}}
