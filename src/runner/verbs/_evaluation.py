"""The work of `eval`: a checkpoint, a split, and what comes out. Apart from the verb because it imports torch."""

from __future__ import annotations

import contextlib
import copy
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from runner.assembly.learner import build_learner, place, probe
from runner.assembly.metrics import build_metrics
from runner.checkpoint import find
from runner.checkpoint.digest import weights_sha256
from runner.checkpoint.weights import weights_of
from runner.config import stored
from runner.config.app import Composition
from runner.config.errors import UserError
from runner.config.resolve import checked, merged
from runner.config.schema.eval import EVAL_ONLY, Eval
from runner.data.assembly import Splits, assemble
from runner.engine.evaluation import evaluate
from runner.engine.state import load_weights
from runner.runtime.device import choose_device, configure_torch, prepare_repeating
from runner.runtime.precision import choose_precision
from runner.tracking.console import Console
from runner.tracking.files import write_json
from runner.tracking.run_directory import claim, timestamp
from runner.verbs._work import guarded


def run(cfg: DictConfig) -> float | None:
    """Evaluate once: the entry point that Hydra calls.

    Returns:
        The loss, for sweepers.

    Raises:
        SystemExit: with the exit status if it failed.
    """
    return guarded(_evaluate, cfg)


def settle(composition: Composition) -> tuple[find.Found, Eval, dict[str, Any]]:
    """The checkpoint and the config that it is evaluated with.

    Raises:
        UserError: with everything that is wrong.
    """
    values = composition.values
    if values.get("ckpt_path") is None:
        raise UserError("ckpt_path: is missing\n    allowed: a checkpoint file, a run directory, last or best")
    runs = Path(str(values["output_root"])) / str(values["name"])
    found = find.load(str(values["ckpt_path"]), runs, prefer="best")
    combined, _ = merged(found.contents["config"], str(found.path), composition)
    combined |= {key: values[key] for key in EVAL_ONLY}
    statistics_given = any(word.startswith("data.normalize") for word in composition.words)
    if not statistics_given and isinstance(combined.get("data"), dict):
        # Other data still has to look to the model like the data that it was trained on.
        combined["data"]["normalize"] = copy.deepcopy(_stored_data(found).get("normalize") or {})
    return found, checked(combined, composition, Eval), combined


def _stored_data(found: find.Found) -> dict[str, Any]:
    """The section `data` of the config in a checkpoint, empty if it has none."""
    data = stored.load(found.contents["config"], str(found.path)).get("data")
    return data if isinstance(data, dict) else {}


def _evaluate(composition: Composition) -> float:
    found, config, values = settle(composition)
    # With --json, standard output is one JSON object and nothing else.
    console = Console(None, progress=False, stream=sys.stderr if config.json else None)
    for warning in found.warnings:
        console.warn(warning)
    prepare_repeating(config.deterministic)
    device, _ = choose_device(config.device)
    switches = (config.cudnn_benchmark, config.tf32, False, config.matmul_precision)
    warnings = configure_torch(device, config.threads, config.deterministic, *switches)
    precision = choose_precision(config.amp, device)
    for warning in [*warnings, *precision.warnings, *_of_training_alone(composition.words)]:
        console.warn(warning)
    splits = assemble(
        config.data,
        config.transform,
        config.seed,
        device,
        config.evaluate.batch_size,
        config.channels_last,
        make_cache=False,
    )
    splits.skipped.open(None, console.warn)
    with contextlib.closing(splits):
        _check_classes(found, splits)
        split = splits.named(config.split)
        if split is None:
            raise UserError(f"split: this data has no '{config.split}' split\n    allowed: {', '.join(_names(splits))}")
        task, model, loss = build_learner(values, config, splits)
        place(model, loss, device, config.channels_last)
        probe(task, model, loss, splits)
        try:
            weights, kind = weights_of(found.contents, config.weights)
            load_weights(model, weights)
        except ValueError as error:
            raise UserError(f"{found.path}: {error}") from error
        metrics, tables = build_metrics(config, task, device), task.tables(device)
        scalars = evaluate(
            model,
            split.loader,
            task.targets,
            loss,
            metrics | tables,
            precision.autocast,
            config.limit.eval_batches,
        )
        with torch.inference_mode():
            computed = {name: metric.compute().tolist() for name, metric in tables.items()}
    if said := splits.skipped.summary():
        console.warn(said)
    classes = _distinct(found.contents["classes"])
    limit = config.limit.eval_batches
    samples = split.samples if limit is None else min(split.samples, limit * split.loader.batch_size)
    trained_on = _stored_data(found).get("name")
    name = config.split if config.data.name == trained_on else f"{config.data.name}_{config.split}"
    record: dict[str, Any] = {
        "checkpoint": str(found.path),
        "global_step": found.contents["position"]["global_step"],
        "weights": kind,
        "weights_sha256": weights_sha256(weights),
        "data": config.data.name,
        "split": config.split,
        "samples": samples,
        "metrics": {name: value for name, value in scalars.items() if name not in tables},
    }
    if "per_class" in computed:
        record["per_class"] = dict(zip(classes, computed["per_class"], strict=True))
    if "confusion" in computed:
        record["confusion"] = computed["confusion"]
    folder = _output_folder(config, found.path)
    written = _write(record, folder, name, classes)
    if config.json:
        print(json.dumps(record | {"written": [str(path) for path in written]}))
    else:
        _show(record, console, written)
    return float(record["metrics"]["loss"])


def _of_training_alone(words: list[str]) -> list[str]:
    """Warnings about keys of the line that only training has a use for."""
    given = {word.split("=")[0] for word in words}
    reasons = {
        "activation_checkpointing": "which computes no gradients",
        "compile": "which runs the model as it is",
    }
    return [f"{key} has no effect on eval, {reason}" for key, reason in reasons.items() if key in given]


def _distinct(classes: list[str]) -> list[str]:
    """Names of classes; those that several share with the number of their class."""
    count = Counter(classes)
    return [f"{name} ({index})" if count[name] > 1 else name for index, name in enumerate(classes)]


def _names(splits: Splits) -> list[str]:
    return [name for name in ("train", "val", "test") if splits.named(name) is not None]


def _check_classes(found: find.Found, splits: Splits) -> None:
    trained, given = list(found.contents["classes"]), list(splits.classes)
    if len(trained) != len(given):
        raise UserError(
            f"data: has {len(given)} classes, but the checkpoint was trained on {len(trained)}\n"
            f"    allowed: data with the classes {', '.join(trained[:20])}"
        )
    if trained != given and sorted(trained) == sorted(given):
        raise UserError(
            "data: has the checkpoint's classes in another order, so class numbers mean something else\n"
            f"    allowed: the order {', '.join(trained[:20])}"
        )


def _output_folder(config: Eval, checkpoint: Path) -> Path:
    if config.output is not None:
        folder = Path(config.output)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"output: cannot make the folder {folder}: {error.strerror}") from error
        return folder
    if checkpoint.parent.name == "checkpoints":
        return checkpoint.parent.parent
    return claim(Path(config.output_root) / "evaluations", timestamp())


def _write(record: dict[str, Any], folder: Path, name: str, classes: list[str]) -> list[Path]:
    path = folder / f"eval_{name}.json"
    write_json(path, record)
    if "confusion" not in record:
        return [path]
    from runner.tracking.plots import confusion_matrix

    plots = folder / "plots"
    plots.mkdir(exist_ok=True)
    picture = plots / f"confusion_{name}.png"
    title = f"{record['data']} {record['split']}, {record['samples']:,} samples"
    confusion_matrix(record["confusion"], classes, picture, title)
    return [path, picture]


def _show(record: dict[str, Any], console: Console, written: list[Path]) -> None:
    average = "" if record["weights"] == "raw" else f"  averaged weights ({record['weights']})"
    console.line(f"{record['checkpoint']}  step {record['global_step']}{average}")
    rows = [[name, repr(value)] for name, value in record["metrics"].items()]
    console.table(f"{record['data']} {record['split']}, {record['samples']:,} samples", ["metric", "value"], rows)
    if "per_class" in record:
        matrix = record.get("confusion")
        names = list(record["per_class"])
        rows = []
        for index, (name, value) in enumerate(record["per_class"].items()):
            row = [name, f"{value:.4f}"]
            if matrix:
                wrong = [(count, names[other]) for other, count in enumerate(matrix[index]) if other != index and count]
                worst = max(wrong, default=None)
                row += [f"{sum(matrix[index]):,}", f"{worst[1]} ({worst[0]:,})" if worst else ""]
            rows.append(row)
        columns = ["class", "accuracy"] + (["samples", "most often taken for"] if matrix else [])
        console.table("accuracy of each class", columns, rows)
    for path in written:
        console.line(str(path))
