"""One call of `export`, from the checkpoint to the verdict."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from runner.build.metrics import build_metrics
from runner.build.model import build_task_model_loss
from runner.checkpoint.digest import weights_sha256
from runner.config.app import Composition
from runner.config.errors import FAILED, UserError
from runner.config.schema.export import Export
from runner.data.sources.image_files import reading_steps
from runner.engine.evaluation import evaluate
from runner.engine.tasks import Task
from runner.runtime.device import configure_torch
from runner.tracking.console import Console
from runner.tracking.environment import versions
from runner.tracking.files import finite, write_json, writing
from runner.verbs._checkpoint import (
    FromCheckpoint,
    Settled,
    built,
    distinct,
    folder_for,
    given_to_model,
    known_data,
    listed,
    restored,
    run_directory_of,
    settle,
    splits_of,
)
from runner.verbs._work import guarded
from runner.verbs.export import formats
from runner.verbs.export.compare import Comparison, compare
from runner.verbs.export.formats import INPUT, INT8, OUTPUT, SUFFIXES, Normalizing, Run

_DESCRIPTION = "model.json"
_CPU = torch.device("cpu")


def run(cfg: DictConfig) -> float | None:
    """Export once: the entry point that Hydra calls.

    Returns:
        The largest relative difference of any format, for sweepers.

    Raises:
        SystemExit: with the exit status if it failed.
    """
    return guarded(_export, cfg)


def _export(composition: Composition) -> float:
    # With --json, standard output is one JSON object and nothing else.
    console = Console(None, progress=False, stream=sys.stderr if composition.values["json"] else None)
    settled = settle(composition, Export)
    # Everything below is about the model as it computes in float32 on the CPU, whatever it was trained on.
    config = dataclasses.replace(settled.config, channels_last=False)
    settled = dataclasses.replace(settled, config=config)
    chosen = list(dict.fromkeys(listed(config.format)))
    formats.require_packages(chosen)
    configure_torch(_CPU, config.threads, config.deterministic, False, False, False, None)
    for warning in settled.found.warnings:
        console.warn(warning)
    data = known_data(settled)
    task, model = restored(settled, data, _CPU)
    model.requires_grad_(False)
    images = _examples(settled, data, max(config.batch_sizes))
    exported: nn.Module = _with_preprocessing(settled, data, model) if config.include_preprocessing else model
    if "torchscript" in chosen:
        console.warn("torch deprecates TorchScript; torch_export is what it offers in its place")
    if config.include_preprocessing and config.transform.eval:
        console.warn("transform.eval is not part of what is exported: images go through it before")

    def fresh() -> nn.Module:
        again: nn.Module = built(settled, data)[1]
        return _with_preprocessing(settled, data, again) if config.include_preprocessing else again

    folder = folder_for(config.output, _beside(settled.found.path), config.output_root, "exports")
    own, files, found = formats.inferring(exported), dict[str, Path](), list[Comparison]()
    batches = [images[:size] for size in config.batch_sizes]
    for name in chosen:
        with _whole(folder / SUFFIXES[name]) as path:
            runs = formats.write(name, exported, images, path, fresh)
        files[name] = folder / SUFFIXES[name]
        found += compare(name, own, runs, batches)
    quantisation = None
    if config.int8:
        files["int8"] = folder / INT8
        with _whole(files["int8"]) as path:
            runs = formats.quantized(files["onnx"], path)
        found += compare("int8", own, runs, batches)
        quantisation = _accuracy(settled, model, runs, files)
    record = _record(settled, task, data, images, files, found)
    if quantisation is not None:
        record["int8"] = quantisation
    description = folder / _DESCRIPTION
    write_json(description, record)
    _show(record, found, console, [*files.values(), description])
    if config.json:
        print(json.dumps(finite(record | {"written": [str(path) for path in [*files.values(), description]]})))
    compared = [each for each in found if each.format != "int8"]
    apart = [each for each in compared if not each.max_rel <= config.tolerance]  # NaN is not
    if apart:
        worst = apart[0]
        print(
            f"error: {worst.format} differs from the model by {worst.max_rel:.2g} of its largest output at batch size "
            f"{worst.batch_size}, and tolerance={config.tolerance:g} allows less",
            file=sys.stderr,
        )
        raise SystemExit(FAILED)
    return max(each.max_rel for each in compared)


def _beside(checkpoint: Path) -> Path | None:
    directory = run_directory_of(checkpoint)
    return None if directory is None else directory / "export"


def _examples(settled: Settled[Export], data: FromCheckpoint, count: int) -> Tensor:
    """Images of noise as the exported model is given them: float32 and normalised, or uint8."""
    generator = torch.Generator().manual_seed(settled.config.seed)
    shape = (max(count, 2), data.channels, *data.image_size)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    if settled.config.include_preprocessing:
        return pixels
    return given_to_model(settled, _CPU)(pixels, torch.arange(len(pixels)), 0)


def _with_preprocessing(settled: Settled[Export], data: FromCheckpoint, model: nn.Module) -> Normalizing:
    scale, shift = given_to_model(settled, _CPU).of_bytes
    return Normalizing(model, scale, shift).eval()


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """Where to write a file, and others beside it, so that they appear only once they are complete."""
    with writing(path), tempfile.TemporaryDirectory(dir=path.parent, prefix=".export.") as scratch:
        yield Path(scratch) / path.name
        for file in Path(scratch).iterdir():
            os.replace(file, path.with_name(file.name))


def _accuracy(settled: Settled[Export], model: nn.Module, quantised: Run, files: dict[str, Path]) -> dict[str, Any]:
    """Evaluate the model with 8-bit weights, and the model itself, on the validation split.

    Raises:
        UserError: if the data is not there, or has no validation split.
    """
    config = settled.config
    splits = splits_of(settled, _CPU)
    with contextlib.closing(splits):
        if splits.val is None:
            raise UserError("int8: this data has no validation split to compare on\n    allowed: int8=false")
        task, _, loss = build_task_model_loss(config, splits, fetch_weights=False)
        results = {}
        for name, each in (("float", model), ("int8", _Outputs(quantised))):
            metrics = build_metrics(config, task, _CPU)
            limit = config.limit.eval_batches
            results[name] = evaluate(each, splits.val.loader, task.targets, loss, metrics, limit=limit)
    sizes = {"float": files["onnx"].stat().st_size, "int8": files["int8"].stat().st_size}
    return {"split": "val", "samples": splits.val.samples, "metrics": results, "bytes": sizes}


class _Outputs(nn.Module):
    """A function of images as a module, so that it is evaluated as a model is."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    def forward(self, images: Tensor) -> Tensor:
        return self._run(images)


def _record(
    settled: Settled[Export],
    task: Task,
    data: FromCheckpoint,
    images: Tensor,
    files: dict[str, Path],
    found: list[Comparison],
) -> dict[str, Any]:
    """What programs that use the files need to know."""
    config, contents = settled.config, settled.found.contents
    included = config.include_preprocessing
    weights, kind = settled.weights
    return {
        "checkpoint": str(settled.found.path),
        "global_step": contents["position"]["global_step"],
        "weights": kind,
        "weights_sha256": weights_sha256(weights),
        "model": str(config.model["_target_"]),
        "task": str(config.task["_target_"]),
        "classes": distinct(settled.classes),
        "input": {
            "name": INPUT,
            "shape": ["batch", *images.shape[1:]],
            "dtype": str(images.dtype).removeprefix("torch."),
            "values": "pixels from 0 to 255" if included else "normalised pixels, see preprocessing",
            "layout": "NCHW",
        },
        "output": {"name": OUTPUT, "shape": ["batch", task.outputs(data.classes)], "dtype": "float32"},
        "preprocessing": {
            "colours": "RGB" if data.channels == 3 else "grey" if data.channels == 1 else f"{data.channels} channels",
            "image_size": list(data.image_size),
            "data": config.data.dataset,
            "sample_eval": config.transform.sample_eval,
            "eval": config.transform.eval,
            "steps": _steps(settled, data),
            "scale": 1 / 255,
            "mean": config.data.normalize.mean,
            "std": config.data.normalize.std,
            "normalization_in_the_model": included,
        },
        "files": {
            name: {"file": path.name, "bytes": path.stat().st_size, "sha256": _sha256(path)}
            for name, path in files.items()
        },
        "tolerance": config.tolerance,
        "comparison": [dataclasses.asdict(each) for each in found],
        "versions": versions(),
    }


def _steps(settled: Settled[Export], data: FromCheckpoint) -> list[dict[str, Any]]:
    """All that becomes of an image file until the exported model is given it, in order."""
    config = settled.config
    shape = (data.channels, *data.image_size)
    steps = reading_steps(config.data, config.transform.sample_eval or [], shape) if data.channels in (1, 3) else []
    if config.transform.eval:
        steps.append({"step": "transform of batches", "transforms": config.transform.eval})
    steps.append(
        {"step": "layout", "axes": "channels, height, width", "order": "RGB" if data.channels == 3 else "grey"}
    )
    if config.include_preprocessing:
        return [*steps, {"step": "dtype", "dtype": "uint8", "values": "0 to 255"}]
    mean, std = config.data.normalize.mean, config.data.normalize.std
    return [
        *steps,
        {"step": "normalise", "dtype": "float32", "value": "(pixel / 255 - mean) / std", "mean": mean, "std": std},
    ]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _show(record: dict[str, Any], found: list[Comparison], console: Console, written: list[Path]) -> None:
    console.line(f"{record['checkpoint']}  step {record['global_step']}")
    rows = []
    for each in found:
        times = (f"{each.ms:.3f}", f"{each.model_ms:.3f}", f"{each.model_ms / each.ms:.2f}")
        rows.append([each.format, str(each.batch_size), f"{each.max_abs:.2g}", f"{each.max_rel:.2g}", *times])
    columns = ["format", "batch", "largest difference", "relative", "ms", "ms of the model", "times as fast"]
    console.table("compared with the model on the CPU, float32", columns, rows)
    if "int8" in record:
        measured = record["int8"]
        names = list(measured["metrics"]["float"])
        table = [[name, *(f"{measured['metrics'][kind][name]:.4f}" for kind in ("float", "int8"))] for name in names]
        table.append(["bytes", *(str(measured["bytes"][kind]) for kind in ("float", "int8"))])
        console.table(f"8-bit weights, {measured['samples']:,} samples of val", ["", "float", "int8"], table)
    for path in written:
        console.line(str(path))
