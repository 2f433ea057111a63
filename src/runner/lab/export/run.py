"""`export`: write a checkpoint in other formats, compare each with the model, and describe the files."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import inspect
import math
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runner.base.errors import FAILED, UserError, blame, require
from runner.base.files import replacing, write_json, writing
from runner.checkpoint.weights import weights_sha256
from runner.config.composition import Composition
from runner.config.schema.verbs import Export
from runner.data.module import callables
from runner.lab.export import hub
from runner.lab.export.accuracy import Accuracy
from runner.lab.export.formats import (
    EXAMPLES,
    FORMATS,
    INPUT,
    Inputs,
    Normalizing,
    Writer,
    images_of,
    outputs_of,
    quantized,
)
from runner.run import from_checkpoint
from runner.run.finetune import explaining, merged
from runner.run.from_checkpoint import ResolvedCheckpoint, output_folder, resolve_checkpoint
from runner.run.model import DataFacts, model_of
from runner.runtime.device import configure_torch
from runner.tasks.task import Task
from runner.tracking.environment import versions
from runner.tracking.formats import digits
from runner.tracking.verb_report import Report

_CPU = torch.device("cpu")
_INT8 = "onnx_int8"


def run(composition: Composition) -> float:
    """Export a checkpoint; returns the largest relative difference of any format, and exits with 1 if it exceeds `tolerance`."""
    report = Report(composition.values["json"])
    measures = composition.values["split"] is not None or composition.values["quantize"] is not None
    resolved = resolve_checkpoint(composition, Export, from_checkpoint.EVALUATED if measures else from_checkpoint.MODEL)
    # Everything below is about the model as it computes in float32 on the CPU, whatever it was trained on.
    config = dataclasses.replace(resolved.config, channels_last=False, matmul_precision=None, detect_anomaly=False)
    resolved = dataclasses.replace(resolved, config=config)
    chosen = _chosen(config)
    configure_torch(config, _CPU)
    report.warnings(resolved.found.warnings)
    data = resolved.data_facts()
    task, modules = resolved.restore_model(data, _CPU)
    samples = max(EXAMPLES, *config.batch_sizes)
    # Exported models predict only
    model, image, inputs = _prepared(resolved, task, model_of(modules).requires_grad_(False), data)
    description = getattr(model, "export_description", {})
    if measures and (inputs or description):
        raise UserError("split", "needs a model that takes one field of images, and no detector", "null")
    inputs = {name: _repeated(each, samples) for name, each in inputs.items()}
    inputs = inputs or {INPUT: _noise(resolved, image, samples)}
    if "torchscript" in chosen:
        report.warn("torch deprecates TorchScript; torch_export replaces it")
    if config.include_preprocessing and config.transform.eval:
        report.warn("transform.eval is not part of what is exported: apply it to images first")

    exported = model
    if config.include_preprocessing:
        exported = Normalizing(model, *resolved.input_pipeline(_CPU).of_bytes).eval()
    with torch.inference_mode():
        outputs = outputs_of(exported(*inputs.values()), samples)
    if clash := sorted(inputs.keys() & outputs.keys()):
        raise UserError("model", f"returns '{clash[0]}', which is the name of an input too", "another name")
    run_directory = from_checkpoint.run_directory_of(resolved.found.path)
    default = None if run_directory is None else run_directory / "export"
    folder = output_folder(config.output, default, config.output_root, "exports")
    # Several batch sizes, because an export may fix the one that it was traced with
    batches = [{name: each[:size] for name, each in inputs.items()} for size in config.batch_sizes]
    named, plain = config.output is not None, merged(config, exported)
    formats = {name: FORMATS[name] for name in chosen}
    if config.hub is not None:
        formats["safetensors"] = (FORMATS["safetensors"][0], hub.writer(resolved, data))
    accuracy = Accuracy(resolved, config.split or "val", report) if measures else None
    with contextlib.closing(accuracy) if accuracy is not None else contextlib.nullcontext():
        if accuracy is not None and config.quantize:
            source = folder / FORMATS["onnx"][0]
            formats[_INT8] = ("model.int8.onnx", lambda _, __, path: quantized(source, accuracy.calibration(), path))
        measure = (lambda _: {}) if accuracy is None else accuracy.metrics
        files, written, compared, metrics = _write(
            formats, exported, plain, batches, folder, report=report, named=named, measure=measure
        )
    record = _description(resolved, task, image, inputs, outputs) | description
    record |= {"files": files, "tolerance": config.tolerance, "comparison": compared, "versions": versions()}
    record |= {"split": config.split or "val", "metrics": metrics} if measures else {}
    written.append(folder / "model.json")
    write_json(written[-1], record, named=named)
    report.line(resolved.described())
    _show(compared, metrics, config.split or "val", report)
    # The files are written even if one differs, so that the difference can be studied
    held = [each for each in compared if each["format"] != _INT8]  # which is rounded, so its metrics count
    worst = next((each for each in held if not each["max_rel"] <= config.tolerance), None)  # NaN is worse, too
    if config.hub is not None:
        written += hub.describe(resolved, record, folder, named)
    report.lines(*written)
    if config.hub is not None and config.push and worst is None:
        record["hub"] = hub.push(config.hub, written)
        report.line(record["hub"])
    report.json(record, written=[str(path) for path in written])
    if worst is not None:
        apart = f"differs from the model by {worst['max_rel']:.2g} of its largest output at batch size {worst['batch_size']}"
        print(f"error: {worst['format']} {apart}, more than tolerance={config.tolerance:g}", file=sys.stderr)
        raise SystemExit(FAILED)
    return float(max(each["max_rel"] for each in held))


def _chosen(config: Export) -> list[str]:
    """The formats to write; raises `UserError` where packages or another format are missing."""
    if config.hub is not None and config.push:
        require("hub", "runner[huggingface]", "huggingface_hub", otherwise=", or push=false")
    given = [*([] if config.hub is None else ["safetensors"]), *from_checkpoint.as_list(config.format)]
    if "onnx" in given:
        others = ", ".join(name for name in FORMATS if name != "onnx")
        require("format", "runner[export]", "onnx", "onnxscript", "onnxruntime", otherwise=f", or {others}")
    elif config.quantize:
        raise UserError("quantize", "needs an ONNX model", "format=onnx")
    return list(dict.fromkeys(given)) or ["torch_export"]


def _prepared(
    resolved: ResolvedCheckpoint[Export], task: Task, model: Any, data: DataFacts
) -> tuple[Any, DataFacts, Inputs]:
    """The model to export, what is known of its images, and its inputs, empty if they are images."""
    if hasattr(model, "export_model"):
        model = model.export_model()
        return model, DataFacts(resolved.classes, model.channels, model.image_size), {}
    if resolved.config.data.images is not None:
        return model, *_inputs_of_samples(resolved, task, model)
    return model, data, {}


def _noise(resolved: ResolvedCheckpoint[Export], image: DataFacts, samples: int) -> Tensor:
    """Images of noise as the exported model takes them: float32 and normalised, or uint8; (samples, C, H, W)."""
    generator = torch.Generator().manual_seed(resolved.config.seed)
    shape = (samples, image.channels, *image.image_size)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    if resolved.config.include_preprocessing:
        return images
    return resolved.input_pipeline(_CPU)(images, torch.arange(samples), 0)


def _write(
    formats: Mapping[str, tuple[str, Writer]],
    model: nn.Module,
    plain: nn.Module,
    batches: list[Inputs],
    folder: Path,
    *,
    report: Report,
    named: bool,
    measure: Callable[[nn.Module], dict[str, float]],
) -> tuple[dict[str, dict[str, Any]], list[Path], list[dict[str, Any]], dict[str, dict[str, float]]]:
    """Write `plain`, the model without adapters, in all formats, and compare with the model; see `replacing` for `named`.

    Gives the files by format, all paths, the rows of comparisons, and the metrics by model.
    """
    files, compared, metrics = dict[str, dict[str, Any]](), list[dict[str, Any]](), {"model": measure(model)}
    written = list[Path]()
    with report.counting("export", len(formats)) as begin:
        for name, (file_name, write) in formats.items():
            begin(name)
            # A file that is there is complete: other programs may watch the folder
            with _write_complete(folder / file_name, named) as path:
                # Exporters can raise anything for a model that they cannot express
                with blame("format", f"{name} cannot express this model", "another format", OSError), torch.no_grad():
                    example = {key: _repeated(each[:1], EXAMPLES) for key, each in batches[0].items()}
                    loaded = write(plain, example, path)
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                written += sorted(folder / part.name for part in path.parent.iterdir())
                files[name] = {"file": path.name, "bytes": path.stat().st_size, "sha256": digest}
            compared += _compare(name, model, loaded, batches)
            metrics[name] = measure(loaded)
    return files, written, compared, metrics


def _show(compared: list[dict[str, Any]], metrics: dict[str, dict[str, float]], split: str, report: Report) -> None:
    differences = [
        [each["format"], str(each["batch_size"]), f"{each['max_abs']:.2g}", f"{each['max_rel']:.2g}"]
        for each in compared
    ]
    columns = ["format", "batch", "largest difference", "relative"]
    report.table("compared with the model on the CPU, float32", columns, differences)
    if names := list(metrics["model"]):
        rows = [[name, *(digits(found[each]) for each in names)] for name, found in metrics.items()]
        report.table(f"metrics of the split {split}", ["format", *names], rows)


@torch.inference_mode()
def _compare(name: str, model: nn.Module, exported: nn.Module, batches: list[Inputs]) -> list[dict[str, Any]]:
    """Outputs of an exported model beside those of the model itself, at each batch size."""
    rows = list[dict[str, Any]]()
    matches: list[Any] = [each.match_queries for each in model.modules() if hasattr(each, "match_queries")]
    for inputs in batches:
        size = len(next(iter(inputs.values())))
        expected, got = (outputs_of(each(*inputs.values()), size) for each in (model, exported))
        for match in matches:
            got = match(expected, got)
        found = {"max_abs": 0.0, "max_rel": 0.0}
        for key, own in expected.items():
            own, other = own.double(), got[key].double() if key in got else torch.empty(0)
            difference = float((own - other).abs().max()) if own.shape == other.shape else math.inf
            share = difference / max(1.0, float(own.abs().max()))  # of the largest output, or of 1 if that is larger
            # NaN is worse than any number
            worse = {"max_abs": difference, "max_rel": share}
            found = {each: worse[each] if not worse[each] <= found[each] else found[each] for each in found}
        rows.append({"format": name, "batch_size": size, **found})
    return rows


def _repeated(tensor: Tensor, samples: int) -> Tensor:
    return tensor[torch.arange(samples) % len(tensor)]


def _inputs_of_samples(resolved: ResolvedCheckpoint[Export], task: Any, model: nn.Module) -> tuple[DataFacts, Inputs]:
    """What is known of the image of samples of any kind, or the model's inputs if they are not one image, of a batch.

    The task's `export_inputs(batch)` says what they are; otherwise they are the field of the images, or what the model's
    `forward` names of the batch.
    """
    with contextlib.closing(resolved.data(_CPU)) as splits:
        data: Any = splits.evaluated_batch().data
    names, forward = resolved.config.data.images or [], inspect.signature(model.forward).parameters
    own = {name: each for name, each in forward.items() if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}
    if given := callable(getattr(task, "export_inputs", None)):
        with explaining("task", "its export_inputs cannot take a batch: "):
            data = task.export_inputs(data)
    elif len(names) == 1:
        field = images_of(data, names)
        if isinstance(field, Tensor) and field.ndim == 4:
            channels, height, width = field.shape[1:]
            return DataFacts(resolved.classes, channels, (height, width)), {}
    if isinstance(data, Mapping):
        found = {name: data[name] for name in own if name in data}
    else:
        values = tuple(data) if isinstance(data, tuple | list) else (data,)
        # Of what else there is in a batch, such as targets, a model takes nothing
        taken = len(values) if given else sum(each.default is each.empty for each in own.values())
        found = dict(zip(own, values[:taken], strict=False))
    # An exported program takes its inputs by their places
    places = [name for name, each in own.items() if each.kind != each.KEYWORD_ONLY]
    missing = [name for name, each in own.items() if each.default is each.empty and name not in found]
    fits = not missing and list(found) == places[: len(found)] and len(found) > 0
    if resolved.config.include_preprocessing:
        raise UserError(
            "include_preprocessing", "is true, and the model does not take one field of images alone", "false"
        )
    if given and (len(data) if isinstance(data, Mapping) else len(values)) != len(found):
        raise UserError("task", "its export_inputs gives what forward does not take", ", ".join(own))
    if not fits or not all(isinstance(value, Tensor) and value.ndim for value in found.values()):
        problem = f"cannot tell the inputs of {type(model).__name__}: forward takes {', '.join(own)}, and a batch has "
        kinds = data.items() if isinstance(data, Mapping) else found.items()
        problem += ", ".join(f"{type(value).__name__} {name}" for name, value in kinds) or f"a {type(data).__name__}"
        allowed = "export_inputs(batch) of the task, which gives tensors (B, ...): one, a tuple, or a dict by the names of forward"
        of_lists = any(isinstance(value, list) for value in found.values())  # as detectors of torchvision do
        allowed += ", without a gap" + "; for boxes model=rtdetr_r18 or model=transformers_detection" * of_lists
        raise UserError("task", problem, allowed)
    return DataFacts(resolved.classes, 0, (0, 0)), {name: found[name] for name in own if name in found}


@contextlib.contextmanager
def _write_complete(path: Path, named: bool) -> Iterator[Path]:
    """A path to write to; files get their names only once they are complete. For `named` see `replacing`."""
    # Large weights of ONNX lie in a second file beside the first, and its name is in the first.
    with writing(path), tempfile.TemporaryDirectory(dir=path.parent, prefix=".export.") as scratch:
        yield Path(scratch) / path.name
        for file in Path(scratch).iterdir():
            with file.open("rb") as content, replacing(path.with_name(file.name), named=named) as target:
                shutil.copyfileobj(content, target)


def _description(
    resolved: ResolvedCheckpoint[Export], task: Task, image: DataFacts, inputs: Inputs, outputs: Inputs
) -> dict[str, Any]:
    """What the programs that use the files have to know."""
    config = resolved.config
    included, normalize = config.include_preprocessing, config.data.normalize

    def described(name: str, tensor: Tensor) -> dict[str, Any]:
        return {"name": name, "shape": ["batch", *tensor.shape[1:]], "dtype": str(tensor.dtype).removeprefix("torch.")}

    taken, given = ([described(*each) for each in tensors.items()] for tensors in (inputs, outputs))
    preprocessing = None
    if image.channels:
        taken[0] |= {
            "values": "pixels from 0 to 255" if included else "normalised pixels, see preprocessing",
            "layout": "NCHW",
        }
        preprocessing = {
            "colours": {3: "RGB", 1: "grey"}.get(image.channels, f"{image.channels} channels"),
            "image_size": list(image.image_size),
            "data": config.data.dataset,
            "sample_eval": config.transform.sample_eval,
            "eval": config.transform.eval,
            "scale": 1 / 255,
            "mean": normalize.mean,
            "std": normalize.std,
            "normalization_in_the_model": included,
        }
        for transform in callables("transform.sample_eval", config.transform.sample_eval):
            preprocessing |= getattr(transform, "export_description", {})
    return {
        **resolved.record(),
        "weights_sha256": weights_sha256(resolved.weights[0]),
        "model": str(config.model["_target_"]),
        "task": str(config.task["_target_"]),
        "classes": from_checkpoint.unique_names(resolved.classes),
        "input": taken[0] if len(taken) == 1 else taken,
        "output": given[0] if len(given) == 1 else given,
        "activation": from_checkpoint.activation_of(task),
        "threshold": getattr(task, "threshold", None),
        "preprocessing": preprocessing,
        **getattr(task, "export_description", {}),
    }
