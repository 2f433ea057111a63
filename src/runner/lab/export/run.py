"""`export`: write a checkpoint in other formats, compare each with the model, and describe the files."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runner.base.errors import FAILED, UserError
from runner.base.files import replacing, write_json, writing
from runner.checkpoint.weights import weights_sha256
from runner.config.composition import Composition
from runner.config.schema.verbs import Export
from runner.lab.export import formats
from runner.lab.export.formats import FORMATS, INPUT, OUTPUT, Normalizing
from runner.run.from_checkpoint import (
    MODEL,
    ResolvedCheckpoint,
    activation_of,
    as_list,
    output_folder,
    resolve_checkpoint,
    run_directory_of,
    unique_names,
)
from runner.run.model import DataFacts, evaluated_batch, model_of
from runner.runtime.device import configure_torch
from runner.tasks.task import Task
from runner.tracking.environment import versions
from runner.tracking.verb_report import Report

_CPU = torch.device("cpu")


def run(composition: Composition) -> float:
    """Export a checkpoint.

    Returns:
        The largest relative difference of any format, for sweepers.

    Raises:
        SystemExit: with exit status 1 if a format differs from the model by more than `tolerance`.
    """
    report = Report(composition.values["json"])
    resolved = resolve_checkpoint(composition, Export, MODEL)
    # Everything below is about the model as it computes in float32 on the CPU, whatever it was trained on.
    config = dataclasses.replace(resolved.config, channels_last=False)
    resolved = dataclasses.replace(resolved, config=config)
    chosen = list(dict.fromkeys(as_list(config.format)))
    formats.require_packages(chosen)
    configure_torch(_CPU, config.threads, config.deterministic, cudnn_benchmark=False, tf32=False, detect_anomaly=False)
    report.warnings(resolved.found.warnings)
    data = resolved.data_facts()
    task, modules = resolved.restore_model(data, _CPU)
    # Exported models predict only
    model = model_of(modules).requires_grad_(False)
    if config.data.images is not None:
        data = _facts_of_samples(resolved)
    images = _examples(resolved, data, max(config.batch_sizes))
    if "torchscript" in chosen:
        report.warn("torch deprecates TorchScript; torch_export replaces it")
    if config.include_preprocessing and config.transform.eval:
        report.warn("transform.eval is not part of what is exported: apply it to images first")

    exported = model
    if config.include_preprocessing:
        exported = Normalizing(model, *resolved.input_pipeline(_CPU).of_bytes).eval()
    with torch.inference_mode():
        outputs = exported(images)
    if not isinstance(outputs, Tensor):
        problem = f"returns {type(outputs).__name__}; only models that return one tensor can be exported"
        raise UserError("model", problem, "a model that returns a tensor")
    run_directory = run_directory_of(resolved.found.path)
    default = None if run_directory is None else run_directory / "export"
    folder = output_folder(config.output, default, config.output_root, "exports")
    files, records = dict[str, Path](), dict[str, dict[str, Any]]()
    compared: list[dict[str, Any]] = []
    # Several batch sizes, because an export may fix the one that it was traced with
    batches = [images[:size] for size in config.batch_sizes]
    with report.counting("export", len(chosen)) as begin:
        for name in chosen:
            begin(name)
            files[name] = folder / FORMATS[name][0]
            # A file that is there is complete: other programs may watch the folder
            with _write_complete(files[name], config.output is not None) as path:
                loaded = formats.write(name, exported, images, path)
                records[name] = _file_record(path)
            compared += _compare(name, exported, loaded, batches)
    record = _record(resolved, task, data, images, outputs, files=records, compared=compared)
    written = [*files.values(), folder / "model.json"]
    write_json(written[-1], record, named=config.output is not None)
    report.line(resolved.described())
    _show(compared, report)
    report.lines(*written)
    report.json(record, written=[str(path) for path in written])
    # The files are written even if one differs, so that the difference can be studied
    worst = next((each for each in compared if not each["max_rel"] <= config.tolerance), None)  # NaN is worse, too
    if worst is not None:
        print(
            f"error: {worst['format']} differs from the model by {worst['max_rel']:.2g} of its largest output at batch "
            f"size {worst['batch_size']}, more than tolerance={config.tolerance:g}",
            file=sys.stderr,
        )
        raise SystemExit(FAILED)
    return float(max(each["max_rel"] for each in compared))


@torch.inference_mode()
def _compare(name: str, model: nn.Module, exported: nn.Module, batches: list[Tensor]) -> list[dict[str, Any]]:
    """Outputs of an exported model beside those of the model itself, at each batch size."""
    found = []
    for images in batches:
        expected, got = model(images).double(), exported(images).double()
        difference = float((expected - got).abs().max()) if expected.shape == got.shape else math.inf
        found.append(
            {
                "format": name,
                "batch_size": len(images),
                "max_abs": difference,
                # As a share of the largest output, or of 1 if that is larger.
                "max_rel": difference / max(1.0, float(expected.abs().max())),
            }
        )
    return found


def _facts_of_samples(resolved: ResolvedCheckpoint[Export]) -> DataFacts:
    """What is known of the image of samples of any kind, of which the first are read."""
    names = resolved.config.data.images or []
    with contextlib.closing(resolved.data(_CPU)) as splits:
        data: Any = evaluated_batch(splits).data
    fields = [data[name if isinstance(data, Mapping) else int(name)] for name in names]
    if len(fields) != 1 or not isinstance(fields[0], Tensor):
        kinds = ", ".join(type(field).__name__ for field in fields)
        problem = f"needs a model of one tensor (B, C, H, W), and data.images={names} gives this one a {kinds}"
        allowed = "predict for what it predicts, or runner.load(RUN) in Python for the model, such as a detector"
        raise UserError("export", problem, allowed)
    channels, height, width = fields[0].shape[1:]
    return DataFacts(resolved.classes, channels, (height, width))


def _examples(resolved: ResolvedCheckpoint[Export], data: DataFacts, count: int) -> Tensor:
    """Images of noise as the exported model takes them: float32 and normalised, or uint8."""
    generator = torch.Generator().manual_seed(resolved.config.seed)
    shape = (max(count, 2), data.channels, *data.image_size)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    if resolved.config.include_preprocessing:
        return pixels
    return resolved.input_pipeline(_CPU)(pixels, torch.arange(len(pixels)), 0)


@contextlib.contextmanager
def _write_complete(path: Path, named: bool) -> Iterator[Path]:
    """A path to write to; files get their names only once they are complete. For `named` see `replacing`."""
    # Large weights of ONNX lie in a second file beside the first, and its name is in the first.
    with writing(path), tempfile.TemporaryDirectory(dir=path.parent, prefix=".export.") as scratch:
        yield Path(scratch) / path.name
        for file in Path(scratch).iterdir():
            with file.open("rb") as content, replacing(path.with_name(file.name), named=named) as target:
                shutil.copyfileobj(content, target)


def _record(
    resolved: ResolvedCheckpoint[Export],
    task: Task,
    data: DataFacts,
    images: Tensor,
    outputs: Tensor,
    *,
    files: dict[str, dict[str, Any]],
    compared: list[dict[str, Any]],
) -> dict[str, Any]:
    """The description of the files for the programs that use them."""
    config = resolved.config
    included, normalize = config.include_preprocessing, config.data.normalize
    return {
        **resolved.record(),
        "weights_sha256": weights_sha256(resolved.weights[0]),
        "model": str(config.model["_target_"]),
        "task": str(config.task["_target_"]),
        "classes": unique_names(resolved.classes),
        "input": {
            "name": INPUT,
            "shape": ["batch", *images.shape[1:]],
            "dtype": str(images.dtype).removeprefix("torch."),
            "values": "pixels from 0 to 255" if included else "normalised pixels, see preprocessing",
            "layout": "NCHW",
        },
        "output": {"name": OUTPUT, "shape": ["batch", *outputs.shape[1:]], "dtype": "float32"},
        "activation": activation_of(task),
        "threshold": getattr(task, "threshold", None),
        "preprocessing": {
            "colours": {3: "RGB", 1: "grey"}.get(data.channels, f"{data.channels} channels"),
            "image_size": list(data.image_size),
            "data": config.data.dataset,
            "sample_eval": config.transform.sample_eval,
            "eval": config.transform.eval,
            "scale": 1 / 255,
            "mean": normalize.mean,
            "std": normalize.std,
            "normalization_in_the_model": included,
        },
        "files": files,
        "tolerance": config.tolerance,
        "comparison": compared,
        "versions": versions(),
    }


def _file_record(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": digest}


def _show(compared: list[dict[str, Any]], report: Report) -> None:
    rows = [
        [each["format"], str(each["batch_size"]), f"{each['max_abs']:.2g}", f"{each['max_rel']:.2g}"]
        for each in compared
    ]
    columns = ["format", "batch", "largest difference", "relative"]
    report.table("compared with the model on the CPU, float32", columns, rows)
